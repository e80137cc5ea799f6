"""A real Chromium for tests of the chat page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

REQUIRED = "QCOMPILE_REQUIRE_BROWSER"
"""The variable with which continuous integration makes a missing browser a failure."""


def _missing(what: str) -> None:
    text = f"the chat page is not tested in a browser: {what}"
    if os.environ.get(REQUIRED):
        pytest.fail(text)
    pytest.skip(text)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without windows. Skips the tests, with the reason, where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError as error:
        _missing(f"there is no {error.name} (pip install 'qcompile[dev]')")
    path = shutil.which("chromium")
    if path is None:
        _missing("there is no chromium (apt-get install chromium)")
    with sync_playwright() as playwright:
        # Chromium's sandbox does not run as root, as tests in containers do. The pages are this project's own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, address: str, errors: list[str] | None = None, **options: Any) -> Iterator[Page]:
    """A page in a session of its own. What it reports on its console goes to `errors`; without, it must be nothing."""
    context = browser.new_context(**options)
    context.set_default_timeout(20_000)
    told: list[str] = [] if errors is None else errors
    page = context.new_page()
    page.on("console", lambda message: told.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: told.append(str(error)))
    try:
        page.goto(address)
        yield page
    finally:
        context.close()
    assert errors is not None or told == []


def findings(page: Page) -> list[str]:
    """What axe-core finds in the page that seriously hinders those who use assistive technology."""
    from axe_playwright_python.sync_playwright import Axe

    grave = ("serious", "critical")
    result = Axe().run(page).response["violations"]
    return [
        f"{one['id']} ({one['impact']}): {one['nodes'][0]['html'][:200]}" for one in result if one["impact"] in grave
    ]
