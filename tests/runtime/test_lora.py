"""Adapters that requests choose: each row is that of its merged model, and no row changes another in any bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import qcompile
from qcompile import LLM, SamplingParams
from qcompile.cli.options import ServedLoading
from qcompile.errors import QCompileError
from qcompile.runtime.server import app
from tests.conftest import MadeOnce
from tests.runtime.server.test_server import serving
from tests.support.adapters import adapter_of, made, merged_logits, pair, save, save_llama
from tests.support.cases import first
from tests.support.fake import byte_tokenizer

IDS = torch.tensor([[0, 17, 40, 202, 12, 12, 81, 3, 9], [5, 6, 7, 8, 9, 10, 11, 12, 13]])
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
OPTIONS = {"lora.rank": 6, "fold_norms.enabled": True, "rotate.enabled": True, "rotate.online": True}


@pytest.fixture(scope="module")
def odd(made_once: MadeOnce) -> Path:
    """A checkpoint with sizes that are no multiples of vectors, and adapters of different ranks and linears for it."""
    return made_once("odd-adapters", _save_odd)


def _save_odd(path: Path) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 104, "head_dim": 24}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 2}
    model = save_llama(path, **sizes, **heads)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    save(path / "all", adapter_of(model, rank=5), r=5)
    save(path / "some", adapter_of(model, "1.self_attn.v_proj gate_proj", seed=50))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {k.removeprefix("base_model.model."): v for k, v in load_file(folder / "adapter_model.safetensors").items()}


@pytest.fixture(scope="module")
def artifact(odd: Path, made_once: MadeOnce) -> Path:
    """In f32, with weights in another basis than the checkpoint's, and prompt lookup."""
    how: dict[str, Any] = {"recipe": "f32", "options": OPTIONS, "drafts": "lookup"}
    return made_once("odd-adapters-f32", lambda out: qcompile.build(odd, out, **how))


@pytest.fixture(scope="module")
def llm(odd: Path, artifact: Path) -> Iterator[LLM]:
    adapters = {"all": odd / "all", "some": odd / "some"}
    with qcompile.load(artifact, threads=2, gamma=0, lora=adapters) as loaded:
        yield loaded


@pytest.mark.parametrize("name, scale", [("all", 6 / 5), ("some", 6 / 4)])
def test_rows_are_those_of_the_merged_model(llm: LLM, odd: Path, name: str, scale: float) -> None:
    want = merged_logits(odd, tensors_of(odd / name), IDS, scale)
    got = llm.logits(IDS, lora=name)
    assert (got - want).abs().max() < 2e-4 < (want - llm.logits(IDS)).abs().max()
    for chunk in (1, 2, 3, 5):
        assert torch.equal(llm.logits(IDS, chunk, lora=name), got)


def test_rows_without_adapter_are_those_of_the_plain_artifact(llm: LLM, odd: Path, tmp_path: Path) -> None:
    plain = {name: value for name, value in OPTIONS.items() if name != "lora.rank"}
    qcompile.build(odd, tmp_path / "out", recipe="f32", options=plain)
    with qcompile.load(tmp_path / "out", threads=2) as other:
        assert torch.equal(llm.logits(IDS), other.logits(IDS))


def outputs(llm: LLM, prompts: list[list[int]], names: list[str | None], **more: Any) -> list[Any]:
    """Tokens and log probabilities, of requests that run together."""
    params = [SamplingParams(**GREEDY, logprobs=2, lora=name, **more) for name in names]
    result = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [(one.token_ids, one.cumulative_logprob) for one in result]


PROMPTS = [[0, 17, 40, 202], [5, 6], [0, 17, 40, 202], list(range(70)), [5, 6], [1]]
NAMES: list[str | None] = ["all", None, "some", "all", "some", None]


def test_requests_do_not_change_each_other(llm: LLM) -> None:
    together = outputs(llm, PROMPTS, NAMES)
    alone = [outputs(llm, [prompt], [name])[0] for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    assert together == alone
    assert len({str(one) for one in together}) == len(together)
    llm.engine.check()


def test_prefixes_are_those_of_an_adapter(odd: Path, artifact: Path) -> None:
    prompt, adapters = list(range(1, 150)), {"all": odd / "all", "some": odd / "some"}
    with qcompile.load(artifact, gamma=0, lora=adapters, prefix_caching=False) as plain:
        want = {name: outputs(plain, [prompt], [name])[0] for name in ("all", None, "some")}
    with qcompile.load(artifact, gamma=0, lora=adapters) as llm:
        for name in ("all", None, "some", "all", None):
            assert outputs(llm, [prompt], [name])[0] == want[name]
        again = llm.generate([prompt], SamplingParams(**GREEDY, lora="some"))[0]
        assert again.metrics.cached_tokens == 128
        assert outputs(llm, [prompt, prompt, prompt], ["some", None, "all"]) == [want["some"], want[None], want["all"]]


def test_speculation_is_exact(odd: Path, artifact: Path, llm: LLM) -> None:
    prompts = [[7, 8, 9] * 5, [7, 8, 9] * 5, [3, 4] * 6]
    names: list[str | None] = ["all", None, "some"]
    with qcompile.load(artifact, gamma=4, lora={"all": odd / "all", "some": odd / "some"}) as drafting:
        result = drafting.generate(prompts, [SamplingParams(**GREEDY, lora=name) for name in names])
    assert any(output.speculation and sum(output.speculation.drafted) for output in result)
    want = [tokens for tokens, _ in outputs(llm, prompts, names)]
    assert [output.outputs[0].token_ids for output in result] == want


@pytest.mark.parametrize(("recipe", "target"), first((("nested", "cpu"),), [("nested", "cpu"), ("bf16", "cpu-avx2")]))
def test_quantized_rows(odd: Path, tmp_path: Path, recipe: str, target: str) -> None:
    """Close to the merged model; exact, also with drafts, which have no adapters."""
    qcompile.build(odd, tmp_path / "out", recipe=recipe, target=target, options={"lora.rank": 5})
    want = merged_logits(odd, tensors_of(odd / "all"), IDS, 6 / 5)
    with qcompile.load(tmp_path / "out", threads=2, gamma=0, lora={"all": odd / "all"}) as llm:
        got, plain = llm.logits(IDS, lora="all"), llm.logits(IDS)
        # 8 bits move these logits by a tenth of what the adapter does; other factors would move them as far as it does.
        assert (got - want).norm() < 0.3 * (plain - want).norm()
        assert torch.equal(llm.logits(IDS, 2, lora="all"), got)
        tokens = [each for each, _ in outputs(llm, PROMPTS, ["all", None] * 3)]
        embedded, without = llm.embed(["x = 1", "y"], lora="all"), llm.embed(["x = 1", "y"])
        assert (embedded[1] == llm.embed("y", lora="all")[0]).all() and not (embedded == without).any()
        with pytest.raises(QCompileError, match="there is no adapter 'other'"):
            llm.embed("y", lora="other")
    if recipe == "nested":
        with qcompile.load(tmp_path / "out", threads=1, gamma=3, lora={"all": odd / "all"}) as llm:
            assert [each for each, _ in outputs(llm, PROMPTS, ["all", None] * 3)] == tokens


def test_clients_ask_for_adapters_as_models(odd: Path, artifact: Path, llm: LLM) -> None:
    with qcompile.load(artifact, gamma=0, lora={"all": odd / "all", "some": odd / "some"}) as loaded:
        texts = {
            name: loaded.generate("x = 1", **GREEDY, lora=name)[0].outputs[0].text for name in ("all", None, "some")
        }
        assert len(set(texts.values())) == 3
        with serving(loaded) as client:
            for name in ("all", "tiny", "some", None, "all"):
                answer = client.complete("x = 1", max_tokens=12, **({"model": name} if name else {}))
                assert answer["choices"][0]["text"] == texts[None if name == "tiny" else name]
                assert answer["model"] == (name or "tiny")
            listed = client.ask("/v1/models")[1]["data"]
            assert [(one["id"], one.get("parent")) for one in listed] == [
                ("tiny", None),
                ("all", "tiny"),
                ("some", "tiny"),
            ]
            assert client.ask("/v1/models/some")[1]["id"] == "some"
            client.refused(400, {"model": "all", "input": "x"}, "/v1/embeddings")
            assert "only 'tiny', 'all', 'some'" in client.refused(404, {"model": "none", "prompt": "x"})
    with pytest.raises(QCompileError, match="adapter all has the model's name"):
        app.Served(llm, "all")


@pytest.mark.parametrize(
    "given, reason", [(["all"], "write NAME=DIR"), (["a=b", "a=c"], "two adapters with this name")]
)
def test_the_option_names_adapters(given: list[str], reason: str) -> None:
    assert ServedLoading(lora=["a=b", "c=d=e"]).arguments()["lora"] == {"a": "b", "c": "d=e"}
    with pytest.raises(QCompileError, match=reason):
        ServedLoading(lora=given).arguments()


def test_what_is_refused(odd: Path, artifact: Path, llm: LLM, tmp_path: Path) -> None:
    module, merge = "model.layers.0.self_attn.q_proj", "merge it at build: qcompile build MODEL --lora"
    dora = pair(module, 72, 72) | {f"{module}.lora_magnitude_vector": made(72).abs()}
    for number, (tensors, config, reason) in enumerate(
        (
            (
                pair(module, 72, 72, 7),
                {"r": 7},
                "rank 7, the artifact takes 6 at most; build it with --set lora.rank=7",
            ),
            (pair("lm_head", 257, 72), {}, f"lm_head.weight: only rows with requested logits compute it; {merge}"),
            (pair("model.layers.7.mlp.up_proj", 104, 72), {}, f"no linear of the model reads it by this name; {merge}"),
            (pair(module, 72, 64), {}, r"as \[72, 64\], and the model has \[72, 72\]"),
            (pair(module, 72, 72) | {"model.norm.weight": made(72)}, {}, f"norm.weight, which is no product .*{merge}"),
            (dora, {"use_dora": True}, f"has magnitudes .*{merge}"),
        )
    ):
        folder = save(tmp_path / f"{number}", tensors, **config)
        with pytest.raises(QCompileError, match=reason) as refused:
            qcompile.load(artifact, lora={"tuned": folder})
        assert "\n" not in str(refused.value)
    for name in ("other", ""):
        with pytest.raises(QCompileError, match=r"there is no adapter .*: there are all, some"):
            llm.generate([[1]], lora=name)
    with pytest.raises(QCompileError, match="lora must be folders of adapters by name"):
        qcompile.load(artifact, lora=["all"])  # type: ignore[arg-type]
    with pytest.raises(QCompileError, match="lora must be None or the name of an adapter"):
        SamplingParams(lora=3)  # type: ignore[arg-type]


def test_artifacts_without_places(tiny_artifact: Any, odd: Path) -> None:
    with pytest.raises(QCompileError, match=r"has no places for adapters: build it with --set lora\.rank=16"):
        qcompile.load(tiny_artifact("f32"), lora={"all": odd / "all"})
    with qcompile.load(tiny_artifact("f32")) as llm, pytest.raises(QCompileError, match="none was loaded"):
        llm.generate([[1]], lora="all")
