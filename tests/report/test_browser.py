"""The report in a real browser, off the disk: nothing on the console, every plot drawn, no wider than a phone."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from qcompile.report import page as report_page
from tests.report.test_report import facts

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)

PROBE = """<script>
addEventListener("load", () => {
  const plots = [...document.querySelectorAll("svg")].map(svg => {
    const box = svg.getBoundingClientRect(), marks = [...svg.querySelectorAll("path")].map(p => p.getBBox());
    return {width: box.width, right: box.right, height: box.height,
            marks: marks.filter(m => m.width + m.height > 0).length};
  });
  const page = document.documentElement;
  parent.postMessage({plots, width: page.clientWidth, needed: page.scrollWidth, height: page.scrollHeight}, "*");
});
</script>"""
FRAME = """<!doctype html><link rel="icon" href="data:,"><pre id="found"></pre><script>
addEventListener("message", event => { document.getElementById("found").textContent = JSON.stringify(event.data); });
</script><iframe src="report.html" width="WIDTH" height="900" style="border: 0"></iframe>"""


def looked_at(folder: Path, width: int, more: str = "") -> tuple[dict[str, Any], str]:
    """What the browser makes of the page, with `more` in it, in a window so wide, and what its console says."""
    report = facts(outliers={"keys": {"before": [8.0, 9.0], "after": [2.0, 2.5]}})
    page = report_page.page(report)
    assert page.count("</body>") == 1
    (folder / "report.html").write_text(page.replace("</body>", f"{PROBE}{more}</body>"), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=3000")
    where = (f"--user-data-dir={folder / 'profile'}", "--dump-dom", (folder / "frame.html").as_uri())
    assert BROWSER is not None
    done = subprocess.run([BROWSER, *options, *where], capture_output=True, text=True, timeout=120)
    text = done.stdout.split('<pre id="found">')[1].split("</pre>")[0]
    assert text, f"the browser ran no script: {done.stderr[-2000:]}"
    return json.loads(html.unescape(text)), done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [360, 1280])
def test_every_plot_is_drawn_at_any_width(width: int, tmp_path: Path) -> None:
    result, messages = looked_at(tmp_path, width)
    assert "CONSOLE" not in messages
    assert result["needed"] <= result["width"] <= width  # less where a scroll bar takes its part
    assert len(result["plots"]) == 5
    for plot in result["plots"]:
        assert plot["marks"] >= 5 and plot["height"] > 100
        assert plot["width"] > 250 and plot["right"] <= width


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_what_is_wrong_would_be_seen(tmp_path: Path) -> None:
    wide = '<div style="width: 700px">x</div><img src="missing.png"><script>missing()</script>'
    result, messages = looked_at(tmp_path, 360, wide)
    assert result["needed"] > 360 and "CONSOLE" in messages
