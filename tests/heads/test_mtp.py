"""Modules for multi-token prediction: what they compute, what they draft, and which checkpoints are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import qcompile
from qcompile import SamplingParams
from qcompile.clock import Clock, silent
from qcompile.drafts.heads import ModuleSource
from qcompile.errors import QCompileError, UnsupportedError, UsageError
from qcompile.graph import Graph
from qcompile.heads.layout import WEIGHTS
from qcompile.passes.raising import Raise
from qcompile.pipeline import plan
from tests.conftest import MadeOnce
from tests.support.calls import fix_calls
from tests.support.mtp import Reference, save

PROMPTS = [[5, 6, 7, 8, 9], [11] * 40, [3], [9, 8, 7] * 20]

MORE = [pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("glm", "mimo")]


@pytest.fixture(scope="module")
def checkpoint(made_once: MadeOnce) -> Callable[[str], Path]:
    return lambda kind: made_once(f"mtp-{kind}", lambda path: save(kind, path))


@pytest.fixture(scope="module")
def artifact(made_once: MadeOnce, checkpoint: Callable[[str], Path]) -> Callable[[str], Path]:
    """The checkpoints and their modules as artifacts, which no test changes; built when first asked for."""
    return lambda kind: made_once(
        f"mtp-{kind}-w8a8", lambda out: qcompile.build(str(checkpoint(kind)), out, recipe="w8a8", drafts="mtp")
    )


def raised(path: Path) -> Graph:
    """The module in `path` as a raised graph."""
    return ModuleSource.of(path).graph(Graph.__new__(Graph), "draft1.", Raise(), Clock(silent))


@pytest.mark.parametrize("kind", ["deepseek", "qwen", *MORE])
def test_computes_what_the_layer_of_the_model_computes(kind: str, checkpoint: Callable[[str], Path]) -> None:
    """In float32, as norms of transformers compute: the tolerance is that of some hundred sums in another order."""
    path = checkpoint(kind)
    tokens = torch.randint(0, 320, (2, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(9).expand(2, 9).contiguous()
    with torch.no_grad():
        reference = Reference(kind, path)
        hidden = reference.final_states(tokens)
        wanted = reference.logits(tokens, hidden)
        given = raised(path).run(tokens, positions, hidden)
    assert torch.allclose(given, wanted, rtol=2e-4, atol=2e-4)
    assert not torch.allclose(given, reference.logits(tokens, hidden.flip(-1)), rtol=1e-2)


@pytest.mark.parametrize("kind", ["qwen", pytest.param("deepseek", marks=pytest.mark.exhaustive)])
def test_tokens_are_the_models_own(kind: str, artifact: Callable[[str], Path]) -> None:
    """Over recurrent states and over latents; some first and second drafts are accepted, some rejected."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with qcompile.load(artifact(kind), threads=1, gamma=0) as plain:
        wanted = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, params)]
    for gamma in (1, 3):
        with qcompile.load(artifact(kind), threads=1, gamma=gamma, prefix_caching=False) as llm:
            outputs = llm.generate(PROMPTS, params)
            llm.engine.check()
            assert llm.engine.pool.used == 0
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        told = [output.speculation for output in outputs if output.speculation]
        drafted = [sum(one.drafted[place] for one in told) for place in range(gamma)]
        accepted = [sum(one.accepted[place] for one in told) for place in range(gamma)]
        assert 0.2 * drafted[0] < accepted[0] < drafted[0] and all(accepted[:2]), (drafted, accepted)


def test_states_are_right_after_a_rest(artifact: Callable[[str], Path]) -> None:
    """The target has computed tokens without features, and does not compute them again for the module."""
    params, tokens = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True), []
    for gammas in ([0] * 30, [3] * 3 + [0] * 8 + [3] * 30):
        with qcompile.load(artifact("qwen"), threads=1, gamma=3, prefix_caching=False) as llm:
            fix_calls(llm.engine, 4)
            requests = [llm.engine.add(prompt, params) for prompt in PROMPTS]
            for gamma in gammas:
                llm.engine.speculation.gamma = gamma
                llm.engine.step()
            assert not llm.engine.busy
            tokens.append([list(request.output.token_ids) for request in requests])
    assert tokens[0] == tokens[1] and min(sum(request.drafts.metrics.accepted) for request in requests) > 3


def test_a_checkpoint_without_a_module_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = changed(checkpoint("mimo"), tmp_path, lambda name, value: None if "mtp" in name else value)
    with pytest.raises(UsageError, match="has no module for multi-token prediction"):
        plan(str(path), drafts="mtp")


def test_a_module_that_lacks_a_tensor_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = changed(checkpoint("mimo"), tmp_path, lambda name, value: None if "token_layernorm" in name else value)
    with pytest.raises(UsageError, match=r"tensor model.mtp_layers.0.token_layernorm.weight is missing"):
        plan(str(path), drafts="mtp")


def test_a_layer_like_none_of_the_model_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """One with an inner size of its own."""

    def narrow(name: str, value: Tensor) -> Tensor:
        return value[:, :32].contiguous() if name.endswith("mtp_layers.0.mlp.down_proj.weight") else value

    path = changed(checkpoint("mimo"), tmp_path, narrow)
    with pytest.raises(UnsupportedError, match=r"no layer of the model has the tensors of model.mtp_layers.0\."):
        plan(str(path), drafts="mtp")


@pytest.mark.parametrize(
    ("shape", "told"), [((), r"shape \[\], a norm needs"), ((40,), r"shape \[40\], the model needs \[48\]")]
)
def test_norms_of_another_shape_are_refused(
    shape: tuple[int, ...], told: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    def narrow(name: str, value: Tensor) -> Tensor:
        if name.endswith(("token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")):
            return torch.ones(shape)
        return value[:40, :80].contiguous() if name.endswith("input_proj.weight") else value

    path = changed(checkpoint("mimo"), tmp_path, narrow)
    with pytest.raises(UsageError, match=f"tensor model.mtp_layers.0.hidden_layernorm.weight has {told}"):
        raised(path)


@pytest.mark.parametrize("stored", ["mlp.up_proj", "final_layernorm"])
def test_damage_is_told_by_the_name_that_the_file_has(
    stored: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The model's own tensors, in place of which they are read, are intact."""

    def damaged(name: str, value: Tensor) -> Tensor:
        return value * torch.nan if name == f"model.mtp_layers.0.{stored}.weight" else value

    weights = raised(changed(checkpoint("mimo"), tmp_path, damaged)).weights
    with pytest.raises(UsageError, match=rf"weight model.mtp_layers.0.{stored}.weight holds NaN"):
        for entry in weights.entries.values():
            entry.load()


@pytest.mark.parametrize("own", ["shared_head.head", pytest.param("embed_tokens", marks=pytest.mark.exhaustive)])
def test_an_output_head_of_its_own_is_refused(own: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    def doubled(name: str, value: Tensor) -> Tensor:
        return 2 * value if name == f"model.layers.2.{own}.weight" else value

    path = changed(checkpoint("deepseek"), tmp_path, doubled)
    with pytest.raises(UnsupportedError, match=rf"{own}.weight differs from the weight of (linear|embedding)"):
        raised(path)


def test_drafts_of_a_rotated_model_are_the_same(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Without rounding, what is accepted is equal: 48 features have a rotation that is not its own inverse."""
    accepted = []
    for rotated in (False, True):
        options = {"rotate.enabled": "true", "fold_norms.enabled": "true"} if rotated else {}
        out = tmp_path / f"{rotated}"
        report = qcompile.build(str(checkpoint("mimo")), out, recipe="f32", options=options, drafts="mtp")
        assert rotated == any(record.fired for record in report.passes if record.name == "rotate")
        with qcompile.load(out, threads=1, gamma=2) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        accepted.append([output.speculation.accepted[:2] for output in outputs if output.speculation])
    assert accepted[0] == accepted[1] and accepted[0][0][0] > 3


def test_a_smoothed_output_head_is_refused(checkpoint: Callable[[str], Path]) -> None:
    """Its norm has a scale that is no longer the model's."""
    with pytest.raises(QCompileError, match="a pass has changed the weight"):
        plan(str(checkpoint("mimo")), recipe="w8a8", options={"smooth.enabled": "true"}, drafts="mtp")


def test_a_module_is_a_part_of_a_checkpoint() -> None:
    with pytest.raises(UsageError, match="the model is none"):
        plan(torch.nn.Linear(1, 1), drafts="mtp")


def test_the_build_tells_of_a_module_that_it_leaves_out(checkpoint: Callable[[str], Path]) -> None:
    remarks = plan(str(checkpoint("mimo"))).graphs[0].info.remarks
    assert any("--draft mtp" in remark for remark in remarks) and not any("belong to no" in r for r in remarks)
    remarks = plan(str(checkpoint("mimo")), drafts="mtp").graphs[-1].info.remarks
    assert not any("--draft mtp" in remark for remark in remarks)


def changed(path: Path, folder: Path, change: Callable[[str, Tensor], Tensor | None]) -> Path:
    """A copy of the checkpoint with its tensors changed; without those for which `change` gives None."""
    (folder / "config.json").write_text((path / "config.json").read_text())
    tensors = {name: change(name, value) for name, value in load_file(path / WEIGHTS).items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / WEIGHTS)
    return folder
