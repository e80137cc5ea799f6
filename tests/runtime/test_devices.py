"""The registry of devices: each kind has an opener, and an unknown kind is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qcompile.artifact.reader import read_checked_manifest
from qcompile.errors import ArtifactError
from qcompile.runtime import devices
from qcompile.runtime.options import LoadOptions
from qcompile.targets import TARGETS


def test_every_kind_of_target_has_a_device() -> None:
    assert {target.kind for target in TARGETS.values()} == set(devices._OPEN)


def test_a_model_is_opened_by_the_kind_in_its_manifest(tiny_artifact: Callable[[str], Path]) -> None:
    root = tiny_artifact("w4a8")
    opened = devices.open_model(root, read_checked_manifest(root), LoadOptions(max_batch=2))
    assert opened.executor.threads and opened.tokenizer and opened.artifact and opened.drafter is None
    assert opened.most_cached is not None
    opened.executor.close()


def test_an_unknown_kind_of_device_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="built for a device of kind tpu; this qcompile runs cpu, cuda"):
        devices.open_model(tmp_path, {"target": {"kind": "tpu"}}, LoadOptions())
