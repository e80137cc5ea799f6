"""Digests of every source text that qcompile generates, to show that a change of its own code changes none of them.

    python benchmarks/sources.py collect OUT.json [--only TEXT ...] [--tree DIR] [--save-sources DIR]
    python benchmarks/sources.py compare BEFORE.json AFTER.json [--only TEXT ...]

`collect` plans many models for many targets and renders their kernels: the C++ of each path for the CPU levels, the
Triton source of each kernel and the launch plan of each path for the GPUs. Nothing is compiled, and no GPU is needed.
Keys are target/model/build/path/text, such as cpu-avx2/pycode-26m/w4a8/model.cpp, h100/pycode-1m/qserve/model/gemm.0.py
or h100/pycode-1m/qserve/model/plan.json; a build that is refused has the key target/model/build/refused. For each key
there are two SHA-256 digests: `raw` of the text itself, and `normalized` of the text without comments, docstrings,
blank lines and trailing spaces. In normalized plans, kernels have the names of their keys instead of labels with hashes
of their sources.

`--tree` is the source tree with the qcompile, benchmarks and samples to use (default: that of this script), so that one
version of this script can examine two trees. `--only` collects the builds with one of the texts in target/model/build.
`--save-sources` writes the normalized texts to a folder, for `diff -r`.

`compare` exits with 1 if normalized digests differ or keys of BEFORE are missing in AFTER; with `--only`, it looks at
keys that contain one of the texts.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import pickle
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import jinja2

Digests = dict[str, dict[str, str]]
Settings = dict[str, Any]

# ---- what is used of qcompile ----------------------------------------------------------------------


@dataclass(frozen=True)
class Compiler:
    """The functions of qcompile and of its benchmarks that this script uses, and where they were imported from."""

    folder: Path
    plan: Callable[..., Any]
    get_target: Callable[[str], Any]
    targets: Mapping[str, Any]
    recipes: Mapping[str, Any]
    refusal: type[Exception]
    refused_by_pass: type[Exception]
    render_cpu: Callable[[Any, Any], str]
    plan_gpu: Callable[[Mapping[str, Any], Any, bool], dict[str, Any]]
    capability_text: str
    families: Sequence[tuple[str, str, Settings]]
    save_random: Callable[[str, Settings, Path], Any]
    quiet: Callable[[], AbstractContextManager[Any]]


def import_compiler(tree: Path) -> Compiler:
    """Import qcompile and its benchmarks from `tree`."""
    sys.path.insert(0, str(tree))
    folder = Path(import_module("qcompile").__path__[0]).resolve()
    if folder.parent != tree:
        raise SystemExit(f"qcompile was imported from {folder}, not from {tree}")

    return Compiler(
        folder,
        plan=import_module("qcompile.pipeline").plan,
        get_target=import_module("qcompile.targets").get_target,
        targets=import_module("qcompile.targets").TARGETS,
        recipes=import_module("qcompile.recipes").RECIPES,
        refusal=import_module("qcompile.errors").QCompileError,
        refused_by_pass=import_module("qcompile.errors").PassError,
        render_cpu=import_module("qcompile.codegen.cpu.render").render,
        plan_gpu=import_module("qcompile.codegen.gpu.build").plan,
        capability_text=import_module("qcompile.codegen.gpu.compile").ANY_CAPABILITY,
        families=import_module("benchmarks.family_list").FAMILIES,
        save_random=import_module("benchmarks.families").save_random,
        quiet=import_module("benchmarks.families").quiet,
    )


def remember_renderings() -> None:
    """Render no template twice with the same values: plans have the same kernels in each layer, and planning is slow.

    The key has the whole state of all values, by pickle; what cannot be pickled is rendered each time.
    """
    render: Callable[..., str] = jinja2.Template.render
    known: dict[tuple[str | None, bytes], str] = {}

    def remembered(template: jinja2.Template, *args: Any, **values: Any) -> str:
        try:
            key = template.filename, pickle.dumps((args, values))
        except (pickle.PicklingError, AttributeError, TypeError):
            return render(template, *args, **values)
        if key not in known:
            known[key] = render(template, *args, **values)
        return known[key]

    jinja2.Template.render = remembered  # type: ignore[assignment, method-assign]


# ---- what is built ---------------------------------------------------------------------------------

CHECKPOINTS = ("pycode-1m", "pycode-26m")
CPUS = ("cpu-portable", "cpu-avx2", "cpu-avx2vnni", "cpu-avx512vnni", "cpu-amx")
GPUS = ("a100", "l40s", "h100", "h200", "b200")
ALL = (*CPUS, *GPUS)
DISTINCT = (*CPUS, *(gpu for gpu in GPUS if gpu != "h200"))
"""All but one of two GPUs with the same compute capability."""

FAMILY_RECIPES = ("w4a8", "qserve", "nested", "bf16", "f32")
FAMILY_TARGETS = ("cpu-avx512vnni", "cpu-portable", "h100")
FAMILIES_EVERYWHERE = ("mixtral", "gpt_oss", "qwen2_moe, dense layers between", "gemma2, soft caps", "deepseek_v3")
"""Families for all kinds of targets: those with experts, soft caps, and values narrower than keys."""

LARGE: dict[str, tuple[str, Settings]] = {
    "llama-8b": ("llama", {"vocab_size": 128256, "num_key_value_heads": 8}),
    "mixtral-8x7b": ("mixtral", {"vocab_size": 32000, "num_key_value_heads": 8, "num_local_experts": 8}),
}
"""Models of ordinary width without weights, two layers each: GPU kernels for large shapes are others."""
LARGE_COMMON: Settings = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}

FORMATS = ("f32", "bf16", "w8_sym_channel", "w4_asym_g128", "qoq_g128", "qoq_channel", "mxfp4", "nested_8_4", "mix_4_8")
ACTIVATIONS = ("f32", "bf16", "int8", "int8_g128", "int4", "int4_clip", "int4_g128", "int4_g128_outlier128")
CACHES = ("kv32", "kv16", "kv8", "kv4", "kv_hier", "kv_hier4")
HEADS = ("int8", "nested", "bf16", "f32")


@dataclass(frozen=True)
class Build:
    """A recipe with other arguments of `plan`; `drafts` are names of checkpoints in samples, or `lookup`."""

    name: str
    recipe: str
    targets: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()
    head: str | None = None
    drafts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """A model and its builds. `prepare` fills a folder with the checkpoint and returns its place."""

    name: str
    prepare: Callable[[Path], Path]
    builds: tuple[Build, ...]
    source: tuple[tuple[str, Any], ...] = ()
    """Further arguments of `plan` that say how to read the checkpoint."""


def models(compiler: Compiler) -> Iterator[Model]:
    """Everything that is built."""
    for name in CHECKPOINTS:
        recipes = tuple(Build(recipe, recipe, ALL) for recipe in compiler.recipes)
        more = (*speculation(name), *(variations() if name == CHECKPOINTS[0] else ()))
        yield Model(name, functools.partial(_sample, compiler, name), recipes + more)
    for name, (kind, settings) in LARGE.items():
        recipes = tuple(Build(recipe, recipe, DISTINCT) for recipe in compiler.recipes)
        prepare = functools.partial(_configuration, LARGE_COMMON | settings | {"model_type": kind})
        yield Model(name, prepare, recipes, (("weights", False), ("name", name)))
    for name, kind, settings in compiler.families:
        targets = DISTINCT if name in FAMILIES_EVERYWHERE else FAMILY_TARGETS
        builds = tuple(Build(recipe, recipe, targets) for recipe in FAMILY_RECIPES)
        prepare = functools.partial(_random_checkpoint, compiler, kind, settings)
        yield Model(f"families/{re.sub(r'[^a-zA-Z0-9_]+', '-', name)}", prepare, builds)


def speculation(model: str) -> tuple[Build, ...]:
    """Builds with drafts besides the recipe's own."""
    other = next(name for name in CHECKPOINTS if name != model)
    drafts: tuple[tuple[str, ...], ...] = (
        ("w4a8", "lookup"),
        ("w4a8", other),
        ("w4a8", other, "lookup"),
        ("w4a8", other, other),
        ("bf16", other),
        ("nested", other),
        ("nested", "lookup"),
        ("qspec", "lookup"),
        ("quantspec", "lookup"),
    )
    targets = DISTINCT if model == CHECKPOINTS[0] else (*CPUS, "h100")
    return tuple(Build("+".join(each), each[0], targets, drafts=each[1:]) for each in drafts)


def variations() -> tuple[Build, ...]:
    """Caches and heads that no recipe has, and all pairs of weight and activation formats."""
    caches = [Build(f"w4a8,{cache}", "w4a8", DISTINCT, (("cache.format", cache),)) for cache in CACHES]
    heads = [Build(f"w4a8,head-{head}", "w4a8", DISTINCT, head=head) for head in HEADS]
    pairs = []
    for weight in FORMATS:
        for activation in ACTIVATIONS:
            options = (("assign_precision.weight", weight), ("assign_precision.activation", activation))
            pairs.append(Build(f"{weight},{activation}", "w4a8", ("cpu-avx512vnni", "cpu-amx", "h100"), options))
    return (*caches, *heads, *pairs)


def _sample(compiler: Compiler, name: str, folder: Path) -> Path:
    return compiler.folder.parent / "samples" / name


def _configuration(settings: Settings, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _random_checkpoint(compiler: Compiler, kind: str, settings: Settings, folder: Path) -> Path:
    with compiler.quiet():
        compiler.save_random(kind, settings, folder)
    return folder


# ---- normalized texts ------------------------------------------------------------------------------

_CPP = re.compile(
    r"""(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
    |R"(?P<mark>[^\s()\\]{0,16})\(.*?\)(?P=mark)"
    |"(?:\\.|[^"\\\n])*"
    |(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'""",
    re.DOTALL | re.VERBOSE,
)
"""A comment, or a literal, which may contain what looks like one; an apostrophe after a digit only separates digits."""


def normalized_cpp(text: str) -> str:
    """C++ without comments, blank lines and trailing spaces."""
    return without_blanks(_CPP.sub(lambda match: " " if match["comment"] else match[0], text))


@functools.cache
def normalized_python(text: str) -> str:
    """Python as `ast` writes it, without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                node.body = node.body[1:] or [ast.Pass()]
    return without_blanks(ast.unparse(tree))


def without_blanks(text: str) -> str:
    """`text` without blank lines and trailing spaces."""
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


# ---- collecting ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A generated text as it is, and normalized."""

    raw: str
    normalized: str


@dataclass
class Collection:
    """Digests by key; writes normalized texts to `folder`, if given, equal texts as links to one file."""

    folder: Path | None
    digests: Digests = field(default_factory=dict)
    written: dict[str, Path] = field(default_factory=dict)

    def add(self, key: str, text: Text) -> None:
        """Add the text of a new key."""
        if key in self.digests:
            raise ValueError(f"two texts have the key {key}")
        normalized = digest(text.normalized)
        self.digests[key] = {"raw": digest(text.raw), "normalized": normalized}
        if self.folder is None:
            return
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.hardlink_to(self.written[normalized])
        except (KeyError, OSError):  # the first such text, or too many links
            path.write_text(text.normalized, encoding="utf-8")
            self.written[normalized] = path


def collect(compiler: Compiler, only: Sequence[str], collection: Collection) -> None:
    """Add the texts of all builds for all targets; with `only`, of those with one of these texts in their name."""
    start = time.perf_counter()
    for model in models(compiler):
        wanted = {
            build: [t for t in build.targets if not only or any(o in f"{t}/{model.name}/{build.name}" for o in only)]
            for build in model.builds
        }
        if not any(wanted.values()):
            continue
        with tempfile.TemporaryDirectory() as folder:
            texts = _ModelTexts(compiler, model, Path(folder))
            for build, targets in wanted.items():
                for target in targets:
                    for name, text in texts.of(build, target):
                        collection.add(f"{target}/{model.name}/{build.name}/{name}", text)
        print(f"{time.perf_counter() - start:5.0f} s {len(collection.digests):6d} {model.name}", file=sys.stderr)


class _ModelTexts:
    """The texts of one model. It is traced once; plans are shared by the targets of a kind, which have the same."""

    def __init__(self, compiler: Compiler, model: Model, folder: Path) -> None:
        self.compiler, self.model, self.folder = compiler, model, folder
        self.place = model.prepare(folder)
        self.graph: Any = None
        self.refusal: Exception | None = None
        try:
            with compiler.quiet():
                simple = compiler.plan(self.place, target="cpu-portable", recipe="f32", **dict(model.source))
            self.graph = simple.graphs[0]
        except compiler.refused_by_pass:
            pass  # other recipes have other passes
        except compiler.refusal as error:
            self.refusal = error  # of the import, so that of all builds; some take long to fail
        self.plans: dict[tuple[Build, str], Any] = {}

    def of(self, build: Build, target: str) -> list[tuple[str, Text]]:
        """Texts by name; only `refused` with the error if there are none."""
        try:
            with self.compiler.quiet():
                return list(self._texts(build, self.compiler.get_target(target)))
        except self.compiler.refusal as error:
            text = f"{type(error).__name__}: {error}"
        except Exception as error:  # a bug: the other texts are wanted all the same, and compare shows a difference
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
        text = text.replace(str(self.folder), "FOLDER") + "\n"
        return [("refused", Text(text, text))]

    def _texts(self, build: Build, target: Any) -> Iterator[tuple[str, Text]]:
        plan = self._plan(build, target)
        if target.kind == "cpu":
            for path, program in plan.programs.items():
                text = self.compiler.render_cpu(program, target)
                yield f"{path}.cpp", Text(text, normalized_cpp(text))
            return
        plans = self.compiler.plan_gpu(plan.programs, target, plan.lookup)
        keys = _KernelKeys(self.compiler.capability_text)
        for path, launches in plans.items():
            yield from ((f"{path}/{name}", text) for name, text in keys.texts(launches, plan.programs[path], target))

    def _plan(self, build: Build, target: Any) -> Any:
        """The plan of a build; it does not depend on the target, other than by its kind, unless it is refused."""
        if self.refusal is not None:
            raise self.refusal
        known = (build, target.kind)
        if known not in self.plans:
            samples = self.compiler.folder.parent / "samples"
            drafts = [name if name == "lookup" else samples / name for name in build.drafts]
            how: dict[str, Any] = {"recipe": build.recipe, "options": dict(build.options), "head_dtype": build.head}
            if drafts or self.graph is None:  # whether tokenizers agree is decided by the checkpoints' files
                how |= {"model": self.place, "drafts": drafts, **dict(self.model.source)}
            else:
                how["model"] = self.graph
            self.plans[known] = self.compiler.plan(target=target.name, **how)
        return self.plans[known]


class _KernelKeys:
    """Names for the kernels of a build: the function and a number, in the order in which plans launch them.

    Labels contain hashes of sources with their comments. Kernels that differ in comments only have one name.
    """

    def __init__(self, placeholder: str) -> None:
        self.placeholder = placeholder
        """What the compiler replaces by the compute capability; it includes a comment."""
        self.names: dict[tuple[str, ...], str] = {}
        self.counts: Counter[str] = Counter()

    def texts(self, plan: Any, program: Any, target: Any) -> Iterator[tuple[str, Text]]:
        """The source of each kernel of one path, and its launch plan, by name."""
        facts = {label: asdict(kernel) for label, kernel in plan.kernels.items()}
        sources = {label: fact.pop("source") for label, fact in facts.items()}
        rates = (target.memory_gb_s, *(1e3 * t for t in (target.int8_tops, target.f32_tflops, target.bf16_tflops)))
        peaks = dict(zip(("memory_gb_s", "int8_gops", "f32_gflops", "bf16_gflops"), rates, strict=True))
        raw = plan.to_json(facts, program, peaks)
        data = json.loads(raw)
        names: dict[str, str] = {}
        texts: dict[str, Text] = {}
        for label in dict.fromkeys([*_launched(data), *sources]):
            text = Text(sources[label], normalized_python(sources[label].replace(self.placeholder, "CAPABILITY", 1)))
            names[label] = self._name(facts[label]["name"], text.normalized, json.dumps(facts[label], sort_keys=True))
            texts.setdefault(f"{names[label]}.py", text)
        yield from texts.items()
        yield "plan.json", Text(raw, json.dumps(_renamed(data, names), sort_keys=True, indent=1) + "\n")

    def _name(self, function: str, *identity: str) -> str:
        if (function, *identity) not in self.names:
            self.names[function, *identity] = f"{function}.{self.counts[function]}"
            self.counts[function] += 1
        return self.names[function, *identity]


def _launched(plan: Mapping[str, Any]) -> Iterator[str]:
    """The labels of kernels in a plan as JSON, in the order of launches."""
    for launches in ("launches", "feedback", "follow", "rounds", "lookup"):
        for launch in plan[launches]:
            yield from (variant["kernel"] for variant in launch["variants"] if variant["kernel"])


def _renamed(data: Any, names: Mapping[str, str]) -> Any:
    """JSON data with `names` for the strings that are their keys."""
    if isinstance(data, dict):
        return {names.get(key, key): _renamed(value, names) for key, value in data.items()}
    if isinstance(data, list):
        return [_renamed(value, names) for value in data]
    return names.get(data, data) if isinstance(data, str) else data


# ---- plans of GPU_ABI 22 in the form of GPU_ABI 21 --------------------------------------------------


# ---- the command line ------------------------------------------------------------------------------


def read(path: Path, only: Sequence[str]) -> Digests:
    """The digests in a file, of keys that contain one of the texts."""
    try:
        digests: Digests = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} is no file that `collect` wrote: {error}") from error
    return {key: value for key, value in digests.items() if any(text in key for text in only)}


def compare(before: Digests, after: Digests) -> int:
    """Print how two collections differ; the exit code."""
    missing, extra = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    both = sorted(before.keys() & after.keys())
    different = [key for key in both if before[key]["normalized"] != after[key]["normalized"]]
    reworded = [key for key in both if key not in set(different) and before[key]["raw"] != after[key]["raw"]]
    for what, keys in (("different", different), ("missing", missing), ("extra", extra)):
        for key in keys[:20]:
            print(f"{what}: {key}")
        if len(keys) > 20:
            print(f"{what}: {len(keys) - 20} more, {_by_target(keys)}")
    print(
        f"{len(both)} compared: {len(both) - len(different)} equal ({len(reworded)} of them but for comments and blank"
        f" lines), {len(different)} different; {len(missing)} missing, {len(extra)} extra"
    )
    return 1 if different or missing else 0


def _by_target(keys: Iterable[str]) -> str:
    counts = Counter(key.partition("/")[0] for key in keys)
    return ", ".join(f"{count} in all of {target}" for target, count in sorted(counts.items()))


def main() -> int:
    """Run one subcommand; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect", help="write the digests of all generated sources")
    collecting.add_argument("out", type=Path, metavar="OUT.json")
    collecting.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="part of target/model/build")
    collecting.add_argument("--tree", type=Path, default=Path(__file__).parents[1], metavar="DIR")
    collecting.add_argument("--save-sources", type=Path, metavar="DIR", help="folder for the normalized texts")
    comparing = commands.add_parser("compare", help="compare two files of digests")
    comparing.add_argument("before", type=Path, metavar="BEFORE.json")
    comparing.add_argument("after", type=Path, metavar="AFTER.json")
    comparing.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="part of a key")
    options = parser.parse_args()
    if options.command == "compare":
        return compare(*(read(path, options.only) for path in (options.before, options.after)))
    if options.save_sources and options.save_sources.is_dir() and any(options.save_sources.iterdir()):
        parser.error(f"{options.save_sources} is not empty: remove it, or name another folder")
    # A cache of its own: traces that other runs kept could hide a change of the front end.
    with tempfile.TemporaryDirectory(prefix="qc_sources_cache-") as cache:
        os.environ |= {"QCOMPILE_CACHE": cache, "OMP_NUM_THREADS": "1"}
        compiler = import_compiler(options.tree.resolve())
        import_module("torch").set_num_threads(1)
        remember_renderings()
        print(f"sources of {compiler.folder}", file=sys.stderr)
        collection = Collection(options.save_sources)
        collect(compiler, options.only, collection)
    text = json.dumps(collection.digests, sort_keys=True, indent=0)
    options.out.write_text(text + "\n", encoding="utf-8")
    kinds = Counter(Path(key).suffix.lstrip(".") or "refused" for key in collection.digests)
    print(f"{len(collection.digests)} texts: {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
