"""Draft heads by GPU kernels, interpreted: they change no token, and draft what the same head drafts in torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from qcompile import pipeline
from qcompile.codegen.gpu.features import write_kernel
from qcompile.codegen.gpu.plan import make_plan
from qcompile.codegen.gpu.rounds import head_draft_launches, head_round_launches
from qcompile.runtime.cuda.heads import CudaHeadSpeculator, HeadRounds
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.targets import TARGETS
from tests.support.calls import fix_calls
from tests.support.compiled import Record
from tests.support.heads import WHOLE_BLOCKS, in_torch, save_head, save_target, torch_shortfalls
from tests.support.interpreted import interpreted, needs_triton
from tests.support.mtp import save

PROMPTS = [[5, 9, 11], [7], list(range(20, 37)), [3, 35, 3] * 4]
"""Two of them are of more positions than a head may lag behind the target."""

LONG = [number * 7 % 50 + 40 for number in range(75)]
"""A prompt of more rows than a step takes."""


def opened(folder: Path) -> Any:
    """The model and its head, the head in bfloat16 too, so that drafts are those of torch."""
    from tests.support.gpu_machine import Machine

    save_target(folder / "model", WHOLE_BLOCKS, depth=2)
    save_head(folder / "model", folder / "head", WHOLE_BLOCKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qcompile.recipes.HEAD_RECIPE", "bf16")
        machine = Machine(str(folder / "model"), "bf16", pages=9, drafts=[str(folder / "head")])
    head = machine.executors[1]
    head.limits = head.limits._replace(max_tokens=40)  # fewer rows a step than the target, as where both are loaded
    return machine


def drafts_of_rounds(machine: Any) -> list[tuple[list[int], list[int]]]:
    """The tokens of each text and the drafts after them, of each call of a single round from now on: a list that
    grows."""
    made: list[tuple[list[int], list[int]]] = []
    run = HeadRounds.run_rounds

    def noted(self: HeadRounds, sequences: Sequence[Any], gammas: Sequence[int], rounds: int) -> Any:
        texts = [list(sequence.tokens) for sequence in sequences]
        result = run(self, sequences, gammas, rounds)
        assert result[1] == 1
        count = len(sequences)
        decoded = machine.driver.at(self.draft.address("decoded"), "*i32")[: max(gammas) * count].tolist()
        made.extend((texts[i], decoded[i::count]) for i in range(count) if sequences[i].computed)
        return result

    HeadRounds.run_rounds = noted  # type: ignore[method-assign]
    return made


def rows_filled(machine: Any) -> list[tuple[int, list[int], Any]]:
    """Of each step that fills the head's cache from now on, for one text: the first position, the tokens, and the
    features that the head reads."""
    filled: list[tuple[int, list[int], Any]] = []
    head = machine.executors[1]
    step = head.step

    def noted(sequences: Sequence[Any], *rest: Any, **more: Any) -> Any:
        if len(sequences) == 1 and not sequences[0].outputs:
            tokens = list(sequences[0].tokens)
            filled.append((sequences[0].start, tokens, head.given[: len(tokens)]))
        return step(sequences, *rest, **more)

    head.step = noted
    return filled


def interpret_heads(folder: str) -> None:
    """Several gammas and requests at once, greedy and drawn, one of them cancelled, with plain steps between rounds.

    The host does not wait for the plain steps. In the second one, the target rests.
    """
    from tests.support.gpu_machine import HostLaunch

    machine, paths = opened(Path(folder)), [Path(folder) / name for name in ("model", "head")]
    made = drafts_of_rounds(machine)
    launched, featured, late = list[str](), list[int](), list[bool]()
    HostLaunch.watch = staticmethod(launched.append)

    def generate(gamma: int, prompts: Sequence[list[int]], plain: int = 1, **options: Any) -> list[list[int]]:
        engine = machine.engine(gamma)
        fix_calls(engine, 1)
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0, **options}, ignore_eos=True)
        requests = [engine.add(prompt, params) for prompt in prompts]
        stray = engine.add([3, 4], SamplingParams(max_tokens=40, temperature=0)) if len(prompts) > 1 else None
        for most in (gamma, gamma, *[0] * plain, gamma):
            engine.speculation.gamma = most
            launched.clear()
            engine.step()
            featured.append(sum(label.startswith("write_features") for label in launched))
            late.append(engine._pending is not None)
        if stray:
            engine.cancel(stray)
        return machine.run(engine, requests)

    drawn = {"temperature": 0.8, "seed": 3, "max_tokens": 3}
    filled = rows_filled(machine)
    plain, random = generate(0, PROMPTS), generate(0, [LONG], **drawn)
    featured.clear()
    late.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qcompile.runtime.speculation.heads._REST_AFTER", 1)
        assert generate(1, PROMPTS[:1], plain=2, max_tokens=9)[0][:6] == plain[0]
    assert featured == [1, 3, 1, 0, 4], featured  # also where the head's cache is filled, and after the rest
    assert late == [False, False, True, True, False]
    assert generate(4, PROMPTS) == plain
    assert generate(2, PROMPTS[1:2]) == plain[1:2]  # its first round has no features
    filled.clear()
    assert generate(2, [LONG], **drawn) == random
    model, net = in_torch(*paths, WHOLE_BLOCKS)
    features = net.fc(model.states(torch.tensor([LONG]), WHOLE_BLOCKS.layers)[0])[0].detach().numpy()
    assert [(first, len(tokens)) for first, tokens, _ in filled] == [(0, 40), (40, 23), (63, 11)]
    for first, tokens, given in filled:
        assert tokens == LONG[first + 1 : first + 1 + len(tokens)]
        off = abs(given - features[first : first + len(tokens)])
        assert off.mean() < 0.1 * features.std()  # bfloat16
    shortfalls = torch_shortfalls(*paths, WHOLE_BLOCKS)
    short = [each for tokens, drafts in made for each in shortfalls(tokens, drafts)]
    assert len(short) > 20 and max(short) < 0.2 and sum(each > 0 for each in short) < len(short) / 8  # bfloat16


def test_heads_interpreted(tmp_path: Path) -> None:
    interpreted(__name__, f"interpret_heads({str(tmp_path)!r})")


def interpret_states(folder: str) -> None:
    """A module for multi-token prediction behind recurrent states, of which rejected drafts leave nothing."""
    from tests.support.gpu_machine import Machine

    save("whole blocks", Path(folder))
    machine = Machine(folder, "bf16", pages=9, drafts="mtp")
    assert machine.target.state_slots and isinstance(machine.speculator, CudaHeadSpeculator)
    rows, *_ = machine.target.plan["rounds"]  # where these did not say what is certain, it would show after LOG_TOKENS
    assert all("certain" in variant["args"] for variant in rows["variants"])
    params, tokens = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True), []
    for gamma in (0, 2):
        engine = machine.engine(gamma)
        fix_calls(engine, 2)
        requests = [engine.add(prompt, params) for prompt in ([5, 9, 11], LONG[:11])]
        tokens.append(machine.run(engine, requests))
    assert tokens[0] == tokens[1]
    drafted, accepted = (
        sum(sum(getattr(request.drafts.metrics, name)) for request in requests) for name in ("drafted", "accepted")
    )
    assert 0 < accepted < drafted and machine.driver.replays > 0, (accepted, drafted)


def test_heads_over_states_interpreted(tmp_path: Path) -> None:
    interpreted(__name__, f"interpret_states({str(tmp_path)!r})")


def test_steps_without_features_compute_none(tmp_path: Path) -> None:
    """The products that fuse hidden states, what rounds these, and the copy."""
    needs_triton()
    save_target(tmp_path / "model", WHOLE_BLOCKS, depth=2)
    save_head(tmp_path / "model", tmp_path / "head", WHOLE_BLOCKS)
    planned = pipeline.plan(str(tmp_path / "model"), target="h100", recipe="qserve", drafts=[str(tmp_path / "head")])
    plan, head = (make_plan(program, TARGETS["h100"]) for program in planned.programs.values())
    kinds = [launch.name.rstrip("_0123456789") for launch in plan.launches if launch.by == "featured"]
    assert sorted(kinds) == ["gemm"] * 3 + ["quantize_activation"] * 3 + ["write_features"]
    assert [launch.name for launch in head.launches if launch.by == "featured"] == ["write_features"]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_heads_compile_without_spills(capability: int, compiled: Record) -> None:
    launches = *head_round_launches(4096, states=True), *head_draft_launches()
    kernels = [variant.code for launch in launches for variant in launch.variants]
    for kernel in (write_kernel(4096, 4096, capability), *kernels):
        assert kernel and compiled(kernel, capability).spill_bytes == 0
