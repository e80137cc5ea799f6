"""Models with Python loops over tokens, from the build to the text: logits, any division into steps, drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qcompile
from qcompile.runtime.sampling.params import SamplingParams
from tests.support import modules
from tests.support.cases import first
from tests.support.families import save
from tests.support.token_loops import Delta, Fixed, Loop

GRIFFIN: dict[str, Any] = {
    **{"vocab_size": modules.VOCAB, "hidden_size": 64, "lru_width": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16},
    **{"attention_window_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


class Stack(nn.Module):
    """A decoder of two loops over tokens, one of numbers by feature and one of matrices by head."""

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[Loop] | nn.ModuleList = nn.ModuleList([Fixed(), Delta()])
        self.embed, self.head = nn.Embedding(modules.VOCAB, 48), nn.Linear(48, modules.VOCAB)
        self.out = nn.ModuleList([nn.Linear(15, 48), nn.Linear(15, 48)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for loop, out in zip(self.loops, self.out, strict=True):
            x = x + out(loop.recur(F.rms_norm(x, (48,), eps=1e-6)))
        return self.head(F.rms_norm(x, (48,), eps=1e-6))


@pytest.mark.parametrize("name", first(("module",), ["griffin", "module"]))
def test_a_loop_over_tokens_runs(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if name == "griffin":
        module: Any = save("recurrent_gemma", GRIFFIN, tmp_path / "model")
        qcompile.build(tmp_path / "model", tmp_path / "out", recipe="f32", drafts="lookup")
    else:
        module = modules.randomized(Stack())
        example = (torch.zeros(2, 7, dtype=torch.int64),)
        qcompile.build(
            module, tmp_path / "out", recipe="f32", drafts="lookup", example_inputs=example, max_position=256
        )
    prompts = [
        [*range(start, start + length % 5 + 1)] * 4 for start, length in zip(range(3, 11), range(8), strict=True)
    ]
    with qcompile.load(tmp_path / "out", threads=1, gamma=0) as llm, torch.no_grad():
        for batch, tokens in ((1, 9), (2, 57)):
            ids = torch.randint(3, modules.VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(0))
            wanted = module(ids, use_cache=False).logits if name == "griffin" else module(ids)
            outcome = llm.logits(ids)
            # float32 sums of about 100 numbers of size 1 in another order
            torch.testing.assert_close(outcome, wanted, atol=2e-4, rtol=0)
            assert all(torch.equal(llm.logits(ids, chunk=chunk), outcome) for chunk in (1, 7))
        plain = [list(result.outputs[0].token_ids) for result in llm.generate(prompts, GREEDY)]
    with qcompile.load(tmp_path / "out", threads=1, gamma=5) as llm:
        results = llm.generate(prompts, GREEDY)
        assert [list(result.outputs[0].token_ids) for result in results] == plain
        assert sum(sum(result.speculation.drafted) for result in results) > 0
        llm.engine.check()
