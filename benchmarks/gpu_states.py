"""Recurrent states on this GPU: kernels beside copies of as many bytes, and checks of the bits of whole models.

    python benchmarks/gpu_states.py [out.json] [--parts=kernels,models]
    python benchmarks/gpu_states.py [out.json] --parts=tiles   times of recurrences by numbers of a program's tile
    python benchmarks/gpu_states.py [out.json] --parts=stored  kernels and models with states in fewer bits, beside f32

Kernels: for layers of published shapes, the recurrence and the convolution at decoding, verification and prompts. Each
is checked first: against the reference in float64, and for the same bits however a text is cut. A copy is torch's, of
the bytes of the states, in the same run; both go through more than five times the L2. Times are microseconds per launch
by CUDA graph replay, the launch gap included.

Models: small random hybrids. Logits in pieces, in random batches with rejected drafts, and alone must have the bits of
whole prompts, and drafts must not change a token. The exit code is 4 if anything differs.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import qcompile
from benchmarks.gpu_common import ROTATED_BYTES, Launch, facts, graph_us, launch, this_target
from qcompile import ops
from qcompile.codegen.gpu.compile import compile_kernel
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.states import FUSED_ROWS, ConvSpec, RecurrenceSpec, prompt_spec
from qcompile.errors import QualityError
from qcompile.formats.states import ConvState, RecurrenceState
from qcompile.runtime.step import EVERYTHING, Rows
from qcompile.targets import get_target
from tests.support.graphs import recurrent

Row = dict[str, Any]
BATCHES, PROMPTS = (1, 16, 64, 256), (1024, 8192, 32768)
VERIFIED = 5
"""Rows of a verification: the last token and four drafts."""
MOST_ERROR = 1e-5
"""float32 sums, fed back over a text of TEXT tokens."""
MOST_ROUNDED = 5e-3
"""That of a state in fewer bits: a number near the middle of two codes may get the other one."""
TEXT = 48
TILES = {False: (512, 1024, 2048), True: (256, 512, 1024)}
"""Numbers of a program's tile that are tried, without and with scan."""


@dataclass(frozen=True)
class Shape:
    """A published layer: its recurrence, whether it has a delta and a gain, its rates, and its convolution."""

    state: RecurrenceState
    delta: bool
    gain: bool
    rates: Literal["", "heads", "keys"]
    conv: ConvState


SHAPES = {
    "Qwen3-Next": Shape(RecurrenceState(32, 16, 128, 128, False), True, True, "heads", ConvState(8192, 4)),
    "Kimi Linear": Shape(RecurrenceState(32, 32, 128, 128, True), True, True, "", ConvState(12288, 4)),
    "Mamba2 8B": Shape(RecurrenceState(128, 8, 128, 64, False), False, True, "heads", ConvState(10240, 4)),
    "Mamba": Shape(RecurrenceState(8192, 1, 16, 1, False), False, True, "keys", ConvState(8192, 4)),
}
STORED = {
    f"{name}, {stored}": replace(SHAPES[name], state=replace(SHAPES[name].state, stored=stored))
    for name in ("Qwen3-Next", "Kimi Linear", "Mamba2 8B")
    for stored in ("bf16", "int8")
}
"""Shapes with matrix states in fewer bits."""
SHAPES |= STORED


class Layer:
    """A recurrence with random rates, and slots of states for `sequences` in each of several sets that are rotated."""

    def __init__(self, shape: Shape, sequences: int, tile: int = 0) -> None:
        self.shape, state = shape, shape.state
        keys, values = state.key_heads * state.key_dim, state.heads * state.value_dim
        self.widths = {"q": keys, "k": keys, "v": values, "decay": state.decays}
        self.widths |= {"gain": state.heads} if shape.gain else {}
        self.spec = RecurrenceSpec(state, dict(self.widths), values, 0, state.size, shape.delta, shape.rates, tile)
        self.state_bytes = int(state.step_bytes) // 8 * 4
        self.sets = 1 + ROTATED_BYTES // (self.state_bytes * sequences)
        self.states = torch.zeros(self.sets * sequences, state.size, device="cuda")
        self.rates = None
        if shape.rates:
            size = (state.heads, state.key_dim) if shape.rates == "keys" else (state.heads,)
            self.rates = torch.rand(size, device="cuda")

    def operands(self, rows: int) -> dict[str, Tensor]:
        """Random operands [rows, width]: keys short enough for the delta rule, decay negative, gain positive."""
        made = {name: torch.randn(rows, width, device="cuda") for name, width in self.widths.items()}
        for name in ("q", "k"):
            made[name] *= self.shape.state.key_dim**-0.5
        made["decay"] = -made["decay"].abs()
        return made | ({"gain": torch.sigmoid(made["gain"])} if "gain" in made else {})

    def given(self, operands: dict[str, Tensor], parts: Sequence[tuple[int, int, int, int]]) -> dict[str, Tensor]:
        """Arguments of a step over parts of sequences: (rows, first position, slot, certain positions)."""
        counts = torch.tensor([0, *(count for count, *_ in parts)])
        positions = [start + i for count, start, *_ in parts for i in range(count)]
        sequence = [index for index, (count, *_) in enumerate(parts) for _ in range(count)]
        arrays = {"positions": positions, "state_slots": [p[2] for p in parts], "certain": [p[3] for p in parts]}
        arrays |= {"query_start": counts.cumsum(0).tolist(), "row_sequence": sequence}
        made = {name: torch.tensor(items, dtype=torch.int32, device="cuda") for name, items in arrays.items()}
        made |= operands | {"states": self.states}
        if state_type := {"bf16": torch.bfloat16, "int8": torch.int8}.get(self.spec.layer.stored):
            made["codes"] = self.states.view(state_type)
        made["out"] = torch.full((len(positions), self.spec.out_stride), float("nan"), device="cuda")
        if self.rates is not None:
            transposed = self.spec.scan and self.rates.dim() == 2
            padding = (0, self.spec.padded_heads - self.shape.state.heads)
            made["rates"] = torch.nn.functional.pad(self.rates.t(), padding).contiguous() if transposed else self.rates
        return made

    def launch_of(self, given: dict[str, Tensor], sequences: int, long: bool = False) -> Launch:
        """Of a step, with `long` by the kernel for prompts if there is one."""
        capability, spec = _capability(), (_for_prompts(self.spec) if long else None) or self.spec
        return launch(spec.kernel(capability), capability, (*spec.programs, sequences), given)

    def run(
        self, operands: dict[str, Tensor], parts: Sequence[tuple[int, int, int, int]], long: bool = False
    ) -> Tensor:
        """Results of a step over parts of sequences."""
        given = self.given(operands, parts)
        self.launch_of(given, len(parts), long)()
        torch.cuda.synchronize()
        return given["out"]

    def place(self, index: int, rows: int) -> int:
        """The first position of a sequence of a step.

        Where states are rounded in blocks, one of eight decodes the last position of a block: from the second launch on
        it replays nothing, and stores the state. The others replay four positions. Verified rows replay as many as
        they are, and four.
        """
        if self.spec.layer.block == 1:
            return 100
        return 92 + rows if rows > 1 else 103 if index % 8 == 7 else 100

    def settle(self, positions: int) -> None:
        """Let every slot have a state after `positions` positions."""
        start, end = self.spec.layer.places[0], self.spec.layer.heads * self.spec.layer.value_dim
        self.states[:, start:end] = positions // self.spec.layer.block * self.spec.layer.block


def _capability() -> int:
    return get_target(this_target()).capability


def _for_prompts(spec: RecurrenceSpec) -> RecurrenceSpec | None:
    return prompt_spec(spec, get_target(this_target()).multiprocessors)


# ---- kernels -----------------------------------------------------------------------------------------


def checked(name: str) -> Row:
    """How far a text's results are from the reference in float64, and rows with bits that depend on how it is cut.

    The whole text is computed by the kernel for prompts.
    """
    torch.manual_seed(0)
    layer = Layer(SHAPES[name], 4)
    layer.states.fill_(float("nan"))
    text, other = layer.operands(TEXT), layer.operands(TEXT)
    whole = layer.run(text, [(TEXT, 0, 0, EVERYTHING)], long=True)
    state = layer.shape.state
    shapes = {"q": (state.key_heads, state.key_dim), "k": (state.key_heads, state.key_dim)}
    shapes |= {"v": (state.heads, state.value_dim)} | ({"decay": (state.heads, state.key_dim)} if state.by_key else {})
    every = {key: x.double().cpu().view(1, TEXT, *shapes.get(key, x.shape[1:])) for key, x in text.items()}
    rates = None if layer.rates is None else layer.rates.double().cpu()
    whole_text = (*(every[key] for key in ("q", "k", "v", "decay")), rates, every.get("gain"))
    if state.stored == "f32":
        wanted = ops.reference("linear_recurrence")(*whole_text, layer.shape.delta)
    else:
        step = torch.arange(TEXT), torch.zeros(TEXT, dtype=torch.int64), torch.tensor([0]), torch.tensor([TEXT])
        one_text = [x if x is rates or x is None else x[0] for x in whole_text]
        states = torch.zeros(1, state.size)
        wanted = ops.reference("recurrence_step")(*one_text, *step, states, layer.shape.delta, 0, state.stored)[0]
    error = ((whole.double().cpu() - wanted.view(TEXT, -1)).norm() / wanted.norm()).item()
    make, differ = random.Random(1), 0
    for slot in (1, 2):
        at = 0
        while at < TEXT:
            count = min(make.choice((1, 1, 2, 5, 11)), TEXT - at)
            drafts = make.randrange(0, min(5, TEXT - at)) if at else 0
            if drafts:  # all but the first are rejected, also after a draft path over the same states
                rows = {key: torch.cat([text[key][at : at + 1], other[key][:drafts]]) for key in text}
                layer.run({key: x[1:] for key, x in rows.items()}, [(drafts, at, slot, 0)])
                result = layer.run(rows, [(drafts + 1, at, slot, at + 1)])
                differ += int((result[0] != whole[at]).any())
                at, count = at + 1, 0
            if count:
                rows = {key: torch.cat([other[key][:3], text[key][at : at + count]]) for key in text}
                result = layer.run(rows, [(3, 0, 3, EVERYTHING), (count, at, slot, EVERYTHING)])[3:]
                differ += int((result != whole[at : at + count]).any(-1).sum())
                at += count
    return {"error": error, "most": MOST_ERROR if state.stored == "f32" else MOST_ROUNDED, "differing_rows": differ}


class Copies:
    """Copies of a number of bytes by torch, from and to places that are rotated."""

    def __init__(self) -> None:
        self.source = torch.zeros(1 << 28, device="cuda")
        self.to = torch.empty_like(self.source)

    def us(self, size: int) -> float:
        """Microseconds to read and write `size` bytes each."""
        numbers = size // 4
        places = range(0, self.source.numel() - numbers + 1, numbers)[: max(1, 1 + ROTATED_BYTES // size)]
        pairs = [(self.to[at : at + numbers], self.source[at : at + numbers]) for at in places]
        return graph_us([partial(to.copy_, source) for to, source in pairs], 9, 16)


def decoding(name: str, batch: int, copies: Copies, rows: int = 1, tile: int = 0) -> Row:
    """Times of a step of `rows` rows of each sequence; several are verified, and replay as many of before."""
    layer = Layer(SHAPES[name], batch, tile)
    before = rows if rows > 1 else 0
    layer.settle(100 - before)
    operands, launches = layer.operands(rows * batch), []
    for each in range(layer.sets):
        places = [layer.place(i, rows) for i in range(batch)]
        # The base stays, so that each launch does the same.
        certain = [at - before if rows > 1 else EVERYTHING for at in places]
        parts = [(rows, places[i], each * batch + i, certain[i]) for i in range(batch)]
        launches.append(layer.launch_of(layer.given(operands, parts), batch))
    us = graph_us(launches, 9, 16)
    row: Row = {"shape": name, "batch": batch, "rows": rows, "us": us} | ({"tile": tile} if tile else {})
    floor = copies.us(layer.state_bytes * batch)
    row |= {"state_bytes": layer.state_bytes * batch, "copy_us": floor, "of_copy": floor / us}
    print(f"  {name:12} batch {batch:4} x {rows}: {us:8.1f} us, copy {floor:8.1f} us, {floor / us:5.0%}", flush=True)
    return row


def prompt(name: str, tokens: int, tile: int = 0) -> Row:
    """Times of a prompt of one sequence, in one launch: of the kernel for few rows, and of that for prompts."""
    layer = Layer(SHAPES[name], 1, tile)
    given = layer.given(layer.operands(tokens), [(tokens, 0, 0, EVERYTHING)])
    us = graph_us([layer.launch_of(given, 1)], 3, 1)
    print(f"  {name:12} prompt of {tokens:6}: {us / 1e3:8.2f} ms, {us / tokens:6.3f} us a token", flush=True)
    row: Row = {"shape": name, "tokens": tokens, "few_rows_us": us, "few_rows_us_a_token": us / tokens}
    if not tile and _for_prompts(layer.spec):
        us = graph_us([layer.launch_of(given, 1, long=True)], 3, 1)
        row |= {"us": us, "us_a_token": us / tokens}
        print(f"  {'':12} by the kernel for prompts {us / 1e3:8.2f} ms, {us / tokens:6.3f} us a token", flush=True)
    return row | ({"tile": tile} if tile else {})


def convolution(name: str, batch: int, rows: int) -> Row:
    """Time of a convolution, with the launch that stores the ring if sequences have many rows; beside its bytes."""
    layer, tokens = SHAPES[name].conv, batch * rows
    base = ConvSpec(layer, layer.features, layer.features, 0, layer.size, bias=True)
    few = rows <= FUSED_ROWS
    specs = [base] if few else [replace(base, keeps=False), replace(base, computes=False)]
    sets = 1 + min(64, ROTATED_BYTES // (8 * layer.features * tokens))
    numbers = {"positions": [100 + i for _ in range(batch) for i in range(rows)]}
    numbers |= {"query_start": [*range(0, tokens + 1, rows)], "row_sequence": [i // rows for i in range(tokens)]}
    arrays = {key: torch.tensor(items, dtype=torch.int32, device="cuda") for key, items in numbers.items()}
    arrays |= {"state_slots": torch.arange(batch, dtype=torch.int32, device="cuda")}
    weight = torch.randn(layer.width + 1, base.padded_features, device="cuda")
    launches = []
    for _ in range(sets):
        x = torch.randn(tokens, layer.features, device="cuda")
        given = {"x": x, "out": torch.empty_like(x), "states": torch.zeros(batch, layer.size, device="cuda"), **arrays}
        given |= {"weight": weight, "bias": weight[-1]}
        grid = (tokens, base.programs)
        launches += [launch(spec.kernel(_capability()), _capability(), grid, given) for spec in specs]
    us = graph_us(launches, 9, 16) * len(specs)
    print(f"  {name:12} convolution, {batch} x {rows} rows: {us:8.1f} us", flush=True)
    return {"shape": name, "batch": batch, "rows": rows, "us": us, "bytes": 4 * layer.features * tokens * 3}


def every_kernel(names: Sequence[str]) -> list[Kernel]:
    """All kernels of these shapes, to be compiled beside each other."""
    capability, result = _capability(), []
    for shape in map(SHAPES.__getitem__, names):
        state, conv = shape.state, shape.conv
        keys, values = state.key_heads * state.key_dim, state.heads * state.value_dim
        strides = {"q": keys, "k": keys, "v": values, "decay": state.decays}
        strides |= {"gain": state.heads} if shape.gain else {}
        spec = RecurrenceSpec(state, strides, values, 0, state.size, shape.delta, shape.rates)
        base = ConvSpec(conv, conv.features, conv.features, 0, conv.size, bias=True)
        result += [spec.kernel(capability), base.kernel(capability)]
        prompts = _for_prompts(spec)
        result += [prompts.kernel(capability)] if prompts else []
        result += [part.kernel(capability) for part in (replace(base, keeps=False), replace(base, computes=False))]
    return result


def kernels(names: Sequence[str]) -> Row:
    """Checks and times of shapes."""
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_kernel, every_kernel(names), [_capability()] * 99))
    result: Row = {"checks": {}, "decoding": [], "verification": [], "prompts": [], "convolutions": []}
    copies = Copies()
    for name in names:
        result["checks"][name] = check = checked(name)
        print(f"{name}: error {check['error']:.1e}, {check['differing_rows']} rows differ", flush=True)
        for batch in BATCHES:
            result["decoding"].append(decoding(name, batch, copies))
            torch.cuda.empty_cache()
        result["verification"] += [decoding(name, batch, copies, VERIFIED) for batch in (1, 16)]
        result["prompts"] += [prompt(name, tokens) for tokens in PROMPTS]
        sizes = () if name in STORED else ((1, 1), (64, 1), (1, 512))
        result["convolutions"] += [convolution(name, *size) for size in sizes]
        torch.cuda.empty_cache()
    return result


def tiles() -> list[Row]:
    """Times of decoding and of a prompt by the numbers of a program's tile."""
    result, copies = [], Copies()
    wanted = [(name, tile) for name, shape in SHAPES.items() for tile in TILES[shape.state.value_dim == 1]]
    specs = [Layer(SHAPES[name], 1, tile).spec.kernel(_capability()) for name, tile in wanted]
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_kernel, specs, [_capability()] * len(specs)))
    for name, tile in wanted:
        print(f"{name}, {tile} numbers a program", flush=True)
        for batch in BATCHES:
            result.append(decoding(name, batch, copies, tile=tile))
            torch.cuda.empty_cache()
        result += [decoding(name, 16, copies, VERIFIED, tile), prompt(name, PROMPTS[0], tile)]
    return result


# ---- models ------------------------------------------------------------------------------------------

VOCAB, LENGTH, TEXTS, STEPS = 512, 150, 4, 200
MODELS: dict[str, Row] = {
    "gated delta, attention": {
        **{"heads": 8, "key_heads": 4, "key_dim": 64, "value_dim": 64},
        **{"layers": 2, "unit_keys": True},
    },
    "scan": {
        **{"heads": 512, "key_heads": 1, "key_dim": 16, "value_dim": 1, "rates": "keys", "delta": False},
        **{"attention": False, "layers": 2},
    },
}
ROUNDED: dict[str, Row] = {
    f"gated delta of 128, states in {stored}": {
        **{"heads": 4, "key_heads": 2, "key_dim": 128, "value_dim": 128},
        **{"layers": 2, "unit_keys": True, "states": stored},
    }
    for stored in ("bf16", "int8")
}
"""Models with states in fewer bits."""
DRAFTED = {"nested": ("nested", []), "own states": ("bf16", ["model"]), "lookup": ("bf16", ["lookup"])}


def build(model: str, how: str, folder: Path) -> Path:
    """An artifact of a random model, with drafts as DRAFTED names them."""
    recipe, drafts = DRAFTED[how]
    sizes = dict((MODELS | ROUNDED)[model])
    options = {"cache.states": states} if (states := sizes.pop("states", "")) else {}
    graph = recurrent(vocab=VOCAB, hidden=512, **sizes)
    out = folder / f"{model}-{how}".replace(" ", "-").replace(",", "")
    others = [graph if draft == "model" else draft for draft in drafts]
    qcompile.build(graph, out, target=this_target(), recipe=recipe, drafts=others, options=options)
    return out


def steps_that_differ(llm: Any) -> int:
    """Rows with other logits than in one step of the whole text, in random steps over texts that start again and again.

    In between, steps with drafts that are rejected, all but their first row.
    """
    make, executor = random.Random(3), llm.executor
    texts = [[make.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(TEXTS)]
    pages = [[3 * text + i for i in (2, 0, 1)] for text in range(TEXTS)]

    def step(parts: list[Rows]) -> Tensor:
        return torch.from_numpy(executor.step(parts, True)[1].copy())

    whole = [step([Rows(texts[i], 0, pages[i], LENGTH, slot=i)]) for i in range(TEXTS)]
    at, differ = [0] * TEXTS, 0
    for _ in range(STEPS):
        parts, wanted = [], []
        for text in make.sample(range(TEXTS), make.randrange(1, TEXTS + 1)):
            if at[text] >= LENGTH or make.random() < 0.03:
                at[text] = 0
            start = at[text]
            drafts = make.randrange(6) if start and make.random() < 0.5 else 0
            end = start + 1 if drafts else min(LENGTH, start + make.choice((1, 1, 2, 7, 40)))
            tokens = texts[text][start:end] + [make.randrange(VOCAB) for _ in range(drafts)]
            certain = start + 1 if drafts else EVERYTHING
            parts.append(Rows(tokens, start, pages[text], len(tokens), slot=TEXTS + text, certain=certain))
            wanted.append((whole[text][start:end], len(tokens)))
            at[text] = end
        result = step(parts)
        for rows, count in wanted:
            differ += int((result[: len(rows)].view(torch.int32) != rows.view(torch.int32)).any(-1).sum())
            result = result[count:]
    return differ


def tokens_of(artifact: Path, gamma: int) -> tuple[list[list[int]], list[float], float]:
    """Greedy continuations of random prompts with `gamma` drafts a round; acceptance rates, and seconds."""
    make = random.Random(4)
    prompts = [[make.randrange(VOCAB) for _ in range(make.randrange(1, 60))] for _ in range(64)]
    with qcompile.load(artifact, gamma=gamma, kv_cache_bytes=1 << 28) as llm:
        llm.generate(prompts[:16], max_tokens=8, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(prompts, max_tokens=64, temperature=0, ignore_eos=True)
        seconds = time.perf_counter() - start
    rates = [output.speculation.acceptance_rate for output in outputs if output.speculation]
    return [list(o.outputs[0].token_ids) for o in outputs], [rate for rate in rates if rate is not None], seconds


def examine(model: str, how: str, folder: Path) -> Row:
    """A model's bits, and its tokens with drafts."""
    start = time.perf_counter()
    artifact = build(model, how, folder)
    row: Row = {"model": model, "drafts": how, "build_seconds": round(time.perf_counter() - start, 1)}
    with qcompile.load(artifact, gamma=0, kv_cache_bytes=1 << 28) as llm:
        ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))
        bits = llm.logits(ids).view(torch.int32)
        cuts = {str(c): int((llm.logits(ids, chunk=c).view(torch.int32) != bits).sum()) for c in (1, 2, 5, 17, 40)}
        cuts["alone"] = int((llm.logits(ids[:1]).view(torch.int32) != bits[:1]).sum())
        row |= {"different_bits": cuts, "differing_rows": steps_that_differ(llm)}
    plain, _, seconds = tokens_of(artifact, 0)
    drafted, rates, with_drafts = tokens_of(artifact, 3)
    row["different_tokens"] = sum(
        a != b for x, y in zip(plain, drafted, strict=True) for a, b in zip(x, y, strict=True)
    )
    row |= {"tokens": sum(map(len, plain)), "seconds": seconds, "seconds_with_drafts": with_drafts}
    row["acceptance"] = sum(rates) / len(rates) if rates else None
    print(
        f"{model}, {how}: {sum(cuts.values())} logits differ, {row['differing_rows']} rows in {STEPS} random steps,"
        f" {row['different_tokens']} of {row['tokens']} tokens with drafts (acceptance {row['acceptance']})",
        flush=True,
    )
    return row


def models(names: Sequence[str]) -> list[Row]:
    """Models with all kinds of drafts."""
    with tempfile.TemporaryDirectory() as temporary:
        return [examine(model, how, Path(temporary)) for model in names for how in DRAFTED]


def stored() -> Row:
    """What states in fewer bits change: kernels and models with them, and kernels of the same shapes in float32."""
    shapes = [name for name in SHAPES if any(each.startswith(f"{name},") for each in STORED)]
    return {"kernels": kernels([*shapes, *STORED]), "models": models(list(ROUNDED))}


def main() -> int:
    """Do the parts; the exit code."""
    named = [a.split("=", 1)[1].split(",") for a in sys.argv[1:] if a.startswith("--parts=")]
    path = next((Path(a) for a in sys.argv[1:] if not a.startswith("--")), None)
    results: Row = {**facts()}
    parts: dict[str, Callable[[], Any]] = {
        "kernels": partial(kernels, [name for name in SHAPES if name not in STORED]),
        "models": partial(models, list(MODELS)),
        "tiles": tiles,
        "stored": stored,
    }
    for part, measure in parts.items():
        if part in (named[0] if named else ("kernels", "models")):
            results[part] = measure()
            if path:
                path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    wrong = []
    for each in (results, results.get("stored", {})):
        checks = each.get("kernels", {}).get("checks", {}).values()
        wrong += [check for check in checks if check["differing_rows"] or check["error"] > check["most"]]
        for row in each.get("models", []):
            wrong += [row] * any([*row["different_bits"].values(), row["differing_rows"], row["different_tokens"]])
    print(f"{len(wrong)} wrong")
    return QualityError.exit_code if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
