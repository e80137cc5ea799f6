"""Grammars of structured output, compiled by llguidance for a tokenizer."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from qcompile.errors import ResourceError, UsageError, shown
from qcompile.runtime.detokenizer import BROKEN, spelled
from qcompile.runtime.sampling.exclusive import overlap
from qcompile.runtime.sampling.known_masks import KnownMasks
from qcompile.runtime.sampling.masks import Grammar, first_line
from qcompile.runtime.sampling.structured import Source, StructuredOutputsParams, StructureError
from qcompile.runtime.sampling.trial import GrammarTrial
from qcompile.runtime.sampling.written import written

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST_KEPT = 256
"""Most compiled grammars that are kept."""
_MOST_SECONDS = 10.0
"""Longest time that a caller waits for a grammar. The limits below end the compilation itself much sooner."""
_LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
"""Limits of llguidance that are not its default: memory of a lexer (2 kB a state), and messages of one line."""
_TOKENS_COMPARED = 512
_MOST_THREADS = 32
"""Most threads that compute masks together: llguidance's own limit."""
_NO_TEXT = "NoExtensionBias"
"""What llguidance says of a grammar without texts, as a rule that always continues with itself."""
_ONE_OF = "oneOf constraints are not supported"
"""What it says of a `oneOf` of which it cannot show that at most one schema holds."""


class Grammars:
    """Compiles grammars for one tokenizer, and keeps them. Several threads may use it.

    vocab: size of the model's vocabulary. eos: the tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, eos: Sequence[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, frozenset(eos)
        self._kept: OrderedDict[Source, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._known = KnownMasks()
        self._guide: Any = None
        self._trial = GrammarTrial()
        self._worker = ThreadPoolExecutor(2, "qcompile-grammars")
        self._threads: Any = None

    def end_at(self, eos: frozenset[int]) -> None:
        """Let these tokens end a text from now on."""
        with self._lock:
            self._eos, self._guide = eos, None
            self._kept.clear()

    @overload
    def compile(self, asked: None) -> None: ...

    @overload
    def compile(self, asked: StructuredOutputsParams) -> Grammar: ...

    def compile(self, asked: StructuredOutputsParams | None) -> Grammar | None:
        """The grammar of structured outputs; None without these. Raises UsageError if it cannot be compiled."""
        if asked is None:
            return None
        source = asked.source
        with self._lock:
            if grammar := self._kept.get(source):
                self._kept.move_to_end(source)
                return grammar
            if self._guide is None:
                self._guide = self._new_guide()
            guide, eos = self._guide, self._eos
        try:
            self._trial.require_small(source.kind, written(source, guide), _LIMITS)
            matcher = self._worker.submit(_matcher, guide, source).result(_MOST_SECONDS)
        except TimeoutError:
            raise StructureError(source.kind, "takes too long to compile: simplify it") from None
        except ValueError as error:  # of llguidance, for JSON that is none
            raise StructureError(source.kind, f"cannot be compiled: {first_line(str(error))}") from None
        if matcher.is_error():
            reason = first_line(matcher.get_error())
            if reason == _NO_TEXT:
                reason = "its recursion has no end"
            elif _ONE_OF in reason:
                texts = [source.text] if source.kind == "json" else [text for _, text in json.loads(source.text)]
                reason = overlap(texts)
            raise StructureError(source.kind, f"cannot be compiled: {reason}")
        grammar = Grammar(matcher, eos, guide, partial(_matcher, guide, source), self._known, self._together)
        with self._lock:
            if eos == self._eos:
                self._kept[source] = grammar
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _together(self, matchers: Sequence[tuple[Any, int]], address: int, size: int, room: int) -> None:
        """Compute masks in llguidance's threads, which hold no lock of Python's."""
        if self._threads is None:
            from llguidance import LLExecutor

            self._threads = LLExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))))
        self._threads.unsafe_compute_mask_ptr(matchers, address, size, room)

    def _new_guide(self) -> Any:
        """llguidance's tokenizer. Raises UsageError if there is none that decodes as the model's own."""
        if self._tokenizer is None:
            raise UsageError("this artifact has no tokenizer: structured_outputs need one")
        if not self._eos:
            raise UsageError("this artifact has no token that ends a text: structured_outputs need one")
        try:
            import llguidance
        except ImportError:
            raise ResourceError("structured_outputs need llguidance: pip install 'qcompile[serve]'") from None
        try:
            guide = llguidance.LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocab, eos_token=sorted(self._eos))
        except Exception as error:  # llguidance raises plain exceptions for tokenizers of other kinds
            reason = first_line(str(error))
            raise UsageError(f"structured_outputs are not supported with this tokenizer: {reason}") from None
        self._check_spelling(guide)
        return guide

    def _check_spelling(self, guide: Any) -> None:
        """Raise UsageError unless tokens have the text in grammars that they have in outputs."""
        assert self._tokenizer is not None
        count = min(self._vocab, self._tokenizer.get_vocab_size())
        for token in range(0, count, max(1, count // _TOKENS_COMPARED)):
            text = "" if guide.is_special_token(token) else spelled(self._tokenizer, token)
            if text and BROKEN not in text and guide.decode_bytes([token]) != text.encode():
                other = guide.decode_bytes([token])
                raise UsageError(
                    f"structured_outputs are not supported with this tokenizer: token {token} is {shown(text)}, and"
                    f" {shown(other)} for grammars"
                )


def _matcher(guide: Any, source: Source) -> Any:
    """llguidance's matcher of a grammar; it has an error if the grammar cannot be compiled.

    The first mask is computed here, too: of some expressions it takes seconds, in which no request should wait.
    """
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(guide, written(source, guide), log_level=0, limits=LLParserLimits(**_LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher
