"""Links between the pages of the documentation lead to files and headings that are there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "samples").glob("*/README.md")),
]
FENCED = re.compile(r"^```.*?^```$|^ {4}.*?$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<text>.+?) *$", re.MULTILINE)


def prose(path: Path) -> str:
    """A page without its code."""
    return FENCED.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings of a page: of equal ones all but the first get a number."""
    seen: Counter[str] = Counter()
    result = set()
    for heading in HEADING.finditer(prose(path)):
        name = re.sub(r"[^\w\- ]", "", LINK.sub(r"\g<text>", heading["text"]).lower()).replace(" ", "-")
        result.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return result


def broken(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    missing = []
    for target in (link["target"] for link in LINK.finditer(prose(page))):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if ":" not in path and (not file.exists() or (anchor and anchor not in anchors(file))):
            missing.append(target)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert not broken(page)


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[a](#a-b-c) [b](page.md#a) [c](none.md) [d](http://x.y#z)\n\n    [e](code)\n")
    assert broken(page) == ["page.md#a", "none.md"]


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(ROOT / link["target"].partition("#")[0]) for link in LINK.finditer(prose(ROOT / "README.md"))}
    assert not {page.name for page in (ROOT / "docs").glob("*.md") if page not in linked}
