"""Where a checkpoint is: a local directory, or one fetched from the model hub.

huggingface_hub does the transfers, resumes them, and reads HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qcompile.checkpoints.gguf.files import is_file as is_gguf
from qcompile.checkpoints.links import check_links
from qcompile.checkpoints.tokenizer_sources import PATTERNS
from qcompile.errors import QCompileError, ResourceError, UsageError

Progress = Callable[[str, int, int], None]
SMALL_PATTERNS = ["*.json", *PATTERNS, "chat_template.jinja"]
HUB_PATTERNS = [*SMALL_PATTERNS, "*.safetensors"]
IGNORED = ["*/*", "consolidated*.safetensors"]
"""Patterns of files that are not downloaded: the same weights in other layouts, and files of other programs."""


def is_name(model: str) -> bool:
    """Whether `model`, which is no directory, may be a name on the hub: `organization/model`."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~")) and not Path(model).exists()


def check(model: str | Path) -> None:
    """Raise UsageError unless `model` is a directory or a GGUF file, or may be a name on the hub."""
    if not str(model):
        raise UsageError("the model's name is empty: give a checkpoint directory, or a name on the model hub")
    if not (Path(model).is_dir() or is_gguf(model) or is_name(str(model))):
        if not Path(model).exists():
            raise UsageError(f"{model} does not exist: give a checkpoint directory, or a name on the model hub")
        raise UsageError(f"{model} is a file: give the directory of a checkpoint, or a GGUF file")


def find(
    model: str | Path,
    allow_remote: bool = False,
    *,
    revision: str | None = None,
    token: str | None = None,
    weights: bool = True,
    progress: Progress | None = None,
) -> Path:
    """The local directory of `model`: itself if it is one, else fetched from the hub (safetensors only).

    That of a GGUF file is in the user's cache. A directory with a link to a file elsewhere is refused.
    `revision` is a branch, tag or commit on the hub, and `token` an access token. Without `weights` no weight file is
    fetched. Raises UsageError (unknown, forbidden, or not reachable), ResourceError (the disk is full).
    """
    check(model)
    path = Path(model)
    if path.is_dir():
        if revision is not None:
            raise UsageError(f"--revision {revision}: {model} is a directory, and revisions are those of the hub")
        check_links(path)
        return path
    if is_gguf(path):
        if revision is not None:
            raise UsageError(f"--revision {revision}: {model} is a file, and revisions are those of the hub")
        from qcompile.checkpoints.gguf.folder import folder_of

        return folder_of(path)
    import huggingface_hub

    wanted: dict[str, Any] = {
        "allow_patterns": [*(HUB_PATTERNS if weights else SMALL_PATTERNS), *(["*.py"] if allow_remote else [])],
        "ignore_patterns": IGNORED,
        "revision": revision,
        "token": token,
    }
    if progress is not None:
        wanted["tqdm_class"] = _bar(progress)
        huggingface_hub.utils.logging.set_verbosity_error()  # what fails is reported here
    try:
        return Path(huggingface_hub.snapshot_download(str(model), **wanted))
    except Exception as error:  # the hub client raises a family of errors for offline, unknown and gated
        raise _reported(str(model), revision, error) from error


def _reported(model: str, revision: str | None, error: Exception) -> QCompileError:
    """The error in the words of this program."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return UsageError(f"{model} asks for an agreement: accept it at {hub}/{model}, and give --token or HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UsageError(f"{hub} has no model {model}, or not for this token: check both (--token, HF_TOKEN)")
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(f"{model} has no revision {revision} at {hub}")
    if isinstance(error, errors.IncompleteSnapshotError) and constants.HF_HUB_OFFLINE:
        return UsageError(f"{model} was downloaded in part, and HF_HUB_OFFLINE is set: unset it to get the rest")
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return UsageError(f"{model} is not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set: unset it")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"no space left in {constants.HF_HUB_CACHE} for {model}: free some, or set HF_HOME")
    reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
    return UsageError(f"{model} is neither a directory nor reachable on the hub: {reason}")


def _bar(progress: Progress) -> type:
    """A progress bar for huggingface_hub that draws nothing, and tells `progress` the bytes that are there."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *given: Any, **options: Any) -> None:
            self._counts_bytes = options.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*given, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes:
                progress("downloading", int(self.n), int(self.total or 0))

    return Bar
