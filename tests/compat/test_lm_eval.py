"""lm-evaluation-harness scores a model equally through qcompile's class, over HTTP, and in transformers.

The recipe is f32: its logits differ from those of transformers in float32 by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qcompile
from qcompile.errors import UsageError
from qcompile.runtime.chat import ChatTemplate
from qcompile.runtime.sampling.params import SamplingParams
from tests.runtime.server.test_server import serving

pytest.importorskip("lm_eval")
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from qcompile.runtime.interop.lm_eval import CompiledLM

TASKS = Path(__file__).parent / "tasks"
MODEL = Path(__file__).parents[2] / "samples" / "pycode-1m"
NAMES = ["pycode_choice", "pycode_line", "pycode_files"]
LONGEST = 2046
"""Over HTTP, the harness takes windows of two tokens less than the context that it is told."""

Scores = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def artifact(made_once: Callable[..., Path]) -> Path:
    return made_once("pycode-1m-f32", lambda out: qcompile.build(str(MODEL), out, recipe="f32"))


@pytest.fixture(scope="module")
def evaluate() -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs the three tasks."""

    def run(model: Any, **options: Any) -> dict[str, Any]:
        return simple_evaluate(
            model, tasks=NAMES, task_manager=tasks, log_samples=True, bootstrap_iters=0, verbosity="ERROR", **options
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(TASKS)  # their data files are named by paths from here
        tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
        yield run


@pytest.fixture(scope="module")
def ours(artifact: Path, evaluate: Callable[..., Any]) -> dict[str, Any]:
    arguments = f"artifact={artifact},threads=2,max_length={LONGEST}"
    return evaluate("qcompile", model_args=arguments, batch_size=4, device="cuda:0")


def assert_equal(result: dict[str, Any], want: dict[str, Any]) -> None:
    """Equal metrics; and for each document equal texts, and log likelihoods within rounding of float32 sums.

    A document of 3,000 tokens has a log likelihood of some -6,000 nats; rounding moves that by less than 0.01.
    """
    for name in NAMES:
        pairs = zip(result["samples"][name], want["samples"][name], strict=True)
        for mine, theirs in pairs:
            assert mine["doc"] == theirs["doc"]
            for one, other in zip(mine["filtered_resps"], theirs["filtered_resps"], strict=True):
                if isinstance(one, tuple | list):
                    assert one[0] == pytest.approx(other[0], abs=1e-3) and bool(one[1]) == bool(other[1])
                else:
                    assert one == (other if isinstance(other, str) else pytest.approx(other, abs=1e-2))
        for metric, value in want["results"][name].items():
            if isinstance(value, float):
                assert result["results"][name][metric] == pytest.approx(value, rel=1e-5), (name, metric)


def test_the_class_scores_as_transformers_do(ours: dict[str, Any], evaluate: Callable[..., Any]) -> None:
    theirs = evaluate(
        "hf", model_args=f"pretrained={MODEL},dtype=float32,max_length={LONGEST}", device="cpu", batch_size=4
    )
    assert_equal(ours, theirs)
    scores: Scores = ours["results"]
    assert 0.5 < scores["pycode_choice"]["acc,none"] < 1 and scores["pycode_line"]["exact_match,none"] == 0.5
    assert 1.4 < scores["pycode_files"]["byte_perplexity,none"] < 1.8


def test_http_scores_as_the_class_does(
    ours: dict[str, Any], artifact: Path, evaluate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with qcompile.load(artifact, threads=2) as llm, serving(llm) as server:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        arguments = (
            f"model=tiny,base_url={url},tokenizer={MODEL},tokenizer_backend=huggingface,max_length={LONGEST + 2}"
        )
        assert_equal(evaluate("local-completions", model_args=arguments, batch_size=4), ours)


def test_the_longest_windows(artifact: Path) -> None:
    """One token more than the context: its last token is scored from logits, as all the others would be."""
    model = CompiledLM(artifact, threads=2)
    tokens = [model.prefix_token_id, *range(50, 50 + model.max_length)]
    assert len(tokens) == model.llm.context + 1
    [(whole, _)] = model._loglikelihood_tokens([(None, tokens[:1], tokens[1:])], disable_tqdm=True)
    [(fitting, _)] = model._loglikelihood_tokens([(None, tokens[:1], tokens[1:-1])], disable_tqdm=True)
    assert whole - fitting == pytest.approx(model._scores(tokens)[-1][0], abs=1e-3)
    greedy = model.llm.generate([tokens[:9]], SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids
    pairs = [(None, tokens[:9], greedy), (None, tokens[:9], [*greedy[:2], greedy[2] + 1])]
    assert [first for _, first in model._loglikelihood_tokens(pairs, disable_tqdm=True)] == [True, False]
    model.llm.close()


def test_options_and_templates(artifact: Path) -> None:
    model = CompiledLM(artifact, threads=1, max_length=64, max_gen_toks=8)
    for options, says in (
        ({"num_beams": 4}, "num_beams, which SamplingParams does not have"),
        ({"max_new_tokens": 64}, "leaves no room for a prompt"),
    ):
        with pytest.raises(UsageError, match=says):
            model.generate_until([request("x", options)], disable_tqdm=True)
    long = "x = 1\n" * 200
    drawn = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 3, "until": ["", "zzz"], "max_tokens": 4}
    texts = model.generate_until([request(long, {"until": "\n"}), request("", drawn), request("x", drawn)], True)
    assert len(texts) == 3 and "\n" not in texts[0]
    with pytest.raises(UsageError, match="has no chat template"):
        model.apply_chat_template([{"role": "user", "content": "x"}])
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    turns += "{% if add_generation_prompt %}<a>{% endif %}"
    model.llm.template = ChatTemplate({"default": turns}, {})
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So "}]
    assert model.apply_chat_template(said[:1]) == "<user>x</><a>"
    assert model.apply_chat_template(said, add_generation_prompt=False) == "<user>x</><assistant>So "
    assert model.chat_template(True) == turns and model.chat_template(False) == ""
    model.llm.close()
    for options, says in (({"beams": 1}, "unknown model argument beams"), ({"max_length": 9999}, "the context, 2048")):
        with pytest.raises(UsageError, match=says):
            CompiledLM(artifact, threads=1, **options)  # type: ignore[arg-type]


def request(context: str, options: dict[str, Any]) -> Any:
    """A request to generate, as the harness makes them."""
    from lm_eval.api.instance import Instance

    return Instance("generate_until", {}, (context, options), 0)
