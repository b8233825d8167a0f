"""Every view appears, on a desktop and on a phone, without an error and without horizontal scrolling; axe-core finds no serious violation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from web.browser import DESKTOP, PHONE, fragment, settled, until

Open = Callable[..., Any]
SMALL = fragment(model="tiny", cluster={"extends": "dgx-h100", "gpus": 8}, workload__batch=64, workload__seq=1024,
                 plan={"tp": 2, "pp": 2, "shard": 2, "zero": 1})  # fmt: skip
# What each view must draw: a selector and the number of elements at least.
DRAWN = {
    "timeline": ("canvas", 1), "roofline": (".figure .point", 5), "ranks": (".figure rect", 16),
    "goodput": (".figure .point", 10), "heatmap": (".figure rect", 16), "pareto": (".figure .point", 3), "scaling": (".figure .point", 6),
    "batch": (".figure .point", 6), "sensitivity": (".figure rect", 8), "published": ("tbody tr", 10), "collectives": (".figure circle", 8),
    "strategies": ("tbody tr", 20), "experts": (".empty", 1),
}  # fmt: skip
SERIOUS = ("serious", "critical")


def names(page: Any) -> list[str]:
    """The views of the navigation."""
    found: list[str] = page.evaluate(
        "import('meshwright/views.js').then((m) => m.VIEWS.filter((v) => !v.within).map((v) => v.name))"
    )
    return found


def violations(page: Any) -> list[str]:
    """What axe-core finds: the rule, and the first element that breaks it."""
    Axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe
    found = Axe().run(page).response["violations"]
    return [
        f"{v['id']}: {v['help']} ({len(v['nodes'])}×, {v['nodes'][0]['html'][:160]})"
        for v in found
        if v["impact"] in SERIOUS
    ]


def go(page: Any, name: str) -> None:
    """Open a view from its link and wait until it is drawn."""
    page.evaluate("(name) => import('meshwright/state.js').then((s) => s.set('page.view', name))", name)
    page.locator(f"#view[data-view={name}][aria-busy=false] .body > *").first.wait_for()


FITS = "document.documentElement.scrollWidth <= window.innerWidth"


UNNAMED = """[...document.querySelectorAll('#view svg.figure, #view canvas:not([aria-hidden])')].filter((f) => !f.getAttribute('aria-label'))
             .map((e) => e.outerHTML.slice(0, 200))"""


def check_figures(page: Any, name: str) -> None:
    """The view has no error; its figures are drawn and have accessible names."""
    assert page.locator("#view .notice.error").count() == 0, f"{name}: {page.locator('#view').inner_text()[:400]}"
    selector, least = DRAWN.get(name, ("*", 1))
    assert page.locator(f"#view .body {selector}").count() >= least, name
    assert page.evaluate(UNNAMED) == [], name


@pytest.mark.parametrize("dark", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_view_is_drawn_on_desktop_and_phone(server: str, open_page: Open, dark: bool) -> None:
    page = open_page(server + "/" + SMALL, dark=dark)
    assert set(DRAWN) <= set(names(page))
    for name in names(page):
        go(page, name)
        assert page.locator("#title").inner_text()
        assert page.evaluate(FITS), name
        check_figures(page, name)
        page.set_viewport_size(PHONE)
        until(page, FITS)  # figures are drawn again after the change of size
        check_figures(page, name)
        page.set_viewport_size(DESKTOP)


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_frame_is_accessible(server: str, open_page: Open, dark: bool) -> None:
    page = open_page(server + "/" + SMALL, dark=dark)
    until(page, "document.querySelectorAll('.chips input').length > 0")
    assert violations(page) == []


@pytest.mark.slow
@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_view_is_accessible(server: str, open_page: Open, dark: bool, phone: bool) -> None:
    page = open_page(server + "/" + SMALL, dark=dark, phone=phone)
    found = {}
    for name in names(page):
        go(page, name)
        if wrong := violations(page):
            found[name] = wrong
    assert found == {}


def test_a_written_file_opens_from_disk_without_a_server(open_page: Open, tmp_path: Path) -> None:
    from meshwright.describe.config import load
    from meshwright.view.page.bundle import document
    from meshwright.view.page.subject import Subject

    name = "</script><script>alert(1)</script>"
    config = load("examples/llama3-70b-64xh100.toml", [f"model.name='{name}'"])
    file = tmp_path / "plan.html"
    file.write_text(document(Subject(config)), "utf-8")
    page = open_page(f"file://{file}")
    assert name in page.locator("#subject").inner_text()
    for view in ("memory", "waterfall", "overview"):
        link = page.get_by_role(
            "link", name={"memory": "Memory", "waterfall": "Time", "overview": "Plan"}[view], exact=True
        )
        if link.count():
            link.click()
            settled(page)
            assert page.locator("#view .notice.error").count() == 0
    assert "meshwright web" in page.locator("#inputs").inner_text()
    advice = page.locator("#view .panel", has_text="What to change first")
    assert advice.locator("li").count() >= 1
    assert advice.get_by_role("button").count() == 0
