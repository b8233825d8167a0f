"""The frame of the page in a real browser: views appear, inputs change numbers to those of the Python API, the address restores a state."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import meshwright as mw
from web.browser import READY, fragment, settled, shows, until

Open = Callable[..., Any]
SMALL = fragment(model="tiny", cluster={"extends": "dgx-h100", "gpus": 8}, workload__batch=64, workload__seq=1024,
                 plan={"tp": 2, "pp": 2, "shard": 2, "zero": 1})  # fmt: skip


def small(**plan: Any) -> Any:
    """The estimate of the small configuration, with other plan fields."""
    fields = {"tp": 2, "pp": 2, "shard": 2, "zero": 1} | plan
    return mw.estimate("tiny", "dgx-h100", gpus=8, batch=64, seq=1024, stack="megatron-core", plan=fields)


def number(page: Any, name: str) -> str:
    """A number of the verdict bar."""
    text: str = page.locator("#verdict .numbers > div", has_text=name).locator("b").inner_text()
    return text


def pick(page: Any, field: str, value: str) -> None:
    """Choose a value of a field of the plan."""
    page.get_by_role("group", name=field).get_by_role("radio", name=value, exact=True).check()


def milliseconds(text: str) -> float:
    value, unit = re.match(r"([\d.,]+) (\S+)", text).groups()  # type: ignore[union-attr]
    return float(value.replace(",", "")) * {"s": 1e3, "ms": 1.0, "µs": 1e-3}[unit]


def test_an_input_changes_the_numbers_to_those_of_the_python_api(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    assert milliseconds(number(page, "step")) == pytest.approx(1e3 * small().prediction.step_time_s, rel=5e-3)
    pick(page, "Tensor parallel, tp", "4")
    until(page, "location.hash.includes('plan.tp=4')")
    settled(page)
    expected = small(tp=4, shard=1).prediction.step_time_s
    shows(page, "tp 4")
    assert milliseconds(number(page, "step")) == pytest.approx(1e3 * expected, rel=5e-3)


def test_the_choices_are_asked_for_after_the_views_are_answered(server: str, open_page: Open) -> None:
    """So that computing them never delays a view; and not again where only the view changes."""
    page, seen = open_page(server + "/" + SMALL, refused=True), []
    page.wait_for_load_state("networkidle")
    page.on("request", lambda r: seen.append(f"asked {r.url.rpartition('/')[2]}"))
    page.on("response", lambda r: seen.append(f"answered {r.url.rpartition('/')[2]}"))
    page.evaluate("location.hash += '&plan.shard=4'")  # 16 GPUs on 8: the choices offer another plan
    page.get_by_role("button", name="Change the plan to the nearest legal one").wait_for()
    assert seen == ["asked views", "answered views", "asked choices", "answered choices"]
    seen.clear()
    with page.expect_response(lambda r: r.url.endswith("/api/views")):
        page.evaluate("location.hash += '&view=roofline'")
    page.wait_for_timeout(400)  # longer than the pause after which the page asks
    assert seen == ["asked views", "answered views"]


def test_a_chip_shows_its_effect_and_applying_it_has_that_effect(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    chip = page.get_by_role("group", name="ZeRO stage").locator('label:has(input[value="3"]) small')
    chip.wait_for()
    saved = 1e3 * (small().prediction.step_time_s - small(zero=3).prediction.step_time_s)
    words = chip.inner_text()
    assert milliseconds(words[1:]) == pytest.approx(abs(saved), rel=6e-2)  # two digits
    assert words[0] == ("−" if saved > 0 else "+")


def test_back_undoes_and_the_address_restores(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    first = number(page, "step")
    pick(page, "ZeRO stage", "3")
    shows(page, "ZeRO-3")
    second, address = number(page, "step"), page.url
    page.go_back()
    shows(page, "ZeRO-1")
    assert number(page, "step") == first != second
    other = open_page(address)
    shows(other, "ZeRO-3")
    assert number(other, "step") == second


def test_a_slider_moves_the_plan_with_it(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    until(page, "document.querySelector('.size input[type=range]').max > 3")
    slider = page.get_by_role("slider", name="GPUs")
    slider.focus()
    page.keyboard.press("ArrowRight")
    until(page, "location.hash.includes('16')")
    shows(page, "on 16 ")
    expected = mw.estimate("tiny", "dgx-h100", gpus=16, batch=64, seq=1024, stack="megatron-core",
                           plan={"tp": 2, "pp": 2, "shard": 4, "zero": 1}).prediction  # fmt: skip
    assert milliseconds(number(page, "step")) == pytest.approx(1e3 * expected.step_time_s, rel=5e-3)
    page.keyboard.press("ArrowLeft")
    shows(page, "on 8 ")
    assert milliseconds(number(page, "step")) == pytest.approx(1e3 * small().prediction.step_time_s, rel=5e-3)


def test_an_illegal_choice_is_disabled_with_its_reason(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    gathers = page.get_by_role("combobox", name="Gathers", include_hidden=True)
    until(page, "document.querySelectorAll('option[disabled]').length > 0")
    assert gathers.locator("option[disabled]").count() == 1
    assert "fp8" in (gathers.locator("option[disabled]").get_attribute("title") or "")
    assert page.locator(".why li", has_text="plan.gather_dtype=fp8").count() == 1


def test_an_illegal_state_says_why_and_offers_the_nearest_legal_plan(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL.replace('"tp": 2', '"tp": 3'), ready="#verdict .error")
    assert "MW-PLAN" in page.locator("#verdict").inner_text()
    page.get_by_role("button", name="nearest legal").click()
    page.wait_for_selector("#verdict .numbers")
    settled(page)


def test_a_second_plan_stays_in_every_view(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL + "&view=memory")
    page.get_by_role("button", name="Compare with mine").click()
    pick(page, "ZeRO stage", "3")
    until(page, "document.querySelector('#view').textContent.includes('2 · stage 0')")
    assert " · " in number(page, "step")
    page.get_by_role("button", name="Stop comparing").click()
    until(page, "!document.querySelector('#view').textContent.includes('2 · stage 0')")


def test_find_the_best_puts_the_winner_into_the_plan(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    page.get_by_role("button", name="Find the best").click()
    until(page, "location.hash.includes('view=leaders')")
    settled(page)
    best = mw.plan("tiny", "dgx-h100", gpus=8, batch=64, seq=1024, stack="megatron-core")
    until(page, "document.querySelector('#view tbody tr.chosen') !== null")
    assert best.plan.title() in page.locator("#view tbody tr").first.inner_text()


def test_a_model_name_is_text_and_never_markup(server: str, open_page: Open) -> None:
    name = "</script><img src=x onerror=alert(1)>"
    model = {"name": name, "layers": 4, "hidden": 256, "heads": 8, "ffn": 512, "vocab": 1000}
    page = open_page(
        server
        + "/"
        + SMALL.replace("model=tiny", "model=" + str(model).replace("'", '"').replace("<", "%3C").replace("=", "%3D"))
    )
    assert name in page.locator("#subject").inner_text()
    assert page.locator("img").count() == 0


def test_the_keyboard_reaches_inputs_views_and_figures(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "view"
    page.get_by_role("combobox", name="Model, from the catalog").focus()
    page.keyboard.type("nano")
    page.keyboard.press("Enter")
    shows(page, "nano")
    page.get_by_role("link", name="Memory").focus()
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#title').textContent === 'Memory per GPU'")
    settled(page)
    page.locator("#view .stat.has-tip").first.focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert "peak" in page.locator("#tip").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_the_first_load_is_small_and_asks_for_nothing_twice(server: str, open_page: Open) -> None:
    page = open_page("about:blank", ready="", uncached=True)
    finished: list[Any] = []
    page.on("requestfinished", lambda request: finished.append(request))
    page.goto(server + "/" + SMALL)
    page.wait_for_selector(READY)
    settled(page)
    asked = [request.url for request in finished if request.method == "GET"]
    assert len(asked) == len(set(asked)), asked
    assert sum(request.sizes()["responseBodySize"] for request in finished) < 300_000
