"""A real Chromium for the tests of the page: one browser for all tests of a worker process, one context for each test.

A test fails if the page logs an error, throws one, or asks for an address that fails.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
READY = "#view[aria-busy=false] .body > *"
WAIT_MS = 30_000  # for a busy machine; a ready page is seen at once
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 740}


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A running browser."""
    api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Open an address in a new context: open_page(address, dark=False, phone=False); errors of the page fail the test.
    `refused`: the server refuses something that the test sends, which the browser logs too."""
    contexts, faults = [], []

    def opened(address: str, dark: bool = False, phone: bool = False, ready: str = READY, refused: bool = False) -> Any:
        context = chromium.new_context(viewport=PHONE if phone else DESKTOP, color_scheme="dark" if dark else "light")
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)

        def heed(message: Any) -> None:
            known = refused and "400 (Bad Request)" in message.text
            if message.type in ("error", "warning") and not known:
                faults.append(f"console: {message.text}")

        page.on("console", heed)
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.goto(address)
        if ready:
            page.wait_for_selector(ready)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults, "\n".join(faults)


def fragment(**values: Any) -> str:
    """The fragment of a state: fragment(view="memory", plan_tp=4) → #view=memory&plan.tp=4."""
    return "#" + "&".join(
        f"{k.replace('__', '.')}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items()
    )


def until(page: Any, condition: str) -> None:
    """Wait until a JavaScript expression is true. Playwright's own wait needs `eval`, which the page's policy refuses."""
    end = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, (
            f"never true: {condition}; the page shows: {page.locator('body').inner_text()[:1500]}"
        )
        page.wait_for_timeout(30)


def shows(page: Any, text: str, where: str = "#subject") -> None:
    """Wait until an element shows a text."""
    page.locator(where).filter(has_text=text).first.wait_for()


def settled(page: Any) -> None:
    """Wait until the view shows the present state."""
    page.locator("#view[aria-busy=false]").wait_for()
