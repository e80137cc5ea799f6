"""Masks: which tokens may follow a text that a grammar describes. runtime/sampling/grammars.py compiles grammars."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qcompile.runtime.sampling.known_masks import KnownMasks
from qcompile.runtime.sampling.lexers import Lexers

MASK_BITS = 32
"""Tokens of a word of a mask: token t is bit t % 32 of word t // 32."""
_MOST_RENEWALS = 3
"""Most lexers that a text may take in place of those that have too many states: it may be what fills them."""
_FULL = "too many states"
"""What llguidance says of a lexer that texts have filled. Other limits are those of one step: a new lexer, which takes
up to seconds to compile while all requests wait, exceeds them again."""


def mask_words(vocab: int) -> int:
    """Words of a mask of `vocab` tokens."""
    return -(-vocab // MASK_BITS)


@lru_cache(256)
def _memory(address: int, size: int) -> memoryview:
    """The bytes at an address, which are read only while the memory is in use. Executors use few addresses."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


_MOST_NEW = 16
"""Most masks of a sampled text that are kept for others. Sampled texts soon differ from each other, so that most of
their masks are asked for once, and to remember them costs a tenth of computing them."""


class Masks(NamedTuple):
    """How an executor learns which tokens may follow: it asks `grammar` with the tokens after a position.

    room: how many tokens may follow that position in a call of the executor, at least 1. ahead: those known already.
    """

    grammar: GrammarState
    room: int
    ahead: Sequence[int] = ()


Together = Callable[[Sequence[tuple[Any, int]], int, int, int], None]
"""Has each of some matchers write its mask. Given are pairs of a matcher and the number of its mask, the address of the
first mask, the bytes of a mask, and the number of masks that there is room for."""


def one_by_one(matchers: Sequence[tuple[Any, int]], address: int, size: int, room: int) -> None:
    """`Together` without threads."""
    for matcher, number in matchers:
        matcher.unsafe_compute_mask_ptr(address + number * size, size)


class Grammar:
    """A compiled grammar. matcher: llguidance's, at the start of a text. eos: the tokens that end a text.

    guide: llguidance's tokenizer. compile: returns a new `matcher`. known, together: keeps masks, and computes several
    of them, of other grammars too.
    """

    def __init__(
        self,
        matcher: Any,
        eos: frozenset[int],
        guide: Any,
        compile: Callable[[], Any],
        known: KnownMasks | None = None,
        together: Together | None = None,
    ) -> None:
        self.eos, self.guide, self.lexers = eos, guide, Lexers(matcher, compile)
        self.ends = [(token // 8, 1 << token % 8) for token in sorted(eos)]
        """Byte and bit of the tokens that end a text in a mask."""
        self.known, self.together = known or KnownMasks(), together or one_by_one
        self.empty = self.known.start()
        """The number of the empty text."""

    def start(self, sampled: bool = False) -> GrammarState:
        """The state at the start of a text, which is the argmax of logits or sampled."""
        return GrammarState(self, sampled)


class GrammarState:
    """Follows a grammar along one text: the tokens that were noted, and for a while those that may come after them."""

    def __init__(self, grammar: Grammar, sampled: bool = False) -> None:
        self.grammar, self._eos, self._guide = grammar, grammar.eos, grammar.guide
        self._sampled, self._kept = sampled, 0  # how many masks of a sampled text were kept
        self.lexer = grammar.lexers.first
        """The lexer that masks are computed with. If it is changed, the next one is computed with the new one."""
        self._text: list[int] = []  # tokens that were noted
        self._number = grammar.empty  # of this text
        self._asked: int | None = None  # the number of the text by which the mask is kept that is computed
        self._renewals = 0
        self._ended = self._failed = self._ends_within = False
        self._restart()

    def note(self, token: int) -> None:
        """Note a token that was appended to the text."""
        if self._ended or self._failed:
            return
        self._ended = token in self._eos
        if self._ended:
            return
        if not self._ahead and token >= 0 and self._matcher.try_consume_tokens([token]):  # as most tokens are noted
            self._append(token)
            return
        if self._ahead[:1] != [token]:  # else the matcher has taken it before those after it
            self._failed = token < 0 or not self._advance([token])
        for taken in self._ahead[:1]:
            self._append(taken)
        del self._ahead[:1]

    def _append(self, token: int) -> None:
        """Note a token that the matcher has taken."""
        self._text.append(token)
        if self._kept < _MOST_NEW:
            self._number = self.grammar.known.after(self._number, (token,))

    def text_after(self, ahead: Sequence[int]) -> int:
        """The number of the text and `ahead` (`KnownMasks`), a new one if masks of this text are no longer kept."""
        known = self.grammar.known
        return known.after(self._number, ahead) if self._kept < _MOST_NEW else known.start()

    def fill(self, ahead: list[int], address: int, words: int) -> None:
        """Write the mask of the tokens that may follow the text and `ahead`: uint32 [words] at an address.

        All tokens may follow an end of text, and a draft that the grammar excludes: what follows these is discarded.
        None may follow where the grammar exceeds a limit of llguidance, or demands an end of text before its own end.
        """
        matcher = self.begin(ahead, address, words)
        if matcher is not None:
            matcher.unsafe_compute_mask_ptr(address, 4 * words)
            self.end(ahead, address, words)

    def begin(self, ahead: list[int], address: int, words: int) -> Any:
        """Begin to `fill`. Returns the matcher that is to write its mask there, before `end`; None if all is done."""
        if self._failed:
            ctypes.memset(address, 0, 4 * words)
            return None
        self._asked = None
        if self._kept < _MOST_NEW and not self._ended:
            self._asked = self.text_after(ahead)
            known = self.grammar.known.get(self._asked)
            if known is not None and len(known) == 4 * words:
                ctypes.memmove(address, known, 4 * words)
                return None
        if self._using is not self.lexer:
            self._restart()
        if not (ahead or self._ahead or self._ended):
            return self._matcher
        return self._ready(ahead, address, words)

    def end(self, ahead: list[int], address: int, words: int, usual: bool | None = None) -> None:
        """End to `fill`, after the matcher has written its mask. usual: whether `unusual` does not tell this mask, if
        that is known."""
        while self._matcher.is_error():
            ctypes.memset(address, 0, 4 * words)
            if not self._renew() or self._ready(ahead, address, words) is None:
                return
            self._matcher.unsafe_compute_mask_ptr(address, 4 * words)
            usual = None
        if not (self._is_usual(address, words) if usual is None else usual):
            mask = np.ctypeslib.as_array((ctypes.c_uint32 * words).from_address(address))
            self._allow_spelled(mask)
            self._forbid_ends_within(mask)
        if self._asked is not None and not self._ends_within:
            self.grammar.known.keep(self._asked, bytes(_memory(address, 4 * words)))
            self._kept += self._sampled

    def allows(self, ahead: list[int], token: int) -> bool:
        """Whether the token may follow the text and `ahead`, as far as that is known without the mask; else False.

        The matcher takes the token. Where it demands a certain text, it would take more tokens than the mask has: only
        the first of those that the tokenizer writes the text with.
        """
        if self._failed or (not self._ended and token in self._eos):
            return False
        if self._ended or not self._eos.isdisjoint(ahead):
            return True
        if self._using is not self.lexer:
            self._restart()
        if self._advance(ahead) < len(ahead):
            return not self._matcher.is_error()
        if self._matcher.is_error() or self._matcher.compute_ff_bytes():
            return False
        taken = self._matcher.try_consume_tokens([token]) == 1
        self._ahead += [token] * taken
        return bool(taken)

    def _ready(self, ahead: list[int], address: int, words: int) -> Any:
        """The matcher, with `ahead` taken; None if the mask does not follow from it and is written."""
        if self._ended or (ahead and not self._eos.isdisjoint(ahead)):
            ctypes.memset(address, 255, 4 * words)
            return None
        if self._advance(ahead) == len(ahead):
            return self._matcher
        ctypes.memset(address, 0 if self._matcher.is_error() else 255, 4 * words)
        return None

    def _is_usual(self, address: int, words: int) -> bool:
        """Whether a mask allows several tokens, and no end of text. While a step runs, the weights take the place of
        this code in the caches: what is done for each mask is short."""
        mask = _memory(address, 4 * words)
        for byte, bit in self.grammar.ends:
            if mask[byte] & bit:
                return False
        # Counting words takes a sixth of the time of counting bytes.
        return bool(np.count_nonzero(np.frombuffer(mask, np.uint32)) > 1)

    def _forbid_ends_within(self, mask: npt.NDArray[np.uint32]) -> None:
        """Allow no end of text where the grammar goes on behind it: a grammar may name tokens, also those."""
        if all(not mask[token // MASK_BITS] >> token % MASK_BITS & 1 for token in self._eos):
            return
        if within := [token for token in self._eos if not self._closes(token)]:
            for token in within:
                mask[token // MASK_BITS] &= ~np.uint32(1 << token % MASK_BITS)
            self._ends_within = not mask.any()

    def _closes(self, token: int) -> bool:
        """Whether the grammar may end before this token or with it."""
        if self._matcher.is_accepting():
            return True
        after = self._matcher.deep_copy()
        return bool(after.consume_token(token) and after.is_accepting())

    def _allow_spelled(self, mask: npt.NDArray[np.uint32]) -> None:
        """Where only one text may follow, allow a token that spells its start instead of a special token.

        llguidance encodes such a text as the tokenizer does, which takes `<think>` for a special token, and allows
        that; but as text, it accepts only `<` and so on.
        """
        [used] = mask.nonzero()
        if len(used) != 1 or (bits := int(mask[used[0]])) & (bits - 1):
            return
        token = MASK_BITS * int(used[0]) + bits.bit_length() - 1
        if self._matcher.is_accepting() or self._matcher.validate_tokens([token]):
            return
        forced = self._matcher.compute_ff_bytes()
        for size in range(len(self._guide.decode_bytes([token])), 0, -1):
            first = self._guide.tokenize_bytes(forced[:size])[:1]
            if self._matcher.validate_tokens(first):
                mask[:] = 0
                mask[first[0] // MASK_BITS] = 1 << first[0] % MASK_BITS
                return

    def masked(self, logits: npt.NDArray[np.float32], ahead: Sequence[int] = ()) -> npt.NDArray[np.float32]:
        """Logits [vocab] after the text and `ahead`; -inf for tokens that may not follow."""
        mask = np.zeros(mask_words(len(logits)), np.uint32)
        self.fill(list(ahead), mask.ctypes.data, len(mask))
        allowed = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little")
        return np.where(allowed, logits, np.float32(-np.inf))

    @property
    def error(self) -> str:
        """What is wrong with the grammar if no token may follow; else empty."""
        if self._ends_within:
            return "goes on behind a token that ends texts: leave the token out"
        if self._matcher.is_error():
            return f"became too complex at this output: {first_line(self._matcher.get_error())}"
        return ""

    def _advance(self, ahead: list[int]) -> int:
        """Have the matcher take these tokens after those noted. Returns how many the grammar allows."""
        taken = self._take(ahead)
        while self._matcher.is_error() and self._renew():
            taken = self._take(ahead)
        return taken

    def _take(self, ahead: list[int]) -> int:
        """`_advance`. The matcher is in error if the grammar exceeds a limit."""
        if not ahead and not self._ahead:
            return 0
        shared = len(self._ahead)
        if self._ahead != ahead[:shared]:
            shared = next(i for i, (a, b) in enumerate(zip_longest(self._ahead, ahead)) if a != b)
        if surplus := len(self._ahead) - shared:
            self._matcher.rollback(surplus)
            del self._ahead[shared:]
        if new := ahead[shared:]:
            self._ahead += new[: self._matcher.try_consume_tokens(new)]
        if len(self._ahead) < len(ahead):
            self._matcher.compute_bitmask()  # only this tells a token that the grammar excludes from a full lexer
        return len(self._ahead)

    def _renew(self) -> bool:
        """Go on with another lexer than one that has too many states; False if this text has had its share of them.

        False, too, if the matcher is in error for another reason.
        """
        if self._renewals == _MOST_RENEWALS or _FULL not in self._matcher.get_error():
            return False
        self._renewals += 1
        if self._using.matcher is self._source:  # else another text has renewed it
            self._using.renew()
        self._restart()
        return True

    def _restart(self) -> None:
        """Take the lexer's matcher, and have it follow the text from its start."""
        self._using, self._source = self.lexer, self.lexer.matcher
        self._matcher = self._source.deep_copy()
        self._ahead: list[int] = []  # tokens that the matcher has taken after those noted
        if self._text:
            self._matcher.try_consume_tokens(self._text)


def unusual(masks: npt.NDArray[np.uint32], eos: Collection[int]) -> npt.NDArray[np.bool_]:
    """Which masks [masks, words] may have to be corrected: those that allow an end of text, or no token or one, and
    perhaps some others. A few calls for all take less time than one for each.

    A sum equals the largest word if no other word has a bit; by chance, it may also if others have.
    """
    result = np.add.reduce(masks, axis=1, dtype=np.uint32) == np.maximum.reduce(masks, axis=1)
    for token in eos:
        result |= (masks[:, token // MASK_BITS] >> np.uint32(token % MASK_BITS) & np.uint32(1)).astype(bool)
    return result


def first_line(message: str) -> str:
    """The first line of a message that says something, and the line that starts with "error:", shortened."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    line = " ".join([lines[0], *[more for more in lines[1:] if more.startswith("error: ")][:1]])
    return line if len(line) <= 300 else f"{line[:300]}..."
