"""Words that stand where a sentence should name its subject, and names that do not say what they name."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("qcompile", "passes", "codegen", "runtime", "tests", "benchmarks", "docs")
SUFFIXES = (".py", ".md", ".h", ".jinja", ".js", ".html")
BANNED = re.compile(r"\b(whose|so\s+many)\b", re.IGNORECASE)


def test_no_sentence_hides_its_subject() -> None:
    places = []
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))):
        if path.suffix in SUFFIXES and path != Path(__file__):
            text = path.read_text(encoding="utf-8")
            places += [
                f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, m.start()) + 1}" for m in BANNED.finditer(text)
            ]
    assert not places, "name the subject, or the number"


def test_no_value_is_called_found() -> None:
    """The word says neither what a value is nor where it is from."""
    places = []
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        if re.search(r"\bfound\b", path.read_text(encoding="utf-8")):
            with tokenize.open(path) as file:
                tokens = tokenize.generate_tokens(file.readline)
                names = [token.start[0] for token in tokens if token.type == tokenize.NAME and token.string == "found"]
            places += [f"{path.relative_to(ROOT)}:{line}" for line in names]
    assert not places
