"""A text that comes with the package: prose, questions and answers, mathematics, code and data, in several languages.

Benchmarks take prompts from it, and builds calibrate on it where they are given no other text. The documents were
written for this project. Measurements and builds depend on them: a change of a document changes their results.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "documents"
"""Where the documents are. As calibration text, it stands for all of them."""


def documents() -> list[str]:
    """The documents, in a fixed order."""
    return [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.txt"))]
