"""Hooks of mkdocs: pages of the API reference, and links out of docs/ that lead to the repository.

The reference has an index of the public names and one page for each Python package, which mkdocstrings fills from
docstrings. The pages are made while mkdocs runs, so that the reference follows the code. Links such as
`../benchmarks/results/x.json` are written for readers on GitHub; on the site they become links to the repository.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Docstring, Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = {
    "qcompile.pipeline.build": "compile a model into an artifact",
    "qcompile.runtime.load.load": "load an artifact",
    "qcompile.runtime.llm.LLM": "a loaded model: generate, stream, logits, perplexity",
    "qcompile.runtime.async_llm.AsyncLLM": "a loaded model for asyncio: generate and chat in tasks",
    "qcompile.runtime.sampling.params.SamplingParams": "how tokens of a request are chosen, and when it ends",
    "qcompile.runtime.outputs": "what `generate` and `stream` return",
    "qcompile.calibration": "calibration text for `build`",
    "qcompile.errors": "errors, and their exit codes",
    "qcompile.recipes": "number formats of a whole model",
    "qcompile.targets": "machines to compile for",
    "qcompile.passes.base": "what a pass is; for passes outside this repository",
    "qcompile.testing": "graphs, inputs and comparison for tests of passes",
    "qcompile.graph.Graph": "what a pass reads and rewrites",
}
"""What users of the package call, and what a pass outside this repository needs, by purpose."""
CODE = re.compile(r"(`+[^`]+`+|^ {4}.*$)", re.MULTILINE)
NEIGHBORS = re.compile(r"\](\s?)\[")
OUTSIDE = re.compile(r"\]\(\.\./(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def modules(package: Path) -> list[str]:
    """Names of the modules directly in a package, `__init__` and `__main__` left out."""
    return sorted(path.stem for path in package.glob("*.py") if not path.stem.startswith("__"))


def packages() -> Iterator[tuple[str, Path]]:
    """Dotted name and folder of each Python package, through the links to passes/, codegen/ and runtime/."""
    for place, folders, names in os.walk(ROOT / "qcompile", followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        if "__init__.py" in names:
            yield ".".join(Path(place).relative_to(ROOT).parts), Path(place)


def reference() -> dict[str, str]:
    """Markdown of each page of the reference by its path below docs/."""
    rows = "".join(f"| [`{name}`][{name}] | {purpose} |\n" for name, purpose in PUBLIC.items())
    pages = {"reference/index.md": f"# API reference\n\n| name | purpose |\n|---|---|\n{rows}"}
    for name, folder in packages():
        own = f"# `{name}`\n\n::: {name}\n    options:\n      members: false\n      show_root_heading: false\n\n"
        pages[f"reference/{name}.md"] = own + "".join(f"::: {name}.{module}\n\n" for module in modules(folder))
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the entry `reference/` of the navigation by the pages."""
    for entry in config.nav or ():
        for title, target in entry.items():
            if target == "reference/":
                entry[title] = [{Path(path).stem: path} if "index" not in path else path for path in reference()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference."""
    for path, text in reference().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Turn relative links to files outside docs/ into links to the repository."""

    def link(match: re.Match[str]) -> str:
        kind = "tree" if (ROOT / match["path"]).is_dir() else "blob"
        return f"]({str(config.repo_url).rstrip('/')}/{kind}/main/{match['path']}{match['anchor'] or ''})"

    return OUTSIDE.sub(link, markdown)


class PlainBrackets(Extension):
    """Shapes in docstrings such as `[M][N / 16]` are no references of Markdown: their brackets are escaped."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Escape the brackets in the docstring of an object, except in code."""
        if obj.docstring:
            pieces = CODE.split(obj.docstring.value)
            pieces[::2] = [NEIGHBORS.sub(r"]\1\\[", piece) for piece in pieces[::2]]
            obj.docstring = Docstring("".join(pieces), lineno=obj.docstring.lineno, parent=obj)
