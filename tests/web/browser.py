"""A real Chromium for the tests of the page: one browser, one context and one renderer for all tests of a worker process.

A new context costs a second of CPU time for every page: a renderer is started, and the modules are fetched and compiled again. The page keeps
only the colour theme in the browser's storage, which is cleared before each page.
A test fails if the page logs an error, throws one, or asks for an address that fails.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--process-per-site",
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


class Tabs:
    """The pages of one context. A small page of each server stays open, so that its renderer is used by the next pages."""

    def __init__(self, chromium: Any) -> None:
        self.chromium, self.context = chromium, chromium.new_context()
        self.kept: dict[str, Any] = {}

    def new_page(self, address: str) -> Any:
        server = re.match(r"http://[^/]+", address)
        if server:
            if server[0] not in self.kept:
                self.kept[server[0]] = self.context.new_page()
                self.kept[server[0]].goto(f"{server[0]}/api/runs")
            self.kept[server[0]].evaluate("localStorage.clear()")
        return self.context.new_page()


@pytest.fixture(scope="session")
def tabs(chromium: Any) -> Iterator[Tabs]:
    found = Tabs(chromium)
    yield found
    found.context.close()


@pytest.fixture
def open_page(tabs: Tabs) -> Iterator[Callable[..., Any]]:
    """Open an address: open_page(address, dark=False, phone=False); errors of the page fail the test.
    `refused`: the server refuses something that the test sends, `offline`: the test stops it; the browser logs both.
    `uncached`: nothing was loaded before."""
    opened_pages, contexts, faults = [], [], []

    def opened(
        address: str,
        dark: bool = False,
        phone: bool = False,
        ready: str = READY,
        refused: bool = False,
        offline: bool = False,
        uncached: bool = False,
    ) -> Any:
        if uncached:
            contexts.append(tabs.chromium.new_context())
        page = contexts[-1].new_page() if uncached else tabs.new_page(address)
        opened_pages.append(page)
        page.set_viewport_size(PHONE if phone else DESKTOP)
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.set_default_timeout(WAIT_MS)

        def heed(message: Any) -> None:
            known = (refused and "400 (Bad Request)" in message.text) or (offline and "net::ERR_" in message.text)
            if message.type in ("error", "warning") and not known:
                faults.append(f"console: {message.text}")

        page.on("console", heed)
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.goto(address)
        if ready:
            page.wait_for_selector(ready)
        return page

    yield opened
    for page in opened_pages:
        page.close()
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
