"""Generation with compiled kernels: what transformers says, whatever shares the batch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qcompile
from qcompile import SamplingParams
from qcompile.errors import UsageError

Build = Callable[[str], Path]
PROMPTS = ["def main(", "import os\n\n\nclass Reader:\n", "x", "# " + "word " * 90, "for i in range(10):\n    "]
RECIPES = ["f32", "w4a8", "qserve"]


def test_greedy_is_what_transformers_generates(tiny_checkpoint: Path, tiny_artifact: Build) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    with qcompile.load(tiny_artifact("f32"), threads=1) as llm:
        results = llm.generate(PROMPTS, temperature=0, max_tokens=24)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.prompt_token_ids == tokenizer(prompt).input_ids
        ids = torch.tensor([result.prompt_token_ids])
        expected = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
        output = result.outputs[0]
        assert output.token_ids == expected.tolist()
        assert output.text == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_request_does_not_see_its_batch(recipe: str, tiny_artifact: Build) -> None:
    """Alone, in company, in small chunks and after preemption: bitwise the same tokens and log probabilities."""
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=70, logprobs=1, ignore_eos=True)
    with qcompile.load(tiny_artifact(recipe), threads=1) as llm:
        alone = [llm.generate(prompt, params)[0].outputs[0] for prompt in PROMPTS]
        together = [result.outputs[0] for result in llm.generate(PROMPTS, params)]
        llm.engine.scheduler.max_tokens = 7
        chunked = [result.outputs[0] for result in llm.generate(PROMPTS, params)]
    page = json.loads((tiny_artifact(recipe) / "qcompile.json").read_text())["runtime"]["kv"]["page_bytes"]
    with qcompile.load(tiny_artifact(recipe), threads=1, kv_cache_bytes=3 * page) as llm:
        short = [PROMPTS[i] for i in (0, 1, 2, 4)]
        squeezed = [result.outputs[0] for result in llm.generate(short, params)]
        assert llm.engine.scheduler.preemptions > 0
        llm.engine.check()
    for outputs, whole in ((together, alone), (chunked, alone), (squeezed, [alone[i] for i in (0, 1, 2, 4)])):
        for got, want in zip(outputs, whole, strict=True):
            assert got.token_ids == want.token_ids
            assert got.logprobs == want.logprobs
            assert got.text == want.text


@pytest.mark.parametrize("recipe", RECIPES)
def test_multi_step_decodes_give_what_steps_give(recipe: str, tiny_artifact: Build) -> None:
    with qcompile.load(tiny_artifact(recipe), threads=1) as llm:
        in_one_call = llm.generate(PROMPTS[0], temperature=0, max_tokens=60)[0].outputs[0].token_ids
        stepwise = llm.generate(PROMPTS[0], temperature=0, max_tokens=60, logprobs=0)[0].outputs[0].token_ids
    assert in_one_call == stepwise


def test_the_size_of_steps_changes_no_token(tiny_artifact: Build) -> None:
    """It is what the caller says, from a row for each request on."""
    prompts = [[3 + i % 90 for i in range(length)] for length in (180, 2, 61)]
    result = []
    for rows in (None, 4, 100):
        with qcompile.load(tiny_artifact("w4a8"), threads=1, max_batch=4, max_num_batched_tokens=rows) as llm:
            assert llm.executor.limits.max_tokens == llm.executor.limits.max_outputs == (rows or 512)
            outputs = llm.generate(prompts, temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
            result.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert result[1] == result[2] == result[0]
    for wrong, why in ((3, r"max_batch \(4\) and 512, not 3"), (513, "and 512, not 513"), (6.5, "a whole number")):
        with pytest.raises(UsageError, match=f"max_num_batched_tokens must be .*{why}"):
            qcompile.load(tiny_artifact("w4a8"), max_batch=4, max_num_batched_tokens=wrong)  # type: ignore[arg-type]


def test_numbers_may_be_numpy_s(tiny_artifact: Build) -> None:
    numbers: dict[str, Any] = {"threads": np.int64(1), "max_batch": np.int8(2), "kv_cache_bytes": np.int32(1 << 20)}
    numbers |= {"gamma": np.uint8(0), "gpu_memory_utilization": np.float32(0.5)}
    with qcompile.load(tiny_artifact("w4a8"), **numbers) as llm:
        assert torch.equal(llm.logits([[5, 6, 7]], chunk=np.int16(2)), llm.logits([[5, 6, 7]]))
    with pytest.raises(UsageError, match="threads must be a whole number"):
        qcompile.load(tiny_artifact("w4a8"), threads=np.float64(1))  # type: ignore[arg-type]


def test_context_of_the_model_is_kept(tiny_artifact: Build) -> None:
    with qcompile.load(tiny_artifact("w4a8"), threads=1) as llm:
        output = llm.generate("def main(", temperature=0, max_tokens=None, ignore_eos=True)[0]
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == llm.context == 256
        assert output.outputs[0].finish_reason == "length"
        with pytest.raises(UsageError, match="the context 256"):
            llm.generate("a b c d " * 100)


_FORK = """
import os, signal, sys
import qcompile
from qcompile.errors import UsageError
llm = qcompile.load(sys.argv[1], threads=int(sys.argv[2]))
begun = llm.stream("ab", temperature=0, max_tokens=40)
first = next(begun)
if not os.fork():
    signal.alarm(30)
    try:
        print(len(llm.generate("x", temperature=0, max_tokens=4)[0].outputs[0].token_ids))
        print(len(list(begun)) > 0)
    except UsageError as error:
        print(error)
    del begun
    llm.close()
    sys.exit(0)
_, status = os.wait()
print(status, len(llm.generate("x", temperature=0, max_tokens=4)[0].outputs[0].token_ids), len(list(begun)) > 0)
"""


@pytest.mark.parametrize(
    ("threads", "told"), [(1, "4\nTrue"), (2, "the model was loaded before the process forked, .* load it here")]
)
def test_a_fork_waits_for_no_threads_that_it_lacks(threads: int, told: str, tiny_artifact: Build) -> None:
    """And leaves those of its parent alone."""
    # Python 3.12 and later warn of a fork while there are threads, which is what this test makes.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORK, str(tiny_artifact("f32")), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.fullmatch(f"{told}\n0 4 True\n", done.stdout) and not done.stderr
