"""The options of the commands: each is declared once, here, with its help; commands that share options take a group.

A group is a dataclass with one field per option. `command` turns a function with groups as parameters into one that
typer understands, with one parameter per option.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from qcompile import __version__
from qcompile.cli import console, environment, launching
from qcompile.errors import UsageError
from qcompile.recipes import RECIPES, parse_options
from qcompile.targets import TARGET_NAMES

if TYPE_CHECKING:
    from qcompile.runtime.llm import LLM
    from qcompile.runtime.sampling.params import SamplingParams

Artifact = Annotated[Path, typer.Argument(metavar="OUT", help="Artifact directory written by `qcompile build`.")]
Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|OUT",
        help="Checkpoint directory, name on the model hub, or artifact directory. A model is built when first used.",
    ),
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Checkpoint directory, GGUF file, or name on the model hub.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Remote = Annotated[bool, typer.Option("--allow-remote-code", help="Allow Python code of the checkpoint to run.")]
Target = Annotated[
    str,
    typer.Option(
        "--target", metavar="NAME", help=f"Target to compile for: {', '.join(TARGET_NAMES)}; `cpu` is this machine."
    ),
]
Recipe = Annotated[
    str,
    typer.Option(
        "--recipe", metavar="NAME|FILE", help=f"Number formats: {', '.join(RECIPES)}; or a TOML file of yours."
    ),
]
Head = Annotated[
    str | None,
    typer.Option("--head-dtype", metavar="TYPE", help="Output head: int8, nested, bf16 or f32. Default: the recipe's."),
]
Embedding = Annotated[
    str | None,
    typer.Option(
        "--embedding-dtype",
        metavar="TYPE",
        help="Table of token embeddings: auto (the checkpoint's type) or int8, which a tied output head in int8 "
        "shares. Default: the recipe's.",
    ),
]
_RANKS = (
    "Processes that run the model together, each with a part of its weights and of the KV cache: on CPUs, or one on "
    "each of N GPUs. Default: "
)
TensorParallel = Annotated[int | None, typer.Option("--tensor-parallel-size", min=1, metavar="N", help=f"{_RANKS}1.")]
LoadedRanks = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size",
        min=1,
        metavar="N",
        help=f"{_RANKS}1, or what the artifact was built for; under torchrun or srun, as many as were started.",
    ),
]
RequireSignature = Annotated[
    str | None,
    typer.Option(
        "--require-signature",
        metavar="KEY",
        help="Refuse an artifact that this public key has not signed: a file of keys, or a key as text (ed25519:...).",
    ),
]
PassFields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PASS.FIELD=VALUE",
        help="Set a field of a pass (see `qcompile passes`), or a rule of the recipe (rules.NAME={...}); repeatable.",
    ),
]


ExtraPasses = Annotated[
    list[str] | None,
    typer.Option(
        "--pass",
        metavar="PASS[@after=PASS]",
        help="Pass of another package to run, by module:Class or its installed name, after `raise` or another pass; "
        "repeatable.",
    ),
]


def divided(ranks: int | None) -> dict[str, str]:
    """The options of passes that divide a model over `ranks` processes."""
    return {"shard.ranks": str(ranks)} if ranks is not None and ranks > 1 else {}


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"qcompile {__version__}")
        raise typer.Exit


def root() -> typer.Typer:
    """The command without its subcommands: the options that come before a subcommand."""
    app = group("Compile PyTorch decoder language models to quantized kernels, and run them.")
    app.callback()(_before_subcommand)
    return app


def group(about: str) -> typer.Typer:
    """A command that has subcommands."""
    return typer.Typer(
        help=about,
        rich_markup_mode=None,
        add_completion=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _before_subcommand(
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="QCOMPILE_DEBUG", show_envvar=False, help="Show the traceback of an error."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def command(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with one parameter for each field of its parameters that are groups, and -q and -v, for typer."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    groups["verbosity"] = Verbosity
    parameters: list[inspect.Parameter] = []
    given_defaults = {name: each.default for name, each in inspect.signature(function).parameters.items()}
    for name, given_default in (given_defaults | {"verbosity": None}).items():
        if name not in groups:
            parameters.append(_parameter(name, hints[name], given_default))
            continue
        annotations = get_type_hints(groups[name], include_extras=True)
        for option in fields(groups[name]):
            default = inspect.Parameter.empty if option.default is MISSING else option.default
            parameters.append(_parameter(option.name, annotations[option.name], default))

    @functools.wraps(function)
    def flat(**given: Any) -> None:
        grouped = {
            name: kind(**{option.name: given.pop(option.name) for option in fields(kind)})
            for name, kind in groups.items()
        }
        grouped.pop("verbosity").apply()
        for name, options in grouped.items():
            if isinstance(options, Loading):
                ranks = launching.take_part(options.tensor_parallel_size)
                grouped[name] = replace(options, tensor_parallel_size=ranks)
        function(**given, **grouped)

    typed: Any = flat
    del typed.__wrapped__  # typer would read the function's own parameters
    typed.__signature__ = inspect.Signature(parameters)
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A parameter of a command, for an option that also has an environment variable."""
    typed = environment.with_variable(annotation)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=typed)


@dataclass(frozen=True)
class Verbosity:
    """How much a command prints on stderr beside errors."""

    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only: no progress, no notes.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print each step and its seconds.")] = False

    def apply(self) -> None:
        """Make it hold for this process."""
        if self.quiet and self.verbose:
            raise UsageError("--quiet and --verbose: give one of them")
        console.verbosity = console.QUIET if self.quiet else console.VERBOSE if self.verbose else console.NORMAL


def changed(options: Any, *but: str) -> str | None:
    """The first field of a group that does not have its default, except for those in `but`; None if there is none.

    What the environment sets does not count: it is meant for the commands that it concerns.
    """
    kind = type(options)
    names = (field.name for field in fields(options) if getattr(options, field.name) != field.default)
    return next((name for name in names if name not in but and not environment.sets(kind, name)), None)


# ---- compiling -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compilation:
    """What to compile a model to, as `build` and `doctor` take it."""

    target: Target = "cpu"
    recipe: Recipe = "w4a8"
    head_dtype: Head = None
    embedding_dtype: Embedding = None
    options: PassFields = None
    passes: ExtraPasses = None


@dataclass(frozen=True)
class DraftedCompilation(Compilation):
    """What to compile a model to, its drafts, and adapters that become part of it."""

    drafts: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            metavar="MODEL",
            help="Draft model or head, `mtp` (the checkpoint's own module) or `lookup`; repeatable.",
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora", metavar="DIR[=FACTOR]", help="LoRA adapter (PEFT) to merge into the weights; repeatable."
        ),
    ] = None
    tensor_parallel_size: TensorParallel = None

    def settings(self) -> dict[str, str]:
        """The options of passes. Raises UsageError for one that is not written PASS.FIELD=VALUE."""
        return parse_options(self.options or []) | divided(self.tensor_parallel_size)


@dataclass(frozen=True)
class Hub:
    """How a model comes from the model hub."""

    revision: Annotated[
        str | None, typer.Option("--revision", metavar="NAME", help="Branch, tag or commit of a model on the hub.")
    ] = None
    token: Annotated[
        str | None, typer.Option("--token", help="Access token of the hub. Default: HF_TOKEN, or the hub's login.")
    ] = None


@dataclass(frozen=True)
class Building(Hub):
    """How to build a model that is given in place of an artifact; None and "auto" are what fits this machine."""

    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="NAME|FILE",
            help=f"Number formats of a model: {', '.join(RECIPES)}; or a TOML file of yours. "
            "Default: what fits this machine.",
        ),
    ] = None
    target: Annotated[
        str | None, typer.Option("--target", metavar="NAME", help="Target to build a model for. Default: this machine.")
    ] = None
    device: Annotated[
        str,
        typer.Option("--device", metavar="auto|cpu|gpu", help="Where to run the model; auto: on a GPU if possible."),
    ] = "auto"
    options: PassFields = None
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild",
            help="Build a model although the cache has it; compile an artifact's kernels here, and load no other code.",
        ),
    ] = False
    allow_remote_code: Remote = False

    def given(self, *but: str) -> str | None:
        """The first option that is not at its default, as it is written, except for `but`; None if there is none."""
        name = changed(self, *but)
        return name and f"--{'set' if name == 'options' else name.replace('_', '-')}"


@dataclass(frozen=True)
class Inspection:
    """What a build shows of its stages."""

    dump_ir: Annotated[
        Path | None,
        typer.Option("--dump-ir", metavar="DIR", help="Write the graph of every stage to DIR, as text and SVG."),
    ] = None
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="PASS", help="Report what this pass did not rewrite, and why.")
    ] = None
    check: Annotated[
        bool, typer.Option("--check", help="Run the graph of every stage on a short text; record each pass's error.")
    ] = False


@dataclass(frozen=True)
class CalibrationText:
    """The text that weights are calibrated on."""

    calib: Annotated[
        Path | None,
        typer.Option(
            "--calib",
            metavar="FILE|sample|none",
            help='Calibration text: plain, or JSON lines with a "text" field; or the package\'s own text. '
            "Default: sample, for recipes that need a text.",
        ),
    ] = None
    samples: Annotated[
        int, typer.Option("--num-calibration-samples", min=1, metavar="N", help="Number of calibration samples.")
    ] = 128
    length: Annotated[
        int, typer.Option("--max-seq-length", min=2, metavar="TOKENS", help="Tokens per calibration sample.")
    ] = 1024
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed that chooses the calibration samples.")] = 0


@dataclass(frozen=True)
class BitBudget:
    """How many bits weights take on average, for recipes that mix widths."""

    bits: Annotated[
        float | None,
        typer.Option(
            "--target-bits", metavar="BITS", help="Average weight bits, mixing 4-bit and 8-bit output features."
        ),
    ] = None
    rise: Annotated[
        float | None,
        typer.Option(
            "--max-perplexity-increase",
            metavar="X",
            help="Use the fewest bits that keep the increase on --calib text within X.",
        ),
    ] = None
    study: Annotated[
        Path | None,
        typer.Option(
            "--study",
            metavar="FILE",
            help="With recipe auto: mix formats of whole linears by what `sensitivity --json` has measured.",
        ),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(
            "--target-size", metavar="SIZE", help="Most bytes of the linears' weights, such as 500MB, with --study."
        ),
    ] = None


# ---- loading -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loading:
    """How to load an artifact without drafts: arguments of `qcompile.load` by their names."""

    kv_cache_bytes: Annotated[
        int | None,
        typer.Option(
            "--kv-cache-bytes",
            min=1,
            metavar="N",
            help="KV cache size. "
            "Default: what a full batch needs, up to a quarter of free memory (GPU: its memory share).",
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, metavar="N", help="CPU threads. Default: one per core this process may use."),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens",
            min=1,
            metavar="N",
            help="Maximum number of tokens in a step, up to 512 on a CPU and 8,192 on a GPU. "
            "Default: 512 on a CPU, 2,048 on a GPU.",
        ),
    ] = None

    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            min=1,
            metavar="N",
            help="Longest sequence in tokens, prompt and reply; less takes less memory. Default: the model's context.",
        ),
    ] = None
    tensor_parallel_size: LoadedRanks = None
    require_signature: RequireSignature = None

    def load(self, path: Path, **more: Any) -> LLM:
        """`qcompile.load` with these options, and `more` of its arguments. Raises QCompileError."""
        import qcompile

        return qcompile.load(path, **self.arguments() | more)

    def arguments(self) -> dict[str, Any]:
        """The options as `qcompile.load` takes them.

        These commands give all sampling parameters themselves: the checkpoint's defaults have no effect.
        """
        environment.check_not_empty(environment.REQUIRE_SIGNATURE)
        return {"generation_config": "none"} | asdict(self)


@dataclass(frozen=True)
class DraftedLoading(Loading):
    """How to load an artifact that generates text, with its drafts."""

    gamma: Annotated[
        str,
        typer.Option("--gamma", metavar="N|auto", help="Tokens to draft per round, at most 15; 0 turns drafting off."),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float,
        typer.Option("--gpu-memory-utilization", metavar="SHARE", help="Share of the GPU's memory to use, up to 1."),
    ] = 0.9

    def arguments(self) -> dict[str, Any]:
        """The options as `qcompile.load` takes them. Raises UsageError for a gamma that is no number."""
        return super().arguments() | {"gamma": _drafted(self.gamma)}


@dataclass(frozen=True)
class ServedLoading(DraftedLoading):
    """How to load an artifact that is served."""

    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Whether prompts reuse the KV cache of earlier ones with the same beginning.",
        ),
    ] = True
    generation_config: Annotated[
        str,
        typer.Option(
            "--generation-config",
            metavar="auto|none",
            help="auto: requests sample as the checkpoint's generation_config.json recommends, unless they say how.",
        ),
    ] = "auto"
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora",
            metavar="NAME=DIR",
            help="LoRA adapter (PEFT) that requests choose as model NAME; repeatable.",
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The options as `qcompile.load` takes them. Raises UsageError for an adapter without a name."""
        return super().arguments() | {"lora": _named_adapters(self.lora or [])}


@dataclass(frozen=True)
class Adapting:
    """Which adapter the prompts of a command have."""

    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", metavar="NAME=DIR", help="LoRA adapter (PEFT) to load; repeatable, see --adapter."),
    ] = None
    adapter: Annotated[
        str | None,
        typer.Option("--adapter", metavar="NAME", help="Which adapter of --lora to use. Default: the only one."),
    ] = None

    def named(self) -> dict[str, str]:
        """The folders of the adapters by their names, as `qcompile.load` takes them. Raises UsageError."""
        return _named_adapters(self.lora or [])

    def chosen(self) -> str | None:
        """The name of the adapter to use; None is the model alone. Raises UsageError."""
        names = list(self.named())
        if self.adapter is None:
            if len(names) > 1:
                raise UsageError(f"--lora names {', '.join(names)}: choose one by --adapter")
            return names[0] if names else None
        if self.adapter not in names:
            known = f"it names {', '.join(names)}" if names else "give it as --lora NAME=DIR"
            raise UsageError(f"--adapter {self.adapter}: --lora names no such adapter: {known}")
        return self.adapter


def _named_adapters(given: list[str]) -> dict[str, str]:
    """`--lora` as `load` takes it."""
    named: dict[str, str] = {}
    for one in given:
        name, equals, folder = one.partition("=")
        if not (name and equals and folder):
            raise UsageError(f"--lora {one}: write NAME=DIR, a name for clients and the adapter's folder")
        if name in named:
            raise UsageError(f"--lora {one}: there are two adapters with this name")
        named[name] = folder
    return named


def _drafted(gamma: str) -> int | str:
    """`--gamma` as `load` takes it."""
    if gamma == "auto":
        return gamma
    if not (gamma.isascii() and gamma.isdigit() and len(gamma) < 10):
        raise UsageError(f"--gamma {gamma}: write a whole number, or auto")
    return int(gamma)


# ---- sampling ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How `run` samples: fields of SamplingParams by their names."""

    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, metavar="N", help="Maximum number of tokens to generate.")
    ] = 128
    temperature: Annotated[float, typer.Option("--temperature", help="Sampling temperature; 0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option("--top-k", help="Sample from the k most likely tokens; 0 is no limit.")] = 0
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the most likely tokens of this total probability.")
    ] = 1.0
    min_p: Annotated[float, typer.Option("--min-p", help="Minimum probability relative to the most likely token.")] = (
        0.0
    )
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1 discourages repetition.")
    ] = 1.0
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed for reproducible sampling.")] = None
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop before this text; repeatable.")
    ] = None

    def params(self, adapter: str | None = None) -> SamplingParams:
        """As `generate` takes it, with an adapter."""
        from qcompile import SamplingParams

        return SamplingParams(**asdict(self) | {"stop": self.stop or None, "lora": adapter})


@dataclass(frozen=True)
class ChatSampling:
    """How `chat` samples: fields of SamplingParams by their names."""

    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, metavar="N", help="Maximum number of tokens per reply.")
    ] = 256
    temperature: Annotated[float, typer.Option("--temperature", help="Sampling temperature; 0 is greedy.")] = 0.7
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the most likely tokens of this total probability.")
    ] = 0.95
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed for reproducible sampling.")] = None

    def params(self, adapter: str | None = None) -> SamplingParams:
        """As `generate` takes it, with an adapter."""
        from qcompile import SamplingParams

        return SamplingParams(**asdict(self), lora=adapter)


# ---- serving and measuring -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Answering:
    """How requests of the API are answered."""

    name: Annotated[str | None, typer.Option("--name", help="Model name for clients. Default: OUT's last part.")] = None
    tool_parser: Annotated[
        str | None,
        typer.Option("--tool-parser", help="Format of tool calls, or none. Default: what the chat template shows."),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        typer.Option("--reasoning-parser", help="Format of reasoning, or none. Default: what the chat template shows."),
    ] = None
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=1, metavar="N", help="Maximum number of samples that run at once.")
    ] = 16


@dataclass(frozen=True)
class Serving(Answering):
    """Where a server listens, whom it answers, and how much it takes on."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 means all interfaces.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000
    api_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            envvar="QCOMPILE_API_KEY",
            metavar="KEY",
            help="API key that clients must send; with several, one of them; repeatable.",
        ),
    ] = None
    isolate_keys: Annotated[
        bool,
        typer.Option("--isolate-keys", help="Share cached prefixes only among requests that send the same API key."),
    ] = False
    max_waiting: Annotated[
        int,
        typer.Option(
            "--max-waiting", min=0, metavar="N", help="Maximum number of samples that wait; more get HTTP 429."
        ),
    ] = 256
    request_timeout: Annotated[
        float,
        typer.Option("--request-timeout", min=0.1, metavar="S", help="Seconds in which a request must have arrived."),
    ] = 30.0
    max_connections: Annotated[
        int, typer.Option("--max-connections", min=1, metavar="N", help="Maximum number of open connections.")
    ] = 4096
    max_connections_per_address: Annotated[
        int,
        typer.Option(
            "--max-connections-per-address",
            min=1,
            metavar="N",
            help="Maximum number of open connections from one IP address.",
        ),
    ] = 1024
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin",
            metavar="ORIGIN",
            help="Web pages, as https://example.org, that may use the server, besides those of this machine; `*` means "
            "all; repeatable.",
        ),
    ] = None
    enable_sleep: Annotated[
        bool,
        typer.Option(
            "--enable-sleep",
            help="Let clients free the memory of weights and cache (POST /sleep) and take it again (/wake_up). "
            "Needs --api-key.",
        ),
    ] = False
    page: Annotated[bool, typer.Option("--page/--no-page", help="Whether / is a page to chat with the model.")] = True
    http_process: Annotated[
        bool | None,
        typer.Option(
            "--http-process/--no-http-process",
            help="Whether clients are answered in a process of its own, so that the engine never waits for it. "
            "Default: on a GPU.",
        ),
    ] = None
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas",
            min=1,
            max=256,
            metavar="N",
            help="Processes that each serve the whole model, behind one address. They divide the cores or GPUs.",
        ),
    ] = 1
    drain_seconds: Annotated[
        float,
        typer.Option(
            "--drain-seconds", min=0, max=86400, metavar="S", help="Time for open answers to end after SIGTERM."
        ),
    ] = 5.0

    @property
    def limits(self) -> tuple[float, int, int]:
        """The limits of connections: seconds of a request, connections, and connections from one address."""
        return self.request_timeout, self.max_connections, self.max_connections_per_address


@dataclass(frozen=True)
class Logging:
    """What a server tells of itself."""

    level: Annotated[
        str,
        typer.Option("--log-level", metavar="LEVEL", help="debug, info (with an access log), warning or error."),
    ] = "warning"
    form: Annotated[
        str, typer.Option("--log-format", metavar="text|json", help="Lines of text on stderr, or of JSON.")
    ] = "text"
    traces: Annotated[
        str | None,
        typer.Option("--otlp-endpoint", metavar="URL", help="OpenTelemetry collector (OTLP over HTTP) for traces."),
    ] = None


@dataclass(frozen=True)
class Speeds:
    """The tests of `bench`."""

    tg: Annotated[int, typer.Option("--tg", min=1, metavar="N", help="Tokens to decode one at a time.")] = 64
    pp: Annotated[str, typer.Option("--pp", metavar="N,N", help="Prompt lengths to prefill.")] = "512"
    verify: Annotated[str, typer.Option("--verify", metavar="N,N", help="Steps of N tokens, all with logits.")] = ""
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, metavar="N", help="Repetitions; medians are reported.")
    ] = 5


@dataclass(frozen=True)
class LoadTest:
    """`bench --serve`: what to ask a server, and how often."""

    serve: Annotated[
        bool,
        typer.Option("--serve", help="Measure a server under load: OUT may be the URL of one that runs."),
    ] = False
    concurrency: Annotated[
        str | None,
        typer.Option("--concurrency", metavar="N,N", help="Clients that each wait for their answer. Default: 1,4,16."),
    ] = None
    rate: Annotated[
        str,
        typer.Option("--rate", metavar="X,X", help="Requests per second, at random times (a Poisson process)."),
    ] = ""
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, metavar="S", help="How long each level sends requests.")
    ] = 20.0
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, metavar="N", help="Most requests of a level.")
    ] = None
    input_tokens: Annotated[
        str,
        typer.Option(
            "--input-tokens", metavar="N|MEAN:DEV", help="Tokens of a prompt: fixed, or normally distributed."
        ),
    ] = "128"
    output_tokens: Annotated[
        str,
        typer.Option(
            "--output-tokens", metavar="N|MEAN:DEV", help="Tokens of an answer: fixed, or normally distributed."
        ),
    ] = "64"
    shared_prefix: Annotated[
        int, typer.Option("--shared-prefix", min=0, metavar="N", help="Tokens with which every prompt begins.")
    ] = 0
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help='JSON lines with a "prompt", "text" or "messages", maybe "max_tokens".'
        ),
    ] = None
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions instead of /v1/completions.")] = False
    slo: Annotated[
        str,
        typer.Option("--slo", metavar="NAME=TIME,..", help="Limits for goodput, as ttft=200ms,itl=50ms,e2e=10s."),
    ] = ""
    warmup: Annotated[
        int | None,
        typer.Option(
            "--warmup",
            min=0,
            metavar="N",
            help="Requests before each level that do not count. Default: one per client, 2 for a rate.",
        ),
    ] = None
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, metavar="S", help="Longest time for an answer.")] = (
        600.0
    )
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Model to ask, if the server at the URL has several.")
    ] = None
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="QCOMPILE_API_KEY", help="API key of the server at the URL.")
    ] = None
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the result: FILE ends in .svg, .png or .pdf.")
    ] = None
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of prompts, lengths and arrivals.")] = 0
