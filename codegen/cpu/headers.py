"""Headers of kernels as one text: generated C++ includes no file of this project."""

from __future__ import annotations

import re
from pathlib import Path

_INCLUDE = re.compile(r'^#include "(?P<name>[\w.]+)"$')


class Headers:
    """Expands headers of a folder and what they include, each once. Includes of system headers stay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: set[str] = set()

    def __call__(self, *names: str) -> str:
        """The text of the headers `names`, without what was expanded before."""
        return "".join(self._expand(name) for name in names)

    def _expand(self, name: str) -> str:
        if name in self.seen:
            return ""
        self.seen.add(name)
        lines = [f"// ---- {name} ".ljust(100, "-") + "\n"]
        for line in (self.folder / name).read_text(encoding="utf-8").splitlines(keepends=True):
            included = _INCLUDE.match(line.rstrip())
            if included:
                lines.append(self._expand(included["name"]))
            elif line.strip() != "#pragma once":
                lines.append(line)
        return "".join(lines)
