"""The model `qcompile` of lm-evaluation-harness, and its command line with this model:

    python -m qcompile.runtime.interop.lm_eval --model qcompile --model_args artifact=out/pycode --tasks lambada_openai

The harness has no list of models outside of its own package: this module must be imported before it is asked for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  fills the list of models, which is filled only as long as it is empty
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from qcompile.errors import UsageError
from qcompile.runtime.chat import ChatTemplate, up_to_content
from qcompile.runtime.evaluate import negative_log_likelihood
from qcompile.runtime.load import load
from qcompile.runtime.options import LoadOptions
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.special_tokens import special_tokens
from qcompile.runtime.tokenizer import encode

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request as the harness gives it: its texts, and the tokens of context and continuation."""

_AT_ONCE = 256
"""Requests that are queued at once: reports of their tokens are held until they are read."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks have for the number of tokens to generate; the first that is given counts."""


@register_model("qcompile")
class CompiledLM(TemplateLM):
    """An artifact as a model of lm-evaluation-harness: log likelihoods, rolling ones, and generation."""

    def __init__(
        self,
        artifact: str | Path,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        **options: Any,
    ) -> None:
        """Load the artifact at that path; options: those of `qcompile.load`.

        batch_size: requests that run at once, if it is more than 1, the default of the command line; max_batch=1 runs
        one at a time. device: without effect, as an artifact is built for one, and the command line always names one.
        max_length: most tokens of a text; default the context. prefix_token_id: what precedes texts without a context;
        default the token that begins a text, or else that ends one. Results do not depend on batches.
        """
        super().__init__()
        known = [field.name for field in fields(LoadOptions)]
        for name in options:
            if name not in known:
                raise UsageError(f"unknown model argument {name}: the options of load are {', '.join(known)}")
        batch = (max_batch_size or 1) if str(batch_size).startswith("auto") else int(batch_size)
        self.llm = load(artifact, **({"max_batch": batch} if batch > 1 else {}) | options)
        if self.llm.tokenizer is None:
            raise UsageError(f"{artifact} has no tokenizer: texts cannot be evaluated")
        longest = self.llm.context
        if max_length is not None and not 2 <= max_length <= longest:
            raise UsageError(f"max_length must be between 2 and the context, {longest}, not {max_length}")
        self.max_length, self.max_gen_toks = max_length or longest, max_gen_toks
        self._path = Path(artifact)
        self._special = special_tokens(self._path, self.llm.manifest["files"])
        self._prefix = prefix_token_id

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token = self._named("eos_token")
        return min(self.llm.end_tokens, default=0) if token is None else token

    @property
    def prefix_token_id(self) -> int:
        """The token before texts without a context."""
        begin = self._named("bos_token") if self._prefix is None else self._prefix
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's cache of requests."""
        return str(self._path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, by default with those that the tokenizer adds, but no second beginning of a text."""
        if add_special_tokens is None:
            begin = self._special.get("bos_token")
            add_special_tokens = not (begin and string.startswith(begin))
        assert self.llm.tokenizer is not None
        return encode(self.llm.tokenizer, string, add_special_tokens)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log likelihood of each text in nats. Texts of more than max_length tokens are scored in windows."""
        totals = []
        windows: list[Scored] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            pieces = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            scored: list[Scored] = [(None, *make_disjoint_window(piece)) for piece in pieces]
            windows += scored
            owners += [number] * len(scored)
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[owner] += value
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            totals.append(total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a text of `until`, an end of text, or max_gen_toks tokens."""
        asked = [request.args for request in requests]
        params = [self._params(options) for _, options in asked]
        prompts = []
        for (context, _), one in zip(asked, params, strict=True):
            room = self.max_length - (one.max_tokens or 1)
            if room < 1:
                raise UsageError(
                    f"max_gen_toks {one.max_tokens} leaves no room for a prompt: max_length {self.max_length}"
                )
            prompts.append((self.tok_encode(context) or [self.prefix_token_id])[-room:])
        generated = [output.outputs[0].text for output in self._run(prompts, params, "generate_until", disable_tqdm)]
        for args, text in zip(asked, generated, strict=True):
            self.cache_hook.add_partial("generate_until", args, text)
        return generated

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation. Without add_generation_prompt, its last message is to be continued."""
        if self.llm.template is None:
            raise UsageError(f"{self._path} has no chat template: evaluate without --apply_chat_template")
        text = self.llm.template(chat_history, add_generation_prompt=add_generation_prompt)
        return text if add_generation_prompt else up_to_content(text, chat_history[-1]["content"])

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The text of the chat template, by which the harness tells results apart; empty if it is not used."""
        template = self.llm.template
        return template.text if chat_template and isinstance(template, ChatTemplate) else ""

    def _named(self, name: str) -> int | None:
        """A special token by its name in the tokenizer's files."""
        assert self.llm.tokenizer is not None
        text = self._special.get(name)
        token: int | None = None if text is None else self.llm.tokenizer.token_to_id(text)
        return token

    def _params(self, options: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters of a task's options."""
        given = dict(options)
        until = given.pop("until", None) or []
        lengths = [value for name in _LENGTHS if (value := given.pop(name, None)) is not None]
        drawn, temperature = given.pop("do_sample", False), given.pop("temperature", None)
        known = SamplingParams.__dataclass_fields__
        for name in given:
            if name not in known:
                raise UsageError(f"the task generates with {name}, which SamplingParams does not have")
        stops = [until] if isinstance(until, str) else [text for text in until if text]
        hot = 1.0 if temperature is None else temperature
        return SamplingParams(
            **given,
            temperature=hot if drawn else 0.0,
            max_tokens=int(lengths[0]) if lengths else self.max_gen_toks,
            stop=stops or None,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **others: Any
    ) -> list[tuple[float, bool]]:
        """The log likelihood of each continuation in nats, and whether greedy decoding would give it."""
        rows = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        scores: dict[int, list[tuple[float, bool]]] = {}
        fitting = [number for number, row in enumerate(rows) if len(row) <= self.llm.context]
        params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
        outputs = self._run([rows[n] for n in fitting], [params] * len(fitting), "loglikelihood", disable_tqdm)
        for number, output in zip(fitting, outputs, strict=True):
            entries = zip(rows[number][1:], (output.prompt_logprobs or [])[1:], strict=True)
            reports = [entry[token] for token, entry in entries if entry]
            scores[number] = [(one.logprob, one.rank == 1) for one in reports]
        for number in range(len(rows)):
            if number not in scores:  # one token more than the context: nothing follows the last one
                scores[number] = self._scores(rows[number])
        sums = []
        for number, (texts, _, continuation) in enumerate(requests):
            known = scores[number]
            wanted = known[len(known) - len(continuation) :]  # none if a continuation has no tokens of its own
            sums.append((sum(value for value, _ in wanted), all(first for _, first in wanted)))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, sums[-1])
        return sums

    def _scores(self, tokens: Sequence[int]) -> list[tuple[float, bool]]:
        """The log probability of each token after the first, and whether it is the most probable one."""
        logits = self.llm.logits([tokens[:-1]])[0].numpy()
        wanted = np.asarray(tokens[1:])
        firsts = logits.argmax(axis=1) == wanted
        return list(zip((-negative_log_likelihood(logits, tokens[1:])).tolist(), firsts.tolist(), strict=True))

    def _run(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], what: str, quiet: bool
    ) -> Iterator[Any]:
        """The finished output of each prompt, in order."""
        with tqdm(total=len(prompts), desc=f"qcompile: {what}", disable=quiet) as bar:
            for start in range(0, len(prompts), _AT_ONCE):
                some = slice(start, start + _AT_ONCE)
                outputs = self.llm.generate(list(prompts[some]), list(params[some]))
                bar.update(len(outputs))
                yield from outputs


def main() -> None:
    """The command `lm_eval`, which knows the model `qcompile` here."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
