"""A checkpoint's links to files elsewhere are refused; those of the hub's cache are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from qcompile.checkpoints.hub import find
from qcompile.errors import UsageError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint in the hub's cache."""
    folder = tmp_path / "models--some--one" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (tmp_path / "models--some--one" / "blobs").mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("target", ["../../../secret", "/etc/passwd", "../../blobs/../../secret", "../missing"])
def test_a_link_that_leaves_the_checkpoint_is_refused(model: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "secret").write_text("x")
    (model / "tokenizer.json").symlink_to(target)
    with pytest.raises(UsageError, match=r"tokenizer.json is a link to /.*, outside of the checkpoint: copy the file"):
        find(model)


def test_links_within_the_checkpoint_and_the_hubs_cache_are_followed(model: Path, tmp_path: Path) -> None:
    (model / "../../blobs/1").write_text("x")
    (model / "tokenizer.json").symlink_to("../../blobs/1")
    (model / "other.json").symlink_to("config.json")
    (tmp_path / "link").symlink_to(model)
    assert find(model) == model and find(tmp_path / "link") == tmp_path / "link"
