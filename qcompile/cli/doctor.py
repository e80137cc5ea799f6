"""The command `doctor`: whether a model can be compiled, how, and what it needs.

It runs all stages of `build` that read no weights, and imports them when it runs, since they wait for torch.
"""

from __future__ import annotations

import json as jsons
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from qcompile import targets
from qcompile.artifact.plain_files import read_plain
from qcompile.checkpoints import hub
from qcompile.checkpoints.weight_files import check_weights
from qcompile.cli import console, refusals
from qcompile.cli.options import Compilation, Hub, Json, Model, Remote, TensorParallel, command, divided
from qcompile.cli.predicting import CONTEXT, Scenario, costs_of, prediction, scenario_of, text_of
from qcompile.errors import PassError, UnsupportedError
from qcompile.recipe_files.resolved import RecipeLike, resolve
from qcompile.recipes import embedding_option, parse_options

if TYPE_CHECKING:
    from qcompile.pipeline import CompilationPlan


_INDEX = "model.safetensors.index.json"

Nodes = Annotated[
    int, typer.Option("--nodes", min=1, metavar="N", help="Machines over which the GPUs are spread, for predictions.")
]
Context = Annotated[
    int, typer.Option("--context", min=1, metavar="TOKENS", help="Tokens of each sequence, for predictions.")
]


@command
def doctor(
    model: Model,
    compilation: Compilation,
    access: Hub,
    tensor_parallel_size: TensorParallel = None,
    nodes: Nodes = 1,
    context: Context = CONTEXT,
    allow_remote_code: Remote = False,
    json: Json = False,
) -> None:
    """Report whether a model can be compiled, how, and the memory and disk it needs. Reads no weights.

    For GPUs it also predicts the speed, on one or on several that divide the model.

    \b
    Example:
      qcompile doctor samples/pycode-26m --recipe qserve
      qcompile doctor MODEL --recipe qserve --target h100 --tensor-parallel-size 4 --context 8192
    """
    chosen = compilation
    scenario = scenario_of(chosen.target, tensor_parallel_size or 1, nodes, context)
    settings = parse_options(chosen.options or []) | divided(tensor_parallel_size)
    settings |= embedding_option(chosen.embedding_dtype)
    recipe = refusals.check_formats(chosen.recipe, chosen.target, chosen.head_dtype, settings, chosen.passes or ())
    refusals.check_models(model)
    with console.Progress() as progress:
        progress("import", 0, 1)
        from qcompile import pipeline as _  # noqa: F401  (takes the time of the step before `trace`)

        directory = hub.find(model, allow_remote_code, weights=False, progress=progress, **asdict(access))
        progress("trace", 0, 1)
        diagnosis = examine(directory, chosen.target, recipe, scenario=scenario, allow_remote=allow_remote_code)
    if json:
        console.print_json(diagnosis.as_json())
    else:
        console.show(diagnosis.as_text())
    if not diagnosis.exportable:
        raise typer.Exit(UnsupportedError.exit_code)


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` reports. `unsupported` has {node, reason} each; bytes are 0 for a model that is not exportable.

    `memory_bytes` is what running takes, in all processes: weights, activations of the widest step, and the cache and
    recurrent states of one sequence of full context. `disk_bytes` is the artifact without its kernel library (some 100
    KB). `prediction` is of GPUs (cli/predicting.py), empty for CPUs.
    """

    exportable: bool
    unsupported: list[dict[str, str]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    memory_bytes: int = 0
    disk_bytes: int = 0
    prediction: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """What `doctor --json` prints."""
        return asdict(self)

    def as_text(self) -> str:
        """For people."""
        if not self.exportable:
            places = [f"{entry['node']}: " if entry["node"] else "" for entry in self.unsupported]
            lines = [f"  {place}{entry['reason']}" for place, entry in zip(places, self.unsupported, strict=True)]
            return "\n".join(["not supported", *lines])
        passes = ", ".join(f"{entry['name']} {entry['fired']}" for entry in self.plan["passes"])
        kernels = "\n".join(f"  {count:3d} {name}" for name, count in self.plan["kernels"].items())
        seen = self.plan.get("layers_examined")
        examined = f"layers: {self.plan['layers']}, which repeat the first {seen}\n" if seen else ""
        stated = self.plan.get("stated_context")
        shorter = f"context {console.context_text(self.plan['context'], stated)}\n" if stated else ""
        state_bytes, processes = self.plan["state_bytes"], self.plan["processes"]
        shared = f" of {processes} processes" if processes > 1 else ""
        form = "" if self.plan["state_format"] == "f32" else f" in {self.plan['state_format']}"
        states = f", recurrent states{form} {console.byte_size(state_bytes)}" if state_bytes else ""
        return (
            f"exportable: {self.plan['model']}, {self.plan['parameters']:,} parameters\n"
            f"{examined}{shorter}{console.left_out(self.plan['left_out'])}{console.remarks(self.plan['remarks'])}"
            f"passes: {passes}\n"
            f"kernels\n{kernels}\n"
            f"memory{shared} {console.byte_size(self.memory_bytes)} "
            f"(weights {console.byte_size(self.plan['weight_bytes'])}, "
            f"cache of {self.plan['context']} tokens {console.byte_size(self.plan['cache_bytes'])}{states}), "
            f"disk {console.byte_size(self.disk_bytes)}" + (f"\n{text_of(self.prediction)}" if self.prediction else "")
        )


def examine(
    model: str | Path,
    target: str,
    recipe: RecipeLike,
    options: Mapping[str, str] | None = None,
    head_dtype: str | None = None,
    scenario: Scenario | None = None,
    **source: Any,
) -> Diagnosis:
    """Run every stage on `model` up to code generation. What qcompile does not compile becomes `unsupported`.

    Of a deep model without weights, only the layers that differ are examined, and their costs are extrapolated to the
    others, unless rules or passes of the recipe make layers differ. The speed is predicted for a `scenario`. Raises
    UsageError for a malformed request.
    """
    from qcompile import pipeline
    from qcompile.checkpoints import depth
    from qcompile.checkpoints.configuration import read_config

    kind = targets.get_target(target).kind
    chosen = resolve(recipe, options, head_dtype)
    request: dict[str, Any] = {"target": target, "recipe": chosen}
    try:
        directory = hub.find(model, weights=False)
        if not (there := _has_weights(directory)):  # a configuration is enough
            check_weights(directory)
        whole = there or chosen.rules or chosen.passes
        repeats = None if whole else depth.find(read_config(directory, **source), **source)
        source |= {"weights": there}
        if repeats is None:
            facts = _facts(pipeline.plan(directory, **request, **source), kind, scenario)
        else:
            plans = (pipeline.plan(directory, **request, **source, layers=layers) for layers in repeats.cuts)
            small, large = (_facts(plan, kind, scenario) for plan in plans)
            examined = {"layers": repeats.layers, "layers_examined": repeats.cuts[1]}
            facts = repeats.extrapolate(small, large) | examined
    except PassError as error:
        return Diagnosis(False, [{"node": error.node, "reason": f"{error.pass_name}: {error.reason}"}])
    except UnsupportedError as error:
        return Diagnosis(False, [{"node": "", "reason": str(error)}])
    packed, weights, files = (facts.pop(key) for key in ("linear_bits", "linear_weights", "files_bytes"))
    facts["bits_per_weight"] = packed / max(weights, 1)
    costs = facts.pop("costs")
    speed = {} if scenario is None else prediction(costs, facts["activation_bytes"] // facts["processes"], scenario)
    memory = sum(facts[f"{what}_bytes"] for what in ("weight", "cache", "state", "activation"))
    return Diagnosis(True, [], facts, memory, facts["weight_bytes"] + files, speed)


def _has_weights(directory: Path) -> bool:
    """Whether the checkpoint has its weight files. Of a model from the hub, some may have been fetched before."""
    try:
        shards = jsons.loads(read_plain(directory / _INDEX))["weight_map"].values()
        return all((directory / shard).exists() for shard in set(shards))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return any(any(directory.glob(pattern)) for pattern in ("*.safetensors", "*.gguf"))


def _facts(plan: CompilationPlan, kind: str, scenario: Scenario | None) -> dict[str, Any]:
    """The contents and costs of `plan` for a kind of device and for a `scenario`: names and whole numbers."""
    from qcompile.artifact.describe import MAX_STEP_TOKENS
    from qcompile.report import bits
    from qcompile.runtime.options import STEP_TOKENS
    from qcompile.runtime.step import pages_for

    program, info, processes = plan.program, plan.graphs[-1].info, max(1, len(plan.ranks))
    pages = pages_for(info.max_position, program.kv.page_tokens, program.kv.ring_tokens)
    packed, weights = bits.linear_bits(plan.graphs[-1])
    steps: dict[Literal["tokens", "outputs"], int] = {"tokens": STEP_TOKENS[kind], "outputs": MAX_STEP_TOKENS}
    return {
        "model": info.name,
        "parameters": info.parameters,
        "left_out": dict(info.left_out),
        "remarks": list(info.remarks),
        "linear_bits": packed,
        "linear_weights": weights,
        "passes": [{"name": p.name, "options": p.options, "fired": p.fired} for p in plan.passes],
        "kernels": dict(Counter(_kernel_name(call) for call in program.calls)),
        "weight_bytes": sum(size for weight in plan.weights for _, size in weight.blobs),
        "processes": processes,
        "cache_bytes": processes * pages * program.kv.page_bytes,
        "state_bytes": processes * program.states.slot_bytes,
        "state_format": program.states.stored,
        "activation_bytes": processes * sum(count * program.arena_bytes(rows) for rows, count in steps.items()),
        "files_bytes": sum(len(content) for content in plan.files.values()),
        "context": info.max_position,
        "costs": {} if scenario is None else costs_of(plan, scenario),
        **({} if info.stated_position is None else {"stated_context": info.stated_position}),
    }


def _kernel_name(call: Any) -> str:
    """`gemm w4_asym_g128 1536x512`: calls of one name share a kernel."""
    if call.kernel == "gemm":
        return f"gemm {call.format} {call.n}x{call.k} {call.epilogue}"
    return str(call.kernel)
