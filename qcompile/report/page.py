"""report.html: a self-contained page for people. `python -m qcompile.report.page < report.json > report.html`.

It is rendered by a separate process during the build: importing and using matplotlib takes half a second, for which
a build with cached kernels should not wait.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qcompile.errors import QCompileError, escaped
from qcompile.report.advice import advice
from qcompile.report.figures import HEAD, bytes_by_part
from qcompile.report.plots import plots
from qcompile.system.python_process import module_command, module_environment

Json = dict[str, Any]


class PageWriter:
    """The process that renders the page. It is started early, so that its imports are done when the report is ready."""

    def __init__(self) -> None:
        # The encoding: whatever this process was told to write.
        environment = module_environment() | {"MPLBACKEND": "svg", "PYTHONIOENCODING": "utf-8"}
        self._process = subprocess.Popen(
            module_command("qcompile.report.page"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )

    def __enter__(self) -> PageWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, report: bytes) -> Callable[[], bytes]:
        """Send report.json; the returned function waits for the page. It raises QCompileError if rendering failed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(report)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # reported by _read, with the reason
        self._process.stdin = None
        return self._read

    def _read(self) -> bytes:
        page, messages = self._process.communicate()
        if self._process.returncode:
            last = (messages.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise QCompileError(f"report.html could not be drawn: {last}")
        return page

    def close(self) -> None:
        """Stop the process if it is still running."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()


# ---- the page ----------------------------------------------------------------------------------------


def page(report: Json) -> str:
    """The whole page as HTML text, without scripts or external links."""
    from jinja2 import Environment

    template = (Path(__file__).parent / "page.html.jinja").read_text(encoding="utf-8")
    report = _printable(report)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    total = sum(row["predicted_us"] for row in report["kernels"])
    passes = [("", entry) for entry in report["passes"]]
    passes += [(f"{draft['name']}: ", entry) for draft in report["drafts"] for entry in draft["passes"]]
    return environment.from_string(template).render(
        report=report,
        headline=headline(report),
        plots=list(plots(report)),
        token_us=total,
        passes=passes,
        advice=advice(report),
    )


def _printable(value: Any) -> Any:
    """A part of a report with its texts `escaped`: no document may have control characters."""
    if isinstance(value, dict):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_printable(inner) for inner in value]
    return escaped(value) if isinstance(value, str) else value


def headline(report: Json) -> str:
    """What the size consists of, and why the bits per weight are what they are, in two sentences."""
    size, parameters = report["weight_bytes"], report["model"]["parameters"]
    text = f"Weights take {_mib(size)}; in 16 bits they would take {_mib(2 * parameters)}."
    parts = [(name, each, 8 * each / bits) for name, each, bits in bytes_by_part(report) if bits]
    heads = [(each, count) for name, each, count in parts if name == HEAD]
    layers = [(each, count) for name, each, count in parts if name != HEAD]
    if not (layers and heads):
        return text
    inside, head = (8 * sum(each for each, _ in some) / sum(count for _, count in some) for some in (layers, heads))
    share = sum(count for _, count in heads) / sum(count for _, _, count in parts)
    return (
        f"{text} The linear layers have {report['bits_per_weight']:.2f} bits per weight on average, scales included: "
        f"{inside:.2f} in the layers, and {head:.2f} in the output head, which has {100 * share:.0f} % of the weights."
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def main() -> None:
    """Read a report from standard input and write its page to standard output."""
    import matplotlib.backends.backend_svg
    import matplotlib.figure  # noqa: F401 (import before the report arrives)

    sys.stdout.write(page(json.load(sys.stdin)))


if __name__ == "__main__":
    main()
