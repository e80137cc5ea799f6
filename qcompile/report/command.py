"""The command that makes the same build again, for the report. Paths are left out but for their last part."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qcompile import sample_text
from qcompile.calibration import CalibrationSource


def command(
    model: Any,
    settings: Mapping[str, object],
    options: Mapping[str, object],
    drafts: Sequence[Any],
    lora: Sequence[str],
    calib: CalibrationSource | None,
) -> str:
    """`qcompile build ...` for a checkpoint, or the call of `qcompile.build` for what only Python can give.

    settings: arguments of `build` with one value each, such as recipe and target; those that are None are left out.
    options: fields of passes. drafts, lora: as `build` takes them.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    text = None if calib is None else calib.given
    sources = [model, *drafts, *([] if text is None else [text])]
    if all(isinstance(each, str | Path) for each in sources):
        words = ["qcompile", "build", _last(model), "-o", "OUT"]
        for name, value in given.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        for draft in drafts:
            words += ["--draft", _last(draft)]
        for adapter in lora:
            words += ["--lora", adapter]
        for name, value in options.items():
            words += ["--set", f"{name}={value}"]
        return shlex.join([*words, *_calibration(calib)])
    given |= {"options": dict(options)} if options else {}
    given |= {"drafts": [_last(each) for each in drafts]} if drafts else {}
    given |= {"lora": list(lora)} if lora else {}
    given |= {"calib": _last(text)} if text is not None else {}
    arguments = "".join(f", {name}={value!r}" for name, value in given.items())
    return f"qcompile.build({_last(model)}, 'OUT'{arguments})"


def _calibration(calib: CalibrationSource | None) -> list[str]:
    """The options of calibration that differ from the defaults."""
    if calib is None:
        return []
    usual = CalibrationSource("")
    words = ["--calib", "sample" if calib.given == sample_text.FOLDER else _last(calib.given)]
    for option, name in (("--num-calibration-samples", "samples"), ("--max-seq-length", "length"), ("--seed", "seed")):
        if getattr(calib, name) != getattr(usual, name):
            words += [option, str(getattr(calib, name))]
    return words


def _last(given: Any) -> str:
    """The last part of a path; the kind of anything else."""
    return Path(given).name if isinstance(given, str | Path) else f"<{type(given).__name__}>"
