"""Models with recurrent states from the build to the text: drafts, preemption, cancellation, and slots used again."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qcompile
from qcompile import check
from qcompile.artifact import export
from qcompile.artifact.packed_weights import STEP
from qcompile.cli import inspect
from qcompile.errors import ArtifactError, ResourceError, UnsupportedError
from qcompile.formats.states import StateFormat
from qcompile.runtime.llm import LLM
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.speculation.host import HostSpeculator
from tests.artifact.test_rebuilt import sealed_again
from tests.support.calls import fix_calls
from tests.support.cases import first
from tests.support.families import COMMON, save
from tests.support.modules import VOCAB, randomized
from tests.support.ranks import TWO

HIDDEN, HEADS, KEY_HEADS, SIZE, WIDTH, LONGEST = 64, 4, 2, 8, 16, 256
INNER = 2 * KEY_HEADS * SIZE + HEADS * WIDTH
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
recurrence: Callable[..., Tensor] = torch.ops.qcompile.linear_recurrence
convolution: Callable[..., Tensor] = torch.ops.qcompile.causal_conv


class Recurrent(nn.Module):
    """A convolution and a delta rule."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.taps = nn.Linear(HIDDEN, INNER, bias=False), nn.Parameter(torch.randn(INNER, 4) / 2)
        self.decay, self.gain = nn.Linear(HIDDEN, HEADS), nn.Linear(HIDDEN, HEADS)
        self.rates, self.out = nn.Parameter(torch.ones(HEADS)), nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        keys = KEY_HEADS * SIZE
        mixed = 0.5 * F.silu(convolution(self.project(x), self.taps))
        q, k, v = mixed.split([keys, keys, HEADS * WIDTH], -1)
        q, k, v = (t.unflatten(-1, (n, -1)) for t, n in ((q, KEY_HEADS), (k, KEY_HEADS), (v, HEADS)))
        decay = F.softplus(self.decay(x)) * -self.rates.exp()
        return self.out(recurrence(q, k, v, decay, None, self.gain(x).sigmoid(), True).flatten(2))


class Attention(nn.Module):
    """Two heads, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * 32, bias=False), nn.Linear(32, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Hybrid(nn.Module):
    """A decoder of recurrent layers and, if `attends`, attention after the first."""

    def __init__(self, attends: bool = True, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        mixers: list[nn.Module] = [Recurrent() for _ in range(layers)]
        self.mixers = nn.ModuleList([*mixers[:1], *([Attention()] if attends else []), *mixers[1:]])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for mixer in self.mixers:
            x = x + mixer(F.rms_norm(x, (HIDDEN,), eps=1e-6))
        return self.head(F.rms_norm(x, (HIDDEN,), eps=1e-6))


def text(tokens: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, tokens), generator=torch.Generator().manual_seed(tokens))


@cache
def model_of(attends: bool = True, layers: int = 2) -> nn.Module:
    torch.manual_seed(3)
    return randomized(Hybrid(attends, layers))


FAMILIES: dict[str, dict[str, Any]] = {
    "mamba": {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "olmo_hybrid": COMMON
    | {
        **{"vocab_size": VOCAB, "linear_key_head_dim": 12, "linear_value_head_dim": 20, "head_dim": 16},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        "layer_types": ["linear_attention", "full_attention"],
    },
}


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds the hybrid with a recipe."""

    @cache
    def build(
        recipe: str, attends: bool = True, kind: str = "", lookup: bool = False, states: StateFormat = "f32"
    ) -> Path:
        folder = tmp_path_factory.mktemp("states")
        out = folder / "out"
        if kind:
            model, draft = saved(kind, folder)
            qcompile.build(model, out, recipe=recipe, drafts=draft)
        else:
            source: dict[str, Any] = {"max_position": LONGEST, "example_inputs": (text(7),)}
            source |= {"options": {"cache.states": states}, "drafts": ["lookup"] * lookup}
            qcompile.build(model_of(attends), out, recipe=recipe, **source)
        return out

    def saved(kind: str, folder: Path) -> tuple[str, str]:
        """Checkpoints of a model of transformers, and of its draft: the same model with other weights."""
        module: Any = save(kind, FAMILIES[kind], folder / "model")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1 + 0.05 * torch.randn(parameter.shape))
        module.save_pretrained(folder / "draft")
        return str(folder / "model"), str(folder / "draft")

    return build


def prompts_of(count: int, longest: int, seed: int) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(VOCAB) for _ in range(drawn.randint(1, longest))] for _ in range(count)]


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]


def test_logits_of_linears_of_slices_are_those_of_transformers(tmp_path: Path) -> None:
    """Each of Zamba's two heads projects its own columns of a convolution."""
    sizes = {"mamba_d_state": 8, "mamba_dt_rank": 28, "n_mamba_heads": 2}
    layers = {"num_hidden_layers": 1, "layers_block_type": ["mamba"], "vocab_size": VOCAB}
    module: Any = save("zamba", COMMON | sizes | layers, tmp_path / "model")
    qcompile.build(tmp_path / "model", tmp_path / "out", recipe="f32")
    ids = torch.randint(1, VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    with qcompile.load(tmp_path / "out", threads=1) as llm, torch.no_grad():
        # float32 sums of about 100 numbers of size 1 in another order
        torch.testing.assert_close(llm.logits(ids), module(ids, use_cache=False).logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("attends", [True, False])
def test_logits_are_those_of_the_module_whatever_the_steps(artifact: Callable[..., Path], attends: bool) -> None:
    with qcompile.load(artifact("f32", attends), threads=2) as llm, torch.no_grad():
        for tokens in (1, 9, 48, 200):
            result, wanted = llm.logits(text(tokens)), model_of(attends)(text(tokens))
            assert check.max_relative_error(result, wanted) < 1e-4  # float32 in another order, fed back for 200 tokens
            assert all(torch.equal(llm.logits(text(tokens), chunk=chunk), result) for chunk in (1, 7))


RECIPES = {
    "nested": {"recipe": "nested"},
    "ml-specqd": {"recipe": "ml-specqd"},
    "qspec": {"recipe": "qspec"},
    "lookup": {"recipe": "f32", "lookup": True},
    "own states": {"recipe": "f32", "kind": "olmo_hybrid"},
    "own states without attention": {"recipe": "f32", "kind": "mamba"},
    "nested, states in int8": {"recipe": "nested", "states": "int8"},
    "lookup, states in bf16": {"recipe": "f32", "lookup": True, "states": "bf16"},
}


@pytest.mark.parametrize("name", first(("nested", "own states", "lookup", "nested, states in int8"), RECIPES))
def test_drafts_change_no_token(artifact: Callable[..., Path], name: str) -> None:
    out, prompts = artifact(**RECIPES[name]), prompts_of(24, 60, 1)
    prompts += [[*prompt[:8] * 4] for prompt in prompts[:6]]  # where a lookup finds something
    with qcompile.load(out, threads=2, gamma=0) as llm:
        wanted = tokens_of(llm, prompts)
    for gamma in (1, 5, 15):
        with qcompile.load(out, threads=2, gamma=gamma) as llm:
            for count in (1, 7):
                fix_calls(llm.engine, count)
                results = llm.generate(prompts, GREEDY)
                assert [list(result.outputs[0].token_ids) for result in results] == wanted
                metrics = [result.speculation for result in results]
                drafted, accepted = (sum(sum(getattr(m, field)) for m in metrics) for field in ("drafted", "accepted"))
                assert 0 < accepted < drafted
            llm.engine.check()


@pytest.mark.parametrize("name", ["nested", "own states"])
def test_rounds_from_the_host_and_drawn_tokens(artifact: Callable[..., Path], name: str) -> None:
    out, prompts = artifact(**RECIPES[name]), prompts_of(12, 60, 6)
    drawn = SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True)
    with qcompile.load(out, threads=2, gamma=0) as llm:
        wanted = [tokens_of(llm, prompts, params) for params in (GREEDY, drawn)]
    with qcompile.load(out, threads=2, gamma=6) as llm:
        assert [tokens_of(llm, prompts, params) for params in (GREEDY, drawn)] == wanted
        speculation: Any = llm.engine.speculation
        speculation.drafter = HostSpeculator(llm.executor, speculation.drafter.stages)
        assert [tokens_of(llm, prompts, params) for params in (GREEDY, drawn)] == wanted
        speculation.rejects = True  # other tokens, of the same distribution
        assert all(len(tokens) == 40 for tokens in tokens_of(llm, prompts, drawn))
        llm.engine.check()


def test_a_preempted_request_starts_again(artifact: Callable[..., Path]) -> None:
    out, prompts = artifact("f32"), prompts_of(8, 60, 2)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with qcompile.load(out, threads=2, max_batch=1) as llm:
        wanted = tokens_of(llm, prompts, params)
        page_bytes = llm.manifest["runtime"]["kv"]["page_bytes"]
    with qcompile.load(out, threads=2, max_batch=8, kv_cache_bytes=9 * page_bytes) as llm:
        assert tokens_of(llm, prompts, params) == wanted
        assert llm.engine.scheduler.preemptions > 0
        llm.engine.check()
        assert llm.engine.scheduler.slots.free == 8


def test_slots_never_leak_from_one_request_to_another(artifact: Callable[..., Path]) -> None:
    """Slots that are free are overwritten with NaN after each step; requests are cancelled at random."""
    out, prompts, drawn = artifact("f32"), prompts_of(60, 40, 4), random.Random(5)
    with qcompile.load(out, threads=2, max_batch=4) as llm:
        wanted = tokens_of(llm, prompts)
    with qcompile.load(out, threads=2, max_batch=4) as llm:
        states = np.frombuffer(llm.executor.states.view, np.float32).reshape(4 * 5, -1)  # type: ignore[attr-defined]
        requests = [llm.engine.add(prompt, GREEDY) for prompt in prompts]
        while llm.engine.busy:
            llm.engine.step()
            if drawn.random() < 0.2:
                llm.engine.cancel(drawn.choice(requests))
            llm.engine.check()
            states[llm.engine.scheduler.slots.listed] = np.nan
        for request, expected in zip(requests, wanted, strict=True):
            got = list(request.output.token_ids)
            assert got == (expected[: len(got)] if request.output.finish_reason == "abort" else expected)


@pytest.mark.parametrize("states", ["f32", "bf16"])
def test_prompts_that_begin_alike_continue_from_a_copy(artifact: Callable[..., Path], states: StateFormat) -> None:
    """Texts that share 150 tokens, a longer continuation of one, and one that was computed before."""
    out, drawn = artifact("f32", states=states), random.Random(7)
    shared = [drawn.randrange(VOCAB) for _ in range(150)]
    prompts = [[*shared, *tail] for tail in prompts_of(5, 30, 8)]
    prompts += [[*shared, *prompts[0][150:], *shared[:40]], prompts[2]]
    with qcompile.load(out, threads=2, prefix_caching=False) as llm:
        wanted = [tokens_of(llm, [prompt])[0] for prompt in prompts]
        assert llm.engine.scheduler.snapshots is None
    with qcompile.load(out, threads=2) as llm:
        results = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert [list(result.outputs[0].token_ids) for result in results] == wanted
        assert [result.metrics.cached_tokens for result in results] == [0, *[128] * 6]
        llm.engine.check()
        assert tokens_of(llm, prompts) == wanted  # at once
        llm.engine.check()


@pytest.mark.parametrize("lookup", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_prompts_continue_from_copies_in_each_of_two_processes(lookup: bool, tmp_path: Path) -> None:
    """Also where drafts are rejected, and after the model has slept."""
    drawn = random.Random(7)
    shared, other = ([drawn.randrange(VOCAB) for _ in range(150)] for _ in range(2))
    prompts = [[*start, *tail] for start in (shared, other) for tail in prompts_of(3, 30, 8)]
    source: dict[str, Any] = {"max_position": LONGEST, "example_inputs": (text(7),)}
    qcompile.build(model_of(), tmp_path / "out", recipe="f32", drafts=["lookup"] * lookup, options=TWO, **source)
    with qcompile.load(tmp_path / "out", threads=1, gamma=0, prefix_caching=False) as llm:
        wanted = [tokens_of(llm, [prompt])[0] for prompt in prompts]
    with qcompile.load(tmp_path / "out", threads=1, gamma=2 * lookup) as llm:
        results = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert [list(result.outputs[0].token_ids) for result in results] == wanted
        assert [result.metrics.cached_tokens for result in results] == [0, 128, 128] * 2
        assert tokens_of(llm, prompts) == wanted
        llm.sleep()
        llm.wake_up()
        [again] = llm.generate(prompts[:1], GREEDY)
        assert list(again.outputs[0].token_ids) == wanted[0] and not again.metrics.cached_tokens
        llm.engine.check()


def test_what_texts_share_is_kept_once_two_have_it(artifact: Callable[..., Path]) -> None:
    """The first keeps its states at its own end; the second, at the end of what it shares with the first."""
    drawn = random.Random(9)
    shared, *tails = ([drawn.randrange(VOCAB) for _ in range(count)] for count in (70, 130, 130, 130))
    prompts = [[*shared, *tail] for tail in tails]
    with qcompile.load(artifact("f32"), threads=2, prefix_caching=False) as llm:
        wanted = tokens_of(llm, prompts)
    with qcompile.load(artifact("f32"), threads=2) as llm:
        results = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert [list(result.outputs[0].token_ids) for result in results] == wanted
        assert [result.metrics.cached_tokens for result in results] == [0, 0, 64]


def test_kernels_are_rebuilt_with_states_in_their_places(artifact: Callable[..., Path], tmp_path: Path) -> None:
    out = shutil.copytree(artifact("nested"), tmp_path / "out")
    [(name, library)] = qcompile.rebuild(out).libraries.items()
    assert library == (out / name).read_bytes()
    graph = json.loads((out / STEP).read_text())
    step = next(node for node in graph["nodes"] if node["target"] == "recurrence_step")
    step["args"][-1] = 0
    (out / STEP).write_text(json.dumps(graph))
    sealed_again(out, STEP)
    with pytest.raises(ArtifactError, match="does not fit together: ValueError: states begin at"):
        qcompile.rebuild(out)


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_states_in_fewer_bits(artifact: Callable[..., Path], states: StateFormat) -> None:
    """Logits have the same bits whatever the steps, and are near those of float32; a rebuilt library has the format."""
    whole, out = artifact("f32"), artifact("f32", states=states)
    with qcompile.load(whole, threads=2) as llm:
        wanted, bytes_of_f32 = llm.logits(text(200)), llm.manifest["runtime"]["kv"]["slot_bytes"]
    with qcompile.load(out, threads=2) as llm:
        result, kv = llm.logits(text(200)), llm.manifest["runtime"]["kv"]
        assert all(torch.equal(llm.logits(text(200), chunk=chunk), result) for chunk in (1, 7, 8, 37))
    # Eight significant bits in bf16, and a little less in int8, of which states that fade forget the rounding soon.
    assert 1e-5 < check.max_relative_error(result, wanted) < 0.05
    assert kv["state_format"] == states and kv["slot_bytes"] != bytes_of_f32
    [(name, library)] = qcompile.rebuild(out).libraries.items()
    assert library == (out / name).read_bytes()
    details: Any = inspect.summary(out)
    assert details["kv"]["state_format"] == states and details["sizes"]["states_per_request"] == kv["slot_bytes"]
    assert f"\ncache    kv32, recurrent states in {states}\n" in inspect.as_text(details)
    with pytest.raises(UnsupportedError, match=f"export: states in {states} are rounded as a text grows"):
        export.Sequence(out)(text(3)[0])


def test_few_copies_are_used_again(artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    out, texts = artifact("nested"), [[token] * 140 for token in range(12)]
    with qcompile.load(out, threads=2, gamma=0, prefix_caching=False) as llm:
        wanted = tokens_of(llm, texts)
    monkeypatch.setattr("qcompile.runtime.cpu.load._snapshots", lambda *given: 3)
    with qcompile.load(out, threads=2, gamma=4, max_batch=4) as llm:
        for _ in range(3):
            drawn = random.Random(1).sample(range(12), 12)
            assert tokens_of(llm, [texts[i] for i in drawn]) == [wanted[i] for i in drawn]
            llm.engine.check()


def test_states_that_memory_does_not_hold_are_refused(
    artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcompile.runtime.cpu.load.available_memory", lambda: 200_000)
    with pytest.raises(ResourceError, match=r"recurrent states of 16 requests take [\d,]+ bytes, 200,000 .* max_batch"):
        qcompile.load(artifact("f32"), threads=2)
