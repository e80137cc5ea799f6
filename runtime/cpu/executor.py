"""Calls the artifact's library through its C interface by ctypes, with every buffer allocated once.

A step carries rows (tokens) of several sequences. This module knows nothing of requests.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from qcompile.artifact.abi import CPU_ABI
from qcompile.errors import ArtifactError, ResourceError, UsageError
from qcompile.runtime.cpu.ranks import RankProcesses
from qcompile.runtime.loader import Arena
from qcompile.runtime.preparations import Preparations
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.inputs import SamplingInputs
from qcompile.runtime.sampling.logprobs import alternatives_of
from qcompile.runtime.sampling.masks import GrammarState
from qcompile.runtime.sampling.penalties import Penalties
from qcompile.runtime.step import RATES, HiddenStates, Limits, Rate, Rows, SlotCopies

_RANK_FAILED = 2
"""The status of a divided model's step when a rank has ended."""

FILL_MASK = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.py_object, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32
)
"""`qc_fill_mask` of the generated library."""


@FILL_MASK
def _fill_mask(grammar: GrammarState, tokens: Any, count: int, mask: int | None, words: int) -> int:
    """Write a mask, or say whether a token may follow, as `qc_fill_mask` describes.

    If writing a mask fails, no token is left and the request ends.
    """
    if mask is None:
        return int(grammar.allows(tokens[:count], words))
    grammar.fill(tokens[:count], mask, words)
    return 1


class QcSampling(ctypes.Structure):
    """`qc_sampling` of the generated library: sampling inputs, how the tokens of a sequence are chosen."""

    _fields_ = [
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("min_logit", ctypes.c_double),
        ("uniforms", ctypes.c_void_p),
        ("top_k", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("listed", ctypes.c_int32),
        ("room", ctypes.c_int32),
        ("reported", ctypes.c_int32),
        ("alternatives", ctypes.c_int32),
        ("known", ctypes.c_int32),
        ("biased", ctypes.c_int32),
        ("repetition", ctypes.c_double),
        ("frequency", ctypes.c_double),
        ("presence", ctypes.c_double),
        ("seen", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("recent", ctypes.c_void_p),
        ("reports", ctypes.c_void_p),
        ("known_next", ctypes.c_void_p),
        ("bias_tokens", ctypes.c_void_p),
        ("bias_values", ctypes.c_void_p),
        ("fill_mask", FILL_MASK),
        ("grammar", ctypes.c_void_p),
    ]


def sampling_array(sampling: Sequence[SamplingInputs]) -> Any:
    """`sampling` as an array of QcSampling, which owns what they point to; None if only the argmax is wanted."""
    if all(inputs.plain for inputs in sampling):
        return None
    result: Any = (QcSampling * len(sampling))()
    uniforms: Any = (ctypes.c_double * sum(len(inputs.uniforms) for inputs in sampling))()
    at = 0
    for entry, inputs in zip(result, sampling, strict=True):
        count = len(inputs.uniforms)
        uniforms[at : at + count] = inputs.uniforms
        entry.temperature, entry.top_p, entry.min_logit = inputs.temperature, inputs.top_p, inputs.min_logit
        entry.top_k, entry.first, entry.count = inputs.top_k, inputs.first, count
        entry.uniforms = ctypes.addressof(uniforms) + 8 * at
        at += count
        if inputs.reports is not None:
            entry.reports, entry.alternatives = inputs.reports.ctypes.data, alternatives_of(inputs.reports)
            entry.known, entry.reported = len(inputs.known), len(inputs.reports) - len(inputs.known)
        if inputs.bias is not None:
            entry.bias_tokens, entry.bias_values = inputs.bias.tokens.ctypes.data, inputs.bias.values.ctypes.data
            entry.biased = len(inputs.bias.tokens)
    pairs = list(zip(result, sampling, strict=True))
    result.owned = [uniforms, sampling]
    for entry, inputs in pairs:
        if inputs.penalties:
            _set_penalties(entry, inputs.penalties)
        if inputs.masks:
            # The library gets the address of a Python object, which `sampling` keeps alive.
            entry.fill_mask, entry.grammar = _fill_mask, id(inputs.masks.grammar)
        if later := inputs.penalties or inputs.masks:
            recent: Any = (ctypes.c_int32 * later.room)(*later.ahead)
            entry.recent, entry.room = ctypes.addressof(recent), later.room
            result.owned.append(recent)
        if inputs.known:
            result.owned.append(_set_known(entry, inputs.known))
    return result


def _set_known(entry: QcSampling, tokens: Sequence[int]) -> Any:
    """Set an entry's known tokens. Returns the memory that it then points to."""
    known: Any = (ctypes.c_int32 * len(tokens))(*tokens)
    entry.known_next = ctypes.addressof(known)
    return known


def _set_penalties(entry: QcSampling, given: Penalties) -> None:
    """Set an entry's penalties, but for the tokens that follow those listed."""
    entry.repetition, entry.frequency, entry.presence = given.repetition, given.frequency, given.presence
    entry.seen, entry.counts = given.tokens.ctypes.data, given.counts.ctypes.data
    entry.listed = len(given.tokens)


def _embeds_array(sequences: Sequence[Rows], count: int) -> Any:
    """The addresses of the embeddings of `count` rows, 0 for rows without; None if no row has one."""
    if all(rows.embeds is None for rows in sequences):
        return None
    addresses, at = (ctypes.c_void_p * count)(), 0
    for rows in sequences:
        if rows.embeds is not None:
            first, stride = rows.embeds.ctypes.data, rows.embeds.strides[0]
            addresses[at : at + len(rows.embeds)] = [first + i * stride for i in range(len(rows.embeds))]
        at += len(rows.tokens)
    return addresses


class QcBatch(ctypes.Structure):
    """`qc_batch` of the generated library: one step's rows."""

    _fields_ = [
        ("tokens", ctypes.c_int32),
        ("sequences", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("block_stride", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("output_rows", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("argmax", ctypes.c_void_p),
        ("sampling", ctypes.c_void_p),
        ("state_slots", ctypes.c_void_p),
        ("certain", ctypes.c_void_p),
        ("embeds", ctypes.c_void_p),
    ]


class QcConfig(ctypes.Structure):
    """`qc_config` of the generated library: the arguments of opening it."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("kv_pages", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        ("max_tokens", ctypes.c_int32),
        ("max_outputs", ctypes.c_int32),
        ("thread_pool", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("state_slots", ctypes.c_int64),
    ]


def bind(library: Any) -> None:
    """Declare the argument and result types of the library's functions."""
    batch, handle, i32 = ctypes.POINTER(QcBatch), ctypes.c_void_p, ctypes.c_int32
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "qc_describe": (ctypes.c_char_p, []),
        "qc_open": (handle, [ctypes.POINTER(QcConfig)]),
        "qc_thread_pool": (ctypes.c_void_p, [handle]),
        "qc_step": (ctypes.c_int, [handle, batch]),
        "qc_decode": (ctypes.c_int, [handle, batch, i32, ctypes.c_void_p]),
        "qc_speculate": (ctypes.c_int, [ctypes.c_void_p]),
        "qc_profile": (ctypes.c_int, [handle, i32]),
        "qc_profile_read": (ctypes.c_int, [handle, ctypes.c_void_p, ctypes.c_void_p, i32]),
        "qc_probe": (ctypes.c_double, [handle, i32]),
        "qc_close": (None, [handle]),
    }
    if hasattr(library, "qc_hidden"):
        signatures["qc_hidden"] = (ctypes.c_int, [handle, batch, ctypes.c_void_p])
    if hasattr(library, "qc_connect"):
        signatures["qc_connect"] = (ctypes.c_int, [handle, ctypes.c_void_p, ctypes.c_void_p])
    if hasattr(library, "qc_join"):
        signatures["qc_rank_bytes"] = (ctypes.c_int64, [handle])
        signatures["qc_join"] = (ctypes.c_int, [handle, ctypes.c_void_p])
        signatures["qc_follow"] = (ctypes.c_int, [handle])
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


class StateMemory(NamedTuple):
    """The slots of recurrent states, one after the other, of which the last `copies` are for copies."""

    slots: Arena
    copies: int


class Executor:
    """An opened model. `step` and `decode` block until the library is done. Not safe for two threads.

    `library` has the functions of the C interface, `pointers` is a ctypes array of weight addresses, `kv` holds
    `kv_pages` pages, and `states` the slots of recurrent states, if the model has any. A draft path uses the threads of
    the path that it drafts for, `leader`, and must be closed before it. Raises ResourceError if threads or memory are
    short.
    """

    samples, asks_for_masks, overlaps = True, True, False

    def __init__(
        self,
        library: Any,
        pointers: Any,
        kv: Arena,
        kv_pages: int,
        threads: int,
        limits: Limits,
        leader: Executor | None = None,
        states: StateMemory | None = None,
    ) -> None:
        self.library, self.limits, self.threads, self.kv_pages = library, limits, threads, kv_pages
        self.preparations = Preparations()
        self.caches: list[Arena] = [kv, *([states.slots] if states else [])]
        """The memory of caches and states: its own, and that of the paths that draft for it."""
        if leader is not None:
            leader.caches += self.caches
        self.ranks: RankProcesses | None = None
        """The processes that run the other parts of a divided model."""
        self._keep: tuple[object, ...] = (pointers, kv)
        self.states = states.slots if states else None
        """The slots of recurrent states, one after the other; None if the model has no states."""
        self.features = self.given = np.empty((0, 0), np.float32)
        """Features that the last call's rows returned, and those that rows read, once they are wanted (`connect`)."""
        self._given: list[int] = []  # by what `start` ran last
        self.description: dict[str, Any] = json.loads(library.qc_describe())
        if self.description.get("abi") != CPU_ABI:
            raise ArtifactError(f"library interface {self.description.get('abi')}, this qcompile has {CPU_ABI}")
        self.embed_width: int = self.description.get("embed_width", 0)
        self.hidden = self._hidden_states()
        self._check(len(pointers), kv)
        slot_bytes = self.description.get("slot_bytes", 0)
        self.state_slots = self.states.size // slot_bytes if self.states and slot_bytes else 0
        """Slots of recurrent states; 0 if the model has no states."""
        copies = states.copies if states else 0
        self.copies = SlotCopies(self.state_slots - copies, copies, self.copy_state) if copies else None
        """The last of them, which are for copies."""
        self._allocate()  # first, so that if it fails there is nothing to close
        thread_pool = leader.library.qc_thread_pool(leader.handle) if leader else None
        config = QcConfig(
            *(
                ctypes.addressof(pointers),
                kv.address,
                kv_pages,
                threads,
                limits.max_tokens,
                limits.max_tokens,
                thread_pool,
            ),
            *(self.states.address if self.states else None, self.state_slots),
        )
        self.handle: int | None = library.qc_open(ctypes.byref(config))
        if not self.handle:
            raise ResourceError(f"no memory or threads to open the model with {threads} threads")

    def _check(self, weights: int, kv: Arena) -> None:
        """Raise ArtifactError unless the library has the manifest's sizes: it does not check its arguments itself."""
        description, limits = self.description, self.limits
        cache = description.get("kv", {})
        wrong = ["weights"] * (description.get("weights", 0) > weights)  # more may follow: those of drafts
        wrong += ["vocab_size"] * (description.get("vocab_size", limits.vocab) != limits.vocab)
        for name, value in (("page_tokens", limits.page_tokens), ("ring_tokens", limits.ring_tokens)):
            wrong += [name] * (cache.get(name, value) != value)
        wrong += ["page_bytes"] * (cache.get("page_bytes", 0) * self.kv_pages > kv.size)
        wrong += ["max_position"] * (description.get("max_position", limits.max_position) < limits.max_position)
        if wrong:
            raise ArtifactError(f"the artifact's manifest and library differ in {wrong[0]}; build it again")

    def _hidden_states(self) -> HiddenStates | str:
        width = self.description.get("hidden_width")
        if width:
            return HiddenStates(width, self._step_hidden)
        if width is None:
            return "it was built by an earlier version of qcompile: build it again"
        return "passes have changed them: build it with a recipe without rotate, fold_norms and smooth, such as w4a8"

    def _allocate(self) -> None:
        rows = self.limits.max_tokens
        table = rows * self.limits.pages_for(self.limits.max_position)
        # ctypes arrays take a list or a range in one slice assignment; numpy would convert it to an array first.
        self._token_ids: Any = (ctypes.c_int32 * rows)()
        self._positions: Any = (ctypes.c_int32 * rows)()
        self._query_start: Any = (ctypes.c_int32 * (rows + 1))()
        self._block_table: Any = (ctypes.c_int32 * table)()
        self._output_rows: Any = (ctypes.c_int32 * rows)()
        self._slots: Any = (ctypes.c_int32 * rows)()
        self._certain: Any = (ctypes.c_int32 * rows)()
        self._argmax = (ctypes.c_int32 * rows)()
        self._decoded = (ctypes.c_int32 * rows)()
        self._logits: FloatArray = np.empty(
            (rows, self.limits.vocab), np.float32
        )  # its pages take memory once they are used
        self._batch = QcBatch(
            token_ids=ctypes.addressof(self._token_ids),
            positions=ctypes.addressof(self._positions),
            query_start=ctypes.addressof(self._query_start),
            block_table=ctypes.addressof(self._block_table),
            output_rows=ctypes.addressof(self._output_rows),
            argmax=ctypes.addressof(self._argmax),
            state_slots=ctypes.addressof(self._slots),
            certain=ctypes.addressof(self._certain),
        )
        self._logits_address = self._logits.ctypes.data
        self._reference = ctypes.byref(self._batch)

    def _fill(self, sequences: Sequence[Rows], sampling: Sequence[SamplingInputs]) -> int:
        """Write the rows into the batch. Returns how many give logits."""
        if self.handle is None:
            raise UsageError("the model is closed: load it again")
        stride = max(len(rows.pages) for rows in sequences)
        at = outputs = 0
        for index, rows in enumerate(sequences):
            count = len(rows.tokens)
            end = at + count
            self._token_ids[at:end] = rows.tokens
            self._positions[at:end] = range(rows.start, rows.start + count)
            first = index * stride
            self._block_table[first : first + len(rows.pages)] = rows.pages
            if rows.outputs:
                self._output_rows[outputs : outputs + rows.outputs] = range(end - rows.outputs, end)
                outputs += rows.outputs
            at = end
            self._query_start[index + 1] = at
            self._slots[index], self._certain[index] = rows.slot, rows.certain
        batch, self._sampling = self._batch, sampling_array(sampling)
        self._embeds = _embeds_array(sequences, at)
        batch.embeds = ctypes.addressof(self._embeds) if self._embeds else None
        batch.sampling = ctypes.addressof(self._sampling) if self._sampling else None
        batch.tokens, batch.sequences, batch.outputs, batch.block_stride = at, len(sequences), outputs, stride
        return outputs

    def step(
        self, sequences: Sequence[Rows], logits: bool, sampling: Sequence[SamplingInputs] = ()
    ) -> tuple[list[int], FloatArray | None]:
        """Run one step over at most `max_tokens` rows.

        Returns the argmax of every output row, or its draw if its sequence has a temperature, and if asked its logits
        [outputs, vocab] (with penalties, if its sequence has any), a view that the next call overwrites.
        """
        outputs = self._fill(sequences, sampling)
        self._batch.logits = self._logits_address if logits else None
        status = self.library.qc_step(self.handle, self._reference)
        self.check_status("qc_step", status)
        return self._argmax[:outputs], self._logits[:outputs] if logits else None

    def check_status(self, function: str, status: int) -> None:
        """Raise ResourceError if a rank has failed, RuntimeError if the library has refused its arguments.

        status: 0 done, 2 a rank has failed, 1 the arguments are refused, or a step of a longer call has failed.
        """
        ranks = self.ranks
        if ranks and status and (status == _RANK_FAILED or ranks.memory.failed):
            raise ResourceError(ranks.failure.problem or "the model's other ranks have ended: load the model again")
        if status:
            raise RuntimeError(f"{function} refused its arguments ({status})")

    def _step_hidden(self, sequences: Sequence[Rows]) -> FloatArray:
        """Run one step. Returns the hidden states [outputs, width] of the output rows."""
        outputs = self._fill(sequences, ())
        self._batch.logits = None
        hidden: FloatArray = np.empty((max(outputs, 1), self.description["hidden_width"]), np.float32)
        status = self.library.qc_hidden(self.handle, self._reference, hidden.ctypes.data)
        self.check_status("qc_hidden", status)
        return hidden[:outputs]

    def decode(self, sequences: Sequence[Rows], steps: int, sampling: Sequence[SamplingInputs] = ()) -> list[int]:
        """`steps` tokens for each sequence (one row each), fed back without returning to Python.

        The pages must have room for all of them. Returns [steps, sequences], flattened.
        """
        count = steps * self._fill(sequences, sampling)
        if count > len(self._decoded):
            self._decoded = (ctypes.c_int32 * count)()
        if count > len(self.features) > 0:
            self._connect(count)
        self._batch.logits = None
        out = ctypes.addressof(self._decoded)
        status = self.library.qc_decode(self.handle, self._reference, steps, out)
        self.check_status("qc_decode", status)
        return self._decoded[:count]

    def start(
        self, sequences: Sequence[Rows], steps: int, sampling: Sequence[SamplingInputs] = ()
    ) -> Callable[[], list[int]]:
        """Run `decode` or `step` at once, as a CPU's cores are the host's."""
        given = self._given
        tokens = ([token if token >= 0 else max(given[-1 - token], 0) for token in row.tokens] for row in sequences)
        rows = [row._replace(tokens=known) for row, known in zip(sequences, tokens, strict=True)]
        chosen = list(self.decode(rows, steps, sampling) if steps > 1 else self.step(rows, False, sampling)[0])
        self._given = chosen[len(chosen) - sum(row.outputs for row in rows) :]
        return lambda: chosen

    def begin_masks(self) -> None:
        """No step lacks masks: `start` has run it."""

    def copy_state(self, source: int, target: int) -> None:
        """Copy a slot of recurrent states to another, in all processes that compute the model."""
        assert self.states
        size = self.description["slot_bytes"]
        first = self.states.address
        ctypes.memmove(first + target * size, first + source * size, size)
        if self.ranks:
            self.ranks.copy_state(source, target)

    def connect(self) -> None:
        """Let steps return features, and read those given. Raises ArtifactError if the library returns none."""
        if not self.description.get("features"):
            raise ArtifactError("the artifact's library returns no features to a draft head; build it again")
        self._connect(self.limits.max_tokens)

    def _connect(self, rows: int) -> None:
        """Let steps return features of up to `rows` rows."""
        width = self.description["features"]
        self.features = np.empty((rows, width), np.float32)
        self.given = np.empty((self.limits.max_tokens, width), np.float32)
        self.library.qc_connect(self.handle, self.given.ctypes.data, self.features.ctypes.data)

    def return_features(self, on: bool) -> None:
        """Whether steps compute and return features from now on."""
        self.library.qc_connect(self.handle, self.given.ctypes.data, self.features.ctypes.data if on else None)

    def profile(self, on: bool) -> None:
        """Start (resetting the counters) or stop timing each call."""
        self.library.qc_profile(self.handle, int(on))

    def profile_read(self) -> dict[str, tuple[float, int]]:
        """Seconds and number of runs of each call since `profile(True)`, in the order they run."""
        names = self.description["calls"]
        seconds, counts = (ctypes.c_double * len(names))(), (ctypes.c_int64 * len(names))()
        self.library.qc_profile_read(self.handle, seconds, counts, len(names))
        return {name: (seconds[i], counts[i]) for i, name in enumerate(names)}

    def peak(self, rate: Rate) -> float:
        """A peak of this machine, measured now; reading, for memory."""
        return float(self.library.qc_probe(self.handle, RATES.index(rate)))

    def close(self) -> None:
        """End the library's threads and free its memory; idempotent."""
        handle, self.handle = self.handle, None
        if self.ranks is not None:
            self.ranks.close()
        if handle:
            self.library.qc_close(handle)
            self._keep = ()
            self.caches = []
