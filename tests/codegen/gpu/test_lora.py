"""What adapters add to linears on GPUs, interpreted: exact by row, with bits that depend on the row and its adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qcompile.codegen.gpu.lora import ExpandSpec, ShrinkSpec
from qcompile.runtime.lora.factors import SiteFactors, laid_out
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.step import Rows
from tests.conftest import MadeOnce
from tests.support.adapters import adapter_of, merged_logits, save, save_llama
from tests.support.compiled import Record
from tests.support.fake import byte_tokenizer
from tests.support.interpreted import interpreted

FILE = "adapter_model.safetensors"
SITE = 1
"""Of two sites; adapters change nothing in the other."""


def factors_of(k: int, n: int, ranks: int, dtype: torch.dtype, seed: int) -> SiteFactors:
    """Factors of an adapter with ranks of their own for each half of the outputs, as parts of a joined linear have."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((ranks, k), (n, ranks)))
    half = n // 32 * 16
    b[:half, ranks // 2 :], b[half:, : ranks // 2] = 0, 0
    return laid_out(a, b, dtype)


def dense(site: SiteFactors, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [ranks, k] and B [n, ranks] of laid out factors, in float64."""
    b = torch.zeros(len(site.blocks) * 16, site.ranks, dtype=torch.float64)
    for number, (first, count, at) in enumerate(site.blocks.tolist()):
        b[number * 16 : number * 16 + 16, first : first + count] = site.b[at // 16 : at // 16 + count].double().T
    return site.a.double(), b[:n]


class Kernels:
    """Both kernels of a site, over the memory of a table of adapters."""

    def __init__(self, k: int, n: int, x: str, group: int, adapters: list[SiteFactors]) -> None:
        from qcompile.runtime.cuda.adapters import DeviceAdapters
        from tests.support.gpu_machine import HostDriver

        self.k, self.n, self.x, self.group, self.driver = k, n, x, group, HostDriver()
        self.table = torch.zeros(8, dtype=torch.int64)
        named = {f"{number}": [None, site] for number, site in enumerate(adapters)}
        DeviceAdapters(self.driver, named, self.driver.keep(self.table), [])  # type: ignore[arg-type]
        factors = "f32" if adapters[0].a.dtype == torch.float32 else "bf16"
        scales = -(-k // group) if group else int(x == "q8")
        self.shrink = ShrinkSpec(SITE, k, x, k + 8, 64, factors, scales, group).kernel(80)
        self.expands = [ExpandSpec(SITE, n, 64, n + 3, factors, *how).kernel(80) for how in ((1, 8), (8, 2))]

    def __call__(self, x: Any, scale: torch.Tensor, y: torch.Tensor, numbers: list[int], many: bool) -> torch.Tensor:
        """y [rows, n + 3] after what adapters with these numbers, one for each row, add for x."""
        from qcompile.codegen.gpu import compile as gpu_compile

        rows, y = len(x), y.clone()
        result = [self.table, torch.tensor([*numbers, 0], dtype=torch.int32), torch.arange(rows, dtype=torch.int32)]
        ranks = torch.full((rows, 64), torch.nan)
        given = [x, scale] if self.x == "q8" else [x]
        gpu_compile.load(self.shrink)[(rows, 4, 1)](*given, *result, ranks)
        per, kernel = (8, self.expands[1]) if many else (1, self.expands[0])
        gpu_compile.load(kernel)[(-(-rows // per), -(-self.n // 128), 1)](ranks, *result, rows, y)
        return y


def interpret_kernels(k: int, n: int, x_type: str, group: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
    adapters = [factors_of(k, n, ranks, dtype, seed) for seed, ranks in enumerate((13, 4, 8))]
    kernels = Kernels(k, n, x_type, group, adapters)
    generator = torch.Generator().manual_seed(9)
    numbers = [2, 0, 1, 3, 3, 0, 0, 0, 0, 0, 1]
    rows = len(numbers)
    real = torch.randn(rows, k + 8, generator=generator)
    scale = torch.rand(rows, -(-k // group) if group else 1, generator=generator) / 50
    stored: Any = {"q8": (40 * real).to(torch.int8), "bf16": real.bfloat16(), "f32": real}[x_type]
    spread = scale.repeat_interleave(group, 1)[:, :k] if group else scale
    x = stored[:, :k].double() * (spread.double() if x_type == "q8" else 1)
    y = torch.randn(rows, n + 3, generator=generator)
    result = kernels(stored, scale, y, numbers, many=True)
    for row, number in enumerate(numbers):
        if not number:
            assert torch.equal(result[row], y[row])
            continue
        a, b = dense(adapters[number - 1], n)
        want = y[row].double()
        want[:n] += b @ (a[:, :k] @ x[row])
        assert (result[row] - want).abs().max() < 1e-5 * want.abs().max()
        alone = kernels(stored[row : row + 1], scale[row : row + 1], y[row : row + 1], [number], many=False)
        assert torch.equal(alone[0], result[row])


@pytest.mark.parametrize(
    "how", ["72, 257, 'bf16'", "200, 40, 'q8'", "1300, 160, 'q8', 128", "40, 24, 'f32', 0, torch.float32"]
)
def test_kernels_interpreted(how: str) -> None:
    interpreted(__name__, f"interpret_kernels({how})")


# ---- models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(made_once: MadeOnce) -> Path:
    """A checkpoint and adapters for it, of different ranks and linears."""
    return made_once("gpu-adapters", _save)


def _save(path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model = save_llama(path, **sizes, **heads)
    save(path / "all", adapter_of(model, rank=5), r=5)
    save(path / "some", adapter_of(model, "self_attn.v_proj gate_proj", seed=50))


SERVED = (None, "all", "some")
MANIFEST: dict[str, Any] = {"model": {"bos_token_id": 0, "eos_token_ids": [0]}}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
TEXTS = [[0, 17, 40, 202, 12], [5, 6, 7], [0, 17, 40, 202, 12], [9], [1, 2, 3, 4, 5, 6]]
NAMES = ["all", None, "some", "some", None]


def interpret_models(folder: str, recipe: str, likeness: float, **options: str) -> None:
    """A step of prompts, and decoding after it, in models with places for adapters and without.

    `likeness`: least cosine between how an adapter moves logits here and in floating point.
    """
    from qcompile.runtime.cuda import launching
    from tests.support.gpu_machine import Machine

    plain = Machine(folder, recipe, pages=6, options=options)
    machine = Machine(folder, recipe, pages=6, options={"lora.rank": 6, **options})
    adapters = machine.adapt(6, {name: Path(folder) / name for name in ("all", "some")})

    def step(executor: Any, chosen: list[int], begin: int, end: int | None) -> list[torch.Tensor]:
        rows = [Rows(TEXTS[k][begin:end], begin, [k], len(TEXTS[k][begin:end])) for k in chosen]
        result = torch.from_numpy(executor.step(rows, logits=True)[1].copy())
        return list(result.split([each.outputs for each in rows]))

    def mark(names: list[str | None]) -> None:
        for page, name in enumerate(names):
            adapters.mark(page, name)

    every = list(range(len(TEXTS)))
    base = step(plain.target, every, 0, None)
    assert all(map(torch.equal, step(machine.target, every, 0, None), base))
    mark(NAMES)
    result = step(machine.target, every, 0, None)
    for k, name in enumerate(NAMES):
        alone = torch.cat([step(machine.target, [k], 0, 1)[0]] + [step(machine.target, [k], 1, None)[0]] * (k != 3))
        assert torch.equal(alone, result[k])
        assert torch.equal(result[k], base[k]) == (name is None)
        if name:
            tensors = {n.removeprefix("base_model.model."): v for n, v in load_file(f"{folder}/{name}/{FILE}").items()}
            scale, ids = 6 / (5 if name == "all" else 4), torch.tensor([TEXTS[k]])
            want, without = (merged_logits(Path(folder), tensors, ids, each)[0].flatten() for each in (scale, 0.0))
            moved = (result[k] - base[k]).flatten()
            assert torch.cosine_similarity(moved, want - without, 0) > likeness
            assert 0.6 < moved.norm() / (want - without).norm() < 1.6
    one = [Rows([3], len(text), [k], 1) for k, text in enumerate(TEXTS)]
    launching.GRAPH_FROM = 2
    graphs, replays = len(machine.target.launcher.graphs), machine.driver.replays
    for names in (NAMES, NAMES[::-1], ["all"] * 5, NAMES):  # a graph is replayed for any mix of adapters
        mark(names)
        tokens = machine.target.decode(one, 1)
    assert (len(machine.target.launcher.graphs), machine.driver.replays) == (graphs + 1, replays + 3)
    assert tokens != plain.target.decode(one, 1)


# 4 bits move the logits of this random model by 0.3 to 0.4 of their norm, which is as much as adapters do.
@pytest.mark.parametrize(
    "how",
    [
        "'bf16', 0.99, **{'rotate.enabled': True, 'fold_norms.enabled': True}",
        *(pytest.param(how, marks=pytest.mark.exhaustive) for how in ("'bf16', 0.99", "'qserve', 0.5")),
    ],
)
def test_rows_have_their_adapters_interpreted(checkpoint: Path, how: str) -> None:
    interpreted(__name__, f"interpret_models({str(checkpoint)!r}, {how})")


def interpret_server() -> None:
    """Clients ask for adapters as models; drafts change no text."""
    from tempfile import TemporaryDirectory

    from qcompile.runtime.llm import LLM
    from tests.runtime.server.test_server import serving
    from tests.support.gpu_machine import Machine

    with TemporaryDirectory() as place:
        folder = Path(place)
        _save(folder)
        machine = Machine(str(folder), "bf16", pages=12, drafts=["lookup"], options={"lora.rank": 6})
        machine.adapt(6, {"all": folder / "all", "some": folder / "some"})
    llm = LLM(machine.target, MANIFEST, byte_tokenizer(), 4, machine.speculator)
    llm.engine.scheduler.adapters = machine.target.inputs.adapters
    prompt = byte_tokenizer().encode("w<w<w").ids
    params = [SamplingParams(**GREEDY, logprobs=1, lora=name) for name in SERVED]
    result: list[Any] = []
    for gamma in (0, 2):
        llm.engine.speculation.gamma = gamma
        outputs = [output.outputs[0] for output in llm.generate([prompt] * 3, params)]
        result.append([(each.token_ids, each.cumulative_logprob) for each in outputs])
    assert result[0] == result[1] and len({total for _, total in result[0]}) == 3
    vectors: list[Any] = []
    with serving(llm) as client:
        for name, (_, total) in zip(SERVED, result[0], strict=True):
            answer = client.complete("w<w<w", **GREEDY, logprobs=1, model=name or "tiny")
            assert sum(answer["choices"][0]["logprobs"]["token_logprobs"]) == pytest.approx(total, abs=1e-4)
            embedded = client.ask("/v1/embeddings", {"input": "w<", "model": name or "tiny"})[1]
            assert answer["model"] == embedded["model"] == (name or "tiny")
            vectors.append(tuple(embedded["data"][0]["embedding"]))
        assert len(set(vectors)) == 3
        assert [one["id"] for one in client.ask("/v1/models")[1]["data"]] == ["tiny", "all", "some"]


def test_servers_answer_for_adapters_interpreted() -> None:
    interpreted(__name__, "interpret_server()")


# ---- compiled kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [80, 90, 100])
def test_kernels_compile_without_spills(compiled: Record, target: int) -> None:
    """For an 8B model's largest linear."""
    shrink = compiled(ShrinkSpec(3, 14336, "q8", 14336, 32, "bf16", 112, 128).kernel(target), target)
    few, many = (
        compiled(ExpandSpec(3, 28672, 32, 28672, "bf16", *how).kernel(target), target) for how in ((1, 8), (8, 2))
    )
    assert shrink.spill_bytes == few.spill_bytes == many.spill_bytes == 0
    assert max(shrink.registers, few.registers, many.registers) <= 128
