"""The source distribution keeps the layers as symbolic links; everything else is stated in pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

LAYERS = ("passes", "codegen", "runtime")


class LinkedSdist(sdist):
    """Writes qcompile/passes, qcompile/codegen and qcompile/runtime as links to the folders beside qcompile/.

    setuptools follows these links and would write every layer twice, as folders that can drift apart.
    """

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy `files` below `base_dir`, less those that are reached through a link, and make the links."""
        followed = tuple(os.path.join("qcompile", layer, "") for layer in LAYERS)
        super().make_release_tree(base_dir, [file for file in files if not file.startswith(followed)])
        for layer in LAYERS:
            (Path(base_dir) / "qcompile" / layer).symlink_to(os.path.join("..", layer))


setup(cmdclass={"sdist": LinkedSdist})
