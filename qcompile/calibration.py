"""Calibration text: read a file, cut its tokens into samples, and refuse unusable text with a clear error.

Passes that measure activations read `graph.calibration`; if it is None they can only use the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qcompile import sample_text, texts
from qcompile.clock import Progress, silent
from qcompile.errors import ResourceError, UsageError
from qcompile.text_tables.reading import documents as documents_of_table
from qcompile.text_tables.reading import is_table
from qcompile.texts import encoded, started

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLES, SAMPLE_TOKENS = 128, 1024
"""The default amount of text. QServe D.1 uses 64 samples of 1,024 tokens, MixLLM 4.1 128 of 2,048."""

MOST_UNKNOWN = 0.5
"""If more than this share of the tokens is unknown, the text is in a script that the vocabulary lacks."""

VERSION = 4
"""Version of kept results; raise it when the same inputs would give different ones."""


class Kept(NamedTuple):
    """A result kept between runs: its tensors, figures about them, and notes on anything unusual."""

    tensors: list[Tensor]
    figures: dict[str, float]
    notes: tuple[str, ...] = ()


_NOTE = "note "

_ZIP = b"PK\3\4"
"""The first bytes of a zip file."""

EXCERPT_TOKENS = 8192
"""Number of tokens on which channel magnitudes are measured."""


@dataclass(frozen=True)
class CalibrationSource:
    """Where calibration tokens come from: a text file, or tokens int64 [samples, length], and how much of it to use.

    `given` may be `sample_text.FOLDER`, for the text that comes with the package. `samples`, `length` and `seed` select
    from a text; tokens are used as they are.
    """

    given: str | Path | Tensor
    samples: int = SAMPLES
    length: int = SAMPLE_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        given: object = self.given
        if not isinstance(given, str | Path | Tensor):
            kind = type(given).__name__
            raise UsageError(f"calibration takes a file of text or a tensor of token ids [samples, length], not {kind}")


@dataclass(frozen=True)
class Calibration:
    """`tokens` int64 [samples, length] from the text `source`; results per weight are kept in `folder`.

    With a folder, interrupted work resumes where it stopped; without one (None), results are only held in memory.
    `progress(stage, done, total)` reports progress.
    """

    tokens: Tensor
    source: str = ""
    folder: Path | None = None
    progress: Progress = field(default=silent, compare=False)

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or 0 in self.tokens.shape or self.tokens.dtype != torch.int64:
            given = f"{self.tokens.dtype} {tuple(self.tokens.shape)}"
            raise UsageError(f"calibration takes token ids int64 [samples, length], not {given}")

    def check_vocabulary(self, size: int) -> None:
        """Raise UsageError unless all tokens belong to a vocabulary of `size` tokens."""
        low, high = int(self.tokens.min()), int(self.tokens.max())
        if low < 0 or high >= size:
            worst = low if low < 0 else high
            raise UsageError(
                f"calibration holds token {worst}, outside the model's vocabulary of {size}: "
                "was the text made into tokens by another model's tokenizer?"
            )

    def excerpt(self, most: int = EXCERPT_TOKENS) -> Tensor:
        """The first samples, up to `most` tokens but at least one sample: enough to measure channel magnitudes."""
        return self.tokens[: max(1, most // self.tokens.shape[1])]

    def fingerprint(self, content: Iterable[bytes], what: str) -> str:
        """Hash of all that a result `what` depends on: the `content` of a graph (Graph.content) and this text."""
        digest = hashlib.sha256(f"{VERSION} {torch.__version__} {tuple(self.tokens.shape)} {what}".encode())
        digest.update(self.digest().encode())
        for part in content:
            digest.update(part)
        return digest.hexdigest()[:32]

    def path(self, key: str) -> Path | None:
        """The file of the result `key`; None if results are only held in memory."""
        return self.folder / f"{key}.safetensors" if self.folder else None

    def kept(self, key: str) -> Kept | None:
        """The result `key` of this run or an earlier, interrupted one; None if there is no complete one."""
        path = self.path(key)
        if path is None or not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = [file.get_tensor(str(index)) for index in range(len(file.keys()))]
        except SafetensorError:
            return None  # truncated by an interruption: computed again
        figures = {name: float(text) for name, text in metadata.items() if not name.startswith(_NOTE)}
        notes = sorted(name for name in metadata if name.startswith(_NOTE))
        return Kept(tensors, figures, tuple(metadata[name] for name in notes))

    def keep(self, key: str, result: Kept) -> None:
        """Keep a result, atomically; does nothing without a folder. Raises ResourceError if it cannot be written."""
        path = self.path(key)
        if path is None:
            return
        named = {str(index): tensor.contiguous() for index, tensor in enumerate(result.tensors)}
        metadata = {name: repr(value) for name, value in result.figures.items()}
        metadata |= {f"{_NOTE}{index:03}": note for index, note in enumerate(result.notes)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            save_file(named, partial, metadata)
            partial.replace(path)
        except OSError as error:
            raise ResourceError(f"cannot keep calibration results in {path.parent}: {error.strerror}") from error

    def digest(self) -> str:
        """Hash of the tokens, hexadecimal."""
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """What the manifest records about it, without paths and times."""
        samples, length = self.tokens.shape
        return {"source": self.source, "samples": samples, "length": length, "sha256": self.digest()}


def open_source(
    source: CalibrationSource,
    tokenizer: Tokenizer | None,
    *,
    bos: int | None,
    vocabulary: int,
    context: int,
    folder: Path | None = None,
    progress: Progress = silent,
) -> Calibration:
    """The calibration tokens of `source`, for a model with this `tokenizer` and a `context` in tokens.

    `bos` and `vocabulary` are as for `read`; `folder` keeps results between interrupted runs. Raises UsageError in the
    same cases as `read`.
    """
    if isinstance(source.given, Tensor):
        calibration = Calibration(source.given, "tokens")
        calibration.check_vocabulary(vocabulary)
        if not 2 <= (length := calibration.tokens.shape[1]) <= context:
            raise UsageError(f"calibration samples have {length} tokens; they may have 2 to {context}")
    elif tokenizer is None:
        raise UsageError("calibration text needs a model with a tokenizer: give token ids [samples, length] instead")
    else:
        calibration = read(
            source.given,
            tokenizer,
            bos=bos,
            vocabulary=vocabulary,
            samples=source.samples,
            length=min(source.length, context),
            seed=source.seed,
        )
    return replace(calibration, folder=folder, progress=progress)


def read(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    bos: int | None,
    vocabulary: int,
    samples: int = SAMPLES,
    length: int = SAMPLE_TOKENS,
    seed: int = 0,
) -> Calibration:
    """`samples` windows of `length` tokens from the text at `path`, chosen by `seed`, in text order.

    Documents are concatenated, each after `bos` (token 0 if there is none), as for perplexity. If there are fewer
    windows, all are used. Raises UsageError for text that is missing, empty, too short, not text, or outside the
    vocabulary.
    """
    if samples < 1 or length < 2:
        raise UsageError(f"calibration needs at least 1 sample of 2 tokens, not {samples} of {length}")
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"the seed of calibration samples is {seed}; it must be from 0 to 2^63 - 1")
    documents = [text for text in read_documents(path) if text.strip()]
    if not documents:
        raise UsageError(f"calibration text {path} is empty")
    stream: list[int] = []
    texts = foreign = 0
    unknown = tokenizer.token_to_id(str(getattr(tokenizer.model, "unk_token", None) or ""))
    for ids in encoded(tokenizer, documents, f"calibration text {path}"):
        stream += started(ids, 0 if bos is None else bos)
        texts += len(ids)
        foreign += 0 if unknown is None else ids.count(unknown)
    if foreign > MOST_UNKNOWN * texts or not texts:
        raise UsageError(f"calibration text {path} is outside the vocabulary: most of it is unknown to the tokenizer")
    windows = len(stream) // length
    if windows == 0:
        raise UsageError(
            f"calibration text {path} is too short: it has {len(stream)} tokens, one sample takes {length}: "
            "give more text, or a smaller --max-seq-length"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(windows, generator=generator)[:samples].sort().values
    tokens = torch.tensor(stream[: windows * length]).reshape(windows, length)[chosen]
    calibration = Calibration(tokens, "the sample text" if Path(path) == sample_text.FOLDER else Path(path).name)
    calibration.check_vocabulary(vocabulary)
    return calibration


def read_documents(path: str | Path) -> list[str]:
    """The "text" of every line of a JSONL file or item of a JSON array, or a plain text file as one document.

    Of a table (text_tables), it is the column of that name. The folder of the package's text has several documents.
    Raises UsageError with the line or item.
    """
    if Path(path) == sample_text.FOLDER:
        return sample_text.documents()
    if is_table(Path(path)):
        return documents_of_table(Path(path))
    _check_form(Path(path))
    try:
        whole = texts.read(path)
    except UnicodeDecodeError as error:
        raise UsageError(f"calibration text {path} is not text: byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise UsageError(f"cannot read calibration text {path}: {error.strerror}") from error
    if "\0" in whole:
        raise UsageError(f"calibration text {path} is not text: it holds zero bytes")
    documents = texts.documents(whole, f"calibration text {path}")
    return [whole] if documents is None else documents


def _check_form(path: Path) -> None:
    """Raise UsageError for forms of data sets that are not read, naming the one that is."""
    form = "a folder" if path.is_dir() else None
    if path.is_file():
        with path.open("rb") as file:
            form = "a zip file" if file.read(4) == _ZIP else None
    if form is not None:
        raise UsageError(
            f"calibration text {path} is {form}: give plain text, JSON lines with a "
            '"text", a Parquet file, or a folder of Dataset.save_to_disk'
        )
