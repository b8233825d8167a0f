"""The figures of plans, links, collectives and ZeRO in a real browser: each has the numbers of Python and reacts to pointer and keys."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.describe.config import configure
from meshwright.view.page.registry import VIEWS
from meshwright.view.page.subject import Subject
from web.browser import fragment, settled, until

Open = Callable[..., Any]
PLAN = {"tp": 2, "pp": 2, "shard": 2, "zero": 1}
STATE = {
    "model": "tiny",
    "cluster": {"extends": "dgx-h100", "gpus": 8},
    "workload__batch": 64,
    "workload__seq": 1024,
    "plan": PLAN,
}


@pytest.fixture(scope="module")
def subject() -> Subject:
    """The same configuration in Python."""
    config = configure("tiny", "dgx-h100", plan=PLAN, stack="megatron-core", gpus=8, batch=64, seq=1024)
    return Subject(config)


def visit(page: Any, name: str) -> None:
    """Show another view of the same state, and wait until its search is complete."""
    page.evaluate("async (name) => (await import('meshwright/state.js')).set('page.view', name)", name)
    page.locator(f"#view[data-view={name}][aria-busy=false] .body > *").first.wait_for()


def test_figures_say_what_python_says(server: str, open_page: Open, subject: Subject) -> None:
    page = open_page(f"{server}/{fragment(view='ranks', **STATE)}")
    for name in ("ranks", "timeline", "roofline", "goodput", "batch", "heatmap"):
        visit(page, name)
        found = VIEWS[name].data(subject)
        notes = [part["note"] for part in found.get("parts", [found]) if part.get("note")]
        assert notes
        shown = page.locator("#view").inner_text()
        assert not [note for note in notes if note not in shown], name


def test_fields_without_a_rule_are_inputs(server: str, open_page: Open) -> None:
    page = open_page(f"{server}/{fragment(view='overview', **{**STATE, 'plan': {'tp': 2, 'replicate': 4}})}")
    page.get_by_text("All settings").click()
    page.get_by_text("Dtypes, overlap, and more").click()
    page.get_by_label("Gradient messages").select_option("bf16")
    until(page, "decodeURIComponent(location.hash).includes('bf16')")
    page.get_by_label("Order of the axes, fastest first").select_option("dp,tp,cp,pp")  # its label has its effect
    until(page, """decodeURIComponent(location.hash).includes('["dp","tp","cp","pp"]')""")
    settled(page)
    page.get_by_role("radio", name="50 MB", exact=True).dispatch_event("click")
    until(page, "decodeURIComponent(location.hash).includes('bucket')")
    assert page.get_by_label("Rank of PowerSGD").count() == 0 or not page.get_by_text("Rank of PowerSGD").is_visible()


DRAWINGS = """() => {
  window.drawings = 0;
  const drawn = (one) => one.target.matches("[data-name=timeline] > .body") && [...one.addedNodes].some((node) => node.matches?.(".stats"));
  new MutationObserver((changes) => { window.drawings += changes.filter(drawn).length; }).observe(document, { childList: true, subtree: true });
}"""


def test_an_answer_that_was_complete_at_first_is_drawn_once(server: str, open_page: Open) -> None:
    page = open_page(f"{server}/{fragment(view='timeline', **STATE)}")
    settled(page)
    page.evaluate(DRAWINGS)
    for settings, times in (
        ({"schedules": ["gpipe"]}, 1),
        ({}, 2),
    ):  # chosen schedules are in the first answer, others come later
        before = page.evaluate("window.drawings")
        page.evaluate(
            "(options) => import('meshwright/state.js').then((s) => s.set('page.options.timeline', options))", settings
        )
        settled(page)
        assert page.evaluate("window.drawings") - before == times, settings


def test_the_timeline_zooms_and_pans_with_keys(server: str, open_page: Open) -> None:
    page = open_page(f"{server}/{fragment(view='timeline', **STATE)}")
    settled(page)
    page.evaluate("window.pixels = () => document.querySelector('#view canvas[role=application]').toDataURL()")
    page.evaluate("window.whole = pixels()")
    page.locator("#view canvas[role=application]").focus()
    page.keyboard.press("+")
    until(page, "pixels() !== whole")
    page.evaluate("window.zoomed = pixels()")
    page.keyboard.press("ArrowRight")
    until(page, "pixels() !== zoomed")
    page.keyboard.press("0")
    until(page, "pixels() === whole")
    page.keyboard.press(".")  # the first action of the first rank
    until(page, "document.querySelector('#view output').textContent.includes('of micro-batch 0, stage 0')")
    page.keyboard.press("f")
    until(page, "pixels() !== whole")


def test_a_late_provisional_answer_does_not_replace_the_final_one(server: str, open_page: Open) -> None:
    def with_late_answer(route: Any) -> None:
        lines = [json.loads(line) for line in route.fetch().text().splitlines()]
        lines += [{**line, "final": False, "data": {**line["data"], "note": "late"}} for line in lines if line["final"]]
        route.fulfill(status=200, body="".join(json.dumps(line) + "\n" for line in lines))

    page = open_page("about:blank", ready="")
    page.route("**/api/views", with_late_answer)
    page.goto(f"{server}/{fragment(view='timeline', **STATE)}")
    settled(page)
    assert "late" not in page.locator("#view .panel .sentence").last.inner_text()


def test_schedules_are_chosen_and_remembered_in_the_address(server: str, open_page: Open) -> None:
    page = open_page(f"{server}/{fragment(view='timeline', **STATE)}")
    settled(page)
    page.get_by_role("button", name="zbv", exact=True).dispatch_event("click")
    until(page, "[...document.querySelectorAll('#view tbody th')].some((row) => row.textContent.startsWith('zbv'))")
    assert "zbv" in page.url


def test_a_rank_is_chosen_with_keys(server: str, open_page: Open) -> None:
    page = open_page(f"{server}/{fragment(view='ranks', **STATE)}")
    page.get_by_role("slider", name="Chosen rank").focus()
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('#view [role=slider]').getAttribute('aria-valuenow') === '1'")
    assert "group of rank 1" in page.locator("#view").inner_text()


def test_a_cell_of_the_map_becomes_the_plan(server: str, open_page: Open) -> None:
    page = open_page(f"{server}/{fragment(view='heatmap', **STATE)}")
    settled(page)
    cell = page.locator(".view[data-name=heatmap] rect[role=button]:not(.chosen)").first
    x, y, before = cell.get_attribute("x"), cell.get_attribute("y"), page.url
    cell.click()
    until(page, f'document.querySelector(\'.view[data-name=heatmap] rect.chosen[x="{x}"][y="{y}"]\') !== null')
    assert page.url != before


def test_parts_offer_choices_formulas_and_changes(server: str, open_page: Open) -> None:
    """What Python lists as parts can be used: a choice is an option of the view, a number and a bar say their formula, a row becomes the plan."""
    page = open_page(f"{server}/{fragment(view='goodput', **STATE)}")
    settled(page)
    page.get_by_label("Time between failures").select_option("3h")
    until(page, "location.hash.includes('3h')")
    page.locator(".stat", has_text="Failure every").filter(has_text="3 h").wait_for()
    page.locator(".stat", has_text="Save every").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    assert "Daly τ* =" in page.locator("#tip").inner_text()
    visit(page, "sensitivity")
    settled(page)
    page.locator(".view[data-name=sensitivity] rect.has-tip").first.hover()
    assert "throughput" in page.locator("#tip").inner_text()
    visit(page, "leaders")
    settled(page)
    leaders = page.locator(".view[data-name=leaders]")
    assert leaders.locator(".columns > .panel").count() == 2  # why the winner leads, beside what differs
    row = leaders.locator("tbody tr:not(.chosen)").first
    title = row.locator("th").inner_text()
    row.get_by_role("button", name=f"Use {title}").click()
    until(page, f"document.querySelector('.view[data-name=leaders] tr.chosen th')?.innerText === {json.dumps(title)}")
    assert leaders.locator("tr.chosen").count() == 1


def test_a_collective_plays_step_by_step(server: str, open_page: Open) -> None:
    options = {"operation": "all-reduce", "algorithm": "ring", "ranks": 4}
    page = open_page(f"{server}/{fragment(view='collectives', options__collectives=options, **STATE)}")
    page.get_by_role("button", name="Next step").click()
    assert "after step 0 of 6" in page.locator("#view").inner_text()
    name = page.locator("#view svg[aria-label^='Step 0']").get_attribute("aria-label")
    assert name == "Step 0: rank 0 sends to 1, rank 1 sends to 2, rank 2 sends to 3, rank 3 sends to 0"
    page.get_by_role("slider", name="Step").fill("6")
    assert page.locator("#view text", has_text="Σ4").count() == 16
