"""Speculation by GPU kernels, interpreted: rounds change nothing but how fast the target's own tokens come."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
import torch

from qcompile import pipeline
from qcompile.codegen.gpu.launches import TEXT_TOKENS
from qcompile.codegen.gpu.rounds import lookup_launch, round_launches
from qcompile.runtime.cuda.rounds import CudaRounds
from qcompile.runtime.sampling import accept
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.speculation import lookup
from qcompile.runtime.speculation.host import HostSpeculator
from qcompile.targets import TARGETS
from tests.support.calls import fix_calls
from tests.support.cases import first
from tests.support.graphs import decoder
from tests.support.interpreted import interpreted, needs_triton

SMALL: dict[str, Any] = {"vocab": 40, "hidden": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 128, "layers": 1}
WIDE = SMALL | {"hidden": 256, "heads": 4, "ffn": 256}
"""Whole blocks of each packing."""
PROMPTS = [[5, 9, 11], [7], list(range(20, 37))]
GREEDY = {"temperature": 0, "ignore_eos": True}


def interpret_rounds(recipe: str) -> None:
    """Tokens with drafts, good and bad ones, against tokens without; in a process that has TRITON_INTERPRET set."""
    from tests.support.gpu_machine import Machine

    torch.manual_seed(0)
    machine = Machine(decoder(**(WIDE if recipe == "qspec" else SMALL)), recipe, pages=9)
    every = [SamplingParams(max_tokens=count, **GREEDY) for count in (6, 2, 5)]  # type: ignore[arg-type]

    def generate(gamma: int, prompts: range = range(3), **drawn: Any) -> tuple[list[list[int]], list[Any]]:
        engine = machine.engine(gamma)
        params = [SamplingParams(max_tokens=3, **drawn) if drawn else every[i] for i in prompts]
        requests = [engine.add(PROMPTS[i], p) for i, p in zip(prompts, params, strict=True)]
        return machine.run(engine, requests), requests

    plain, _ = generate(0)
    result, requests = generate(2)
    assert result == plain
    assert machine.driver.replays > 0  # rounds are graphs
    rate = sum(r.drafts.metrics.acceptance_rate or 0 for r in requests) / len(requests)
    assert rate > 0.6, rate  # the draft is nearly the target
    drawn = {"temperature": 0.8, "seed": 3, "ignore_eos": True}
    assert generate(2, range(1), **drawn)[0] == generate(0, range(1), **drawn)[0]
    # A draft with a head of garbage is nearly always wrong.
    assert machine.speculator
    draft = machine.speculator.draft
    head = [name for name in draft.launcher._weights if name.endswith(".w")][-1]
    size = len(machine.driver.memory[machine.weights[head]])
    garbage = machine.driver.keep(torch.randint(0, 256, (size,), dtype=torch.uint8))
    draft.launcher._weights = {**draft.launcher._weights, head: garbage}
    draft.launcher.forget()
    result, requests = generate(3, range(2))
    assert result == plain[:2]
    assert sum(r.drafts.metrics.acceptance_rate or 0 for r in requests) / len(requests) < 0.5


def interpret_rounds_of_a_ring() -> None:
    """quantspec across a boundary of groups, where drafts already read what the target reads in full as rounded."""
    from tests.support.gpu_machine import Machine

    torch.manual_seed(0)
    machine = Machine(decoder(**SMALL), "quantspec", pages=20, max_tokens=300, split=128, fine=True)
    result = []
    for gamma in (0, 3):
        engine = machine.engine(gamma)
        params = SamplingParams(max_tokens=7, **GREEDY)  # type: ignore[arg-type]
        requests = [engine.add([(7 * i) % SMALL["vocab"] for i in range(252)], params)]
        result.append(machine.run(engine, requests))
    assert result[0] == result[1]
    assert sum(requests[0].drafts.metrics.drafted) >= 3


def test_rounds_of_a_ring_interpreted() -> None:
    interpreted(__name__, "interpret_rounds_of_a_ring()")


@pytest.mark.parametrize("recipe", first(("nested",), ["qspec", "nested"]))
def test_rounds_interpreted(recipe: str) -> None:
    interpreted(__name__, f"interpret_rounds('{recipe}')")


def interpret_acceptance() -> None:
    """The two kernels of a round against accept.greedy, at random drafts, gammas and ends."""
    from qcompile.codegen.gpu.compile import load

    make = random.Random(1)
    for count, rows in ((1, 1), (3, 4), (5, 2)):
        total = {"last": count, "place": count, "left": count, "most": count, "counter": 1, "gained": 2 * count}
        total |= {"tokens": 2 * count * rows, "decoded": count * rows, "token_ids": count * rows}
        total |= {"positions": count * rows, "argmax": count * rows}
        total |= {"draft_token_ids": count, "draft_positions": count, "draft_counter": 1}
        total |= {"pair_tokens": 2 * count, "pair_positions": 2 * count}
        state = {name: torch.full((size,), -9, dtype=torch.int32) for name, size in total.items()}
        state["counter"][:] = 1
        for name, most in (("last", 3), ("place", 90), ("left", 5), ("most", rows), ("decoded", 2), ("argmax", 2)):
            state[name][:] = torch.tensor([make.randrange(most) for _ in state[name]])
        before = {name: tensor.tolist() for name, tensor in state.items()}
        for launch in round_launches():
            kernel: Any = launch.variants[0].code
            load(kernel)[(1,)](*(state[a.name] for a in kernel.arguments[:-2]), count, rows)
        for s in range(count):
            drafts = [before["decoded"][j * count + s] for j in range(rows - 1)]
            assert state["token_ids"][s * rows : (s + 1) * rows].tolist() == [before["last"][s], *drafts]
            assert state["positions"][s * rows :][:rows].tolist() == [before["place"][s] + j for j in range(rows)]
            allowed = drafts[: max(0, min(before["most"][s], before["left"][s] - 1))]
            want = accept.greedy(allowed, before["argmax"][s * rows : (s + 1) * rows]) if before["left"][s] else []
            assert state["gained"][count + s] == len(want)
            assert state["tokens"][(count + s) * rows :][: len(want)].tolist() == want
            last = want[-1] if want else before["last"][s]
            assert state["last"][s] == state["draft_token_ids"][s] == last
            assert state["place"][s] == state["draft_positions"][s] == before["place"][s] + len(want)
            assert state["left"][s] == before["left"][s] - len(want)
            pair = slice(2 * s, 2 * s + 2)
            place, last_two = before["place"][s] + len(want), [before["last"][s], *want][-2:]
            assert state["pair_tokens"][pair].tolist() == (last_two if want else before["pair_tokens"][pair])
            assert state["pair_positions"][pair].tolist() == ([place - 1, place] if want else [-9, -9])
        assert state["counter"].tolist() == [2] and state["draft_counter"].tolist() == [0]


def test_acceptance_interpreted() -> None:
    interpreted(__name__, "interpret_acceptance()")


def test_drafts_share_the_weights_of_their_target() -> None:
    """What a draft reads is the target's, byte for byte: the scales of its activations are all that is new."""
    model = decoder(**SMALL)
    result = pipeline.plan(model, target="h200", recipe="qspec")
    alone = pipeline.plan(model, target="h200", recipe="w4a16")
    sizes = [sum(size for w in plan.weights for _, size in w.blobs) for plan in (result, alone)]
    assert sizes[0] == sizes[1]


def interpret_graphs_of_rounds(draft: str) -> None:
    """A draft with a cache of its own, or a lookup: what is drafted and kept is as by the host's steps."""
    from tests.support.gpu_machine import Machine

    lookup.SHORTEST_MATCH = 1  # so that a lookup finds something
    model = decoder(**SMALL)
    # 4 bits of the model itself are often right, now and then all the way.
    machine = Machine(model, "bf16", pages=9, drafts=[draft if draft == "lookup" else model])
    graphs = machine.speculator
    assert isinstance(graphs, CudaRounds)
    # A text in which something recurs, and one that a draft is right about now and then.
    first, counts = ([31], (8, 2)) if draft == "lookup" else ([34], (10, 3))
    params = [SamplingParams(max_tokens=count, **GREEDY) for count in counts]  # type: ignore[arg-type]
    result, kept = [], []
    for gamma, speculator in ((0, None), (2, graphs), (2, HostSpeculator(machine.target, graphs.stages))):
        machine.speculator = speculator
        engine = machine.engine(gamma)
        fix_calls(engine, 3)
        requests = [engine.add(prompt, one) for prompt, one in zip((first, [5, 9, 11]), params, strict=True)]
        result.append(machine.run(engine, requests))
        kept.append([(r.drafts.metrics.rounds, r.drafts.metrics.drafted, r.drafts.metrics.accepted) for r in requests])
    assert result[1] == result[2] == result[0]
    assert kept[1] == kept[2] and machine.driver.replays > 0
    rounds, drafted, accepted = kept[1][0]
    assert 0 < accepted[0] < drafted[0] <= rounds
    # Rounds after which a draft's own cache lacks two tokens, and one.
    assert draft == "lookup" or 0 < accepted[1] < drafted[1]


@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_graphs_of_rounds_interpreted(draft: str) -> None:
    interpreted(__name__, f"interpret_graphs_of_rounds({draft!r})")


def interpret_lookup() -> None:
    """The kernel that proposes against runtime's look_up, in texts of any length to which a round adds."""
    from qcompile.codegen.gpu.compile import load

    kernel: Any = lookup_launch().variants[0].code
    make, proposed = random.Random(2), 0
    for count, rows, match, shortest in ((1, 2, 8, 3), (5, 5, 2, 1), (6, 16, 8, 3), (3, 3, 5, 4)) * 3:
        texts = [[make.randrange(3) for _ in range(make.choice((1, 2, 3, 9, 40, 1025)))] for _ in range(count)]
        news = [[make.randrange(3) for _ in range(make.randrange(rows + 1))] for _ in range(count)]
        most, left = ([make.randrange(rows + 1) for _ in range(count)] for _ in range(2))
        lengths = [len(text) for text in texts]
        for turn in range(2):
            tensors = {name: torch.full((count * TEXT_TOKENS,), -9, dtype=torch.int32) for name in ("text", "decoded")}
            for s, text in enumerate(texts):
                tensors["text"][s * TEXT_TOKENS :][: len(text)] = torch.tensor(text)
            tokens = [token for new in news for token in (*new, *[7] * (rows - len(new)))]
            values = {"length": lengths, "match": [match, shortest], "most": most, "left": left, "counter": [turn]}
            values |= {"gained": [len(new) for new in news], "tokens": tokens, "drafted": [-9] * 2 * count}
            tensors |= {name: torch.tensor(items, dtype=torch.int32) for name, items in values.items()}
            load(kernel)[(count,)](*(tensors[a.name] for a in kernel.arguments[:-2]), count, rows)
            for s, (text, new) in enumerate(zip(texts, news, strict=True)):
                known = array("i", text + new * turn)
                assert tensors["length"][s] == len(known)
                assert tensors["text"][s * TEXT_TOKENS :][: len(known)].tolist() == known.tolist()
                result = lookup.look_up(known, match, min(most[s], left[s] - 1), shortest)
                drafts = [int(tensors["decoded"][j * count + s]) for j in range(rows - 1)]
                assert tensors["drafted"][turn * count + s] == result
                want = known.tolist()[len(known) - result :] + [-2] * rows
                assert drafts == want[: rows - 1]
                proposed += result > 0
    assert proposed > 10


def test_lookup_interpreted() -> None:
    interpreted(__name__, "interpret_lookup()")


def interpret_levels() -> None:
    """Drafts of another model, with a cache of its own, and of a lookup, below a recipe's own."""
    from tests.support.gpu_machine import Machine

    torch.manual_seed(0)
    model = decoder(**SMALL)
    machine = Machine(model, "nested", pages=9, drafts=[decoder(**SMALL), "lookup"])
    assert type(machine.speculator) is HostSpeculator
    lookup.SHORTEST_MATCH = lookup.SURE_MATCH = 1  # so that a lookup finds something
    prompts = [[5, 9, 11], list(range(SMALL["vocab"]))]
    drawn = SamplingParams(max_tokens=3, temperature=0.8, seed=3, ignore_eos=True)
    params = [SamplingParams(max_tokens=9, **GREEDY), SamplingParams(max_tokens=6, **GREEDY)]  # type: ignore[arg-type]
    for every in (params, [drawn]):
        result = []
        for gamma in (0, 3):
            engine = machine.engine(gamma)
            requests = [engine.add(prompt, one) for prompt, one in zip(prompts[-len(every) :], every, strict=True)]
            result.append(machine.run(engine, requests))
        assert result[0] == result[1]
        assert sum(requests[-1].drafts.metrics.drafted) > 0


def test_levels_interpreted() -> None:
    interpreted(__name__, "interpret_levels()")


@pytest.mark.parametrize("recipe", ["ml-specqd", "qspec-w4a4", "quantspec-w8"])
def test_every_recipe_that_drafts_is_planned(recipe: str) -> None:
    from qcompile.codegen.gpu.build import prepare

    needs_triton()
    prepare(pipeline.plan(decoder(**SMALL), target="h200", recipe=recipe).programs, TARGETS["h200"])
