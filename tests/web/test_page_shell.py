"""The frame of the page in a real browser: views appear, inputs change numbers to those of the Python API, the address restores a state."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

import meshwright as mw
from meshwright.describe.config import Config
from meshwright.predict.estimate import estimate
from meshwright.view.page import published
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
    chip = page.get_by_role("group", name="ZeRO stage").locator('label:has(input[value="3"]) small').first
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


def test_a_size_moves_the_plan_with_it(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    pick(page, "GPUs", "16")
    until(page, "location.hash.includes('16')")
    shows(page, "on 16 ")
    expected = mw.estimate("tiny", "dgx-h100", gpus=16, batch=64, seq=1024, stack="megatron-core",
                           plan={"tp": 2, "pp": 2, "shard": 4, "zero": 1}).prediction  # fmt: skip
    assert milliseconds(number(page, "step")) == pytest.approx(1e3 * expected.step_time_s, rel=5e-3)


def test_the_last_input_wins(server: str, open_page: Open) -> None:
    """Two numbers within 150 ms, and the answer to the first comes last: the field and the state have the second."""
    page = open_page(server + "/" + SMALL, refused=True)
    page.wait_for_load_state("networkidle")
    held: list[Any] = []

    def hold_first(route: Any) -> None:
        if '"gpus":1000000' in (route.request.post_data or "") and not held:
            held.append(route)
        else:
            route.continue_()

    page.route("**/api/mend", hold_first)
    field = page.get_by_role("spinbutton", name="GPUs, exact")
    field.fill("1000000")
    field.press("Enter")
    field.fill("24")
    field.press("Enter")
    shows(page, "on 24 ")
    page.wait_for_load_state("networkidle")
    address = page.url
    with page.expect_response(lambda answer: answer.request == held[0].request):
        held[0].continue_()
    page.wait_for_timeout(200)
    assert page.url == address
    assert page.locator("#inputs .notice.error").count() == 0
    assert '"gpus":24' in page.evaluate("import('meshwright/state.js').then((s) => JSON.stringify(s.config()))")
    assert field.input_value() == "24"
    assert field.get_attribute("aria-invalid") != "true"


def test_an_impossible_number_is_marked_at_its_field(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL, refused=True)
    page.wait_for_load_state("networkidle")
    field, before = page.get_by_role("spinbutton", name="GPUs, exact"), page.url
    for wrong, why in (("-3", "whole number"), ("1000000", "No other values of the plan")):
        field.fill(wrong)
        field.press("Enter")
        page.locator("fieldset p.why", has_text=why).wait_for()
        assert field.get_attribute("aria-invalid") == "true"
        assert page.url == before


def test_a_name_that_the_catalog_does_not_have_is_marked(server: str, open_page: Open) -> None:
    page = open_page(server)
    model = page.get_by_label("Model", exact=True).first
    model.fill("nosuch")
    model.press("Enter")
    shows(page, "No name in the catalog has these words", ".knobs")
    model.fill("mixtral 8x7b")
    model.press("Enter")
    shows(page, "mixtral-8x7b")
    until(page, "!document.querySelector('.knobs').innerText.includes('No name')")


def test_an_illegal_value_says_why(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    gathers = page.get_by_role("combobox", name="Gathers", include_hidden=True)
    until(page, "document.querySelectorAll('option[disabled]').length > 0")
    assert "plan.gather_dtype=fp8" in (gathers.locator("option[disabled]").text_content() or "")
    chip = page.get_by_role("group", name="Precision").get_by_role("radio", name="fp4", exact=True)
    assert chip.get_attribute("aria-disabled") == "true"
    chip.click(force=True)
    page.locator("fieldset p.why", has_text="fp4").wait_for()
    assert page.get_by_role("group", name="Precision").get_by_role("radio", name="bf16", exact=True).is_checked()


def test_an_illegal_state_says_why_and_offers_the_nearest_legal_plan(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL.replace('"tp": 2', '"tp": 3'), ready="#verdict .error")
    assert "MW-PLAN" in page.locator("#verdict").inner_text()
    page.get_by_role("button", name="nearest legal").click()
    page.wait_for_selector("#verdict .numbers")
    settled(page)


def edited(page: Any, edit: Callable[[list[Any]], list[Any]]) -> None:
    """Let the page get edited answers of its views."""

    def answer(route: Any) -> None:
        found = route.fetch()
        lines = edit([json.loads(line) for line in found.text().splitlines()])
        route.fulfill(response=found, body="".join(f"{json.dumps(line)}\n" for line in lines))

    page.route("**/api/views", answer)


def check_old_advice_cannot_be_applied(page: Any) -> None:
    """After a change the advice of the plan before is dimmed, and its buttons do nothing, until the new advice is there."""
    edited(page, lambda lines: [line for line in lines if line["view"] != "advice"])
    pick(page, "Tensor parallel, tp", "2")
    shows(page, "tp 2")
    address, button = page.url, page.get_by_role("button", name="Apply").first
    assert page.locator(".outdated .advice").count() == 1
    assert button.is_disabled()
    button.click(force=True)
    assert page.url == address
    page.unroute("**/api/views")
    page.go_back()
    until(page, "!document.querySelector('.outdated')")
    settled(page)
    assert button.is_enabled()


def test_advice_that_fails_says_why_until_it_is_computed(server: str, open_page: Open) -> None:
    error = {"code": "MW-WEB-002", "what": "too many requests wait", "why": "", "valid": [], "fix": ""}

    def fail(line: Any) -> Any:
        return {**line, "data": None, "error": error} if line["view"] == "advice" else line

    page = open_page("about:blank", ready="")
    edited(page, lambda lines: [fail(line) for line in lines])
    page.goto(server + "/" + SMALL)
    box = page.locator("#view .panel", has_text="What to change first")
    box.locator(".notice.error", has_text="too many requests wait").wait_for()
    settled(page)
    assert "Computing" not in box.inner_text()
    page.unroute("**/api/views")
    page.evaluate("import('meshwright/state.js').then((s) => s.set('workload.batch', 128))")
    box.locator(".advice li, p:not(.empty)").first.wait_for()
    settled(page)
    assert box.locator(".notice").count() == 0


def test_a_view_that_cannot_be_drawn_says_so_once(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    page.evaluate("console.error = () => {}")
    edited(
        page, lambda lines: [{**line, "data": {"stages": 1}} if line["view"] == "memory" else line for line in lines]
    )
    page.evaluate("import('meshwright/state.js').then((s) => s.set('workload.batch', 128))")
    page.locator("#view .notice.error").first.wait_for()
    page.evaluate("for (let i = 0; i < 3; i++) document.dispatchEvent(new CustomEvent('meshwright:theme'))")
    shows(page, "reload the page", "#view .notice.error")
    page.wait_for_timeout(300)
    assert page.locator("#view .notice.error").count() == 1


@pytest.mark.daily
def test_the_workspace_plan(server: str, open_page: Open) -> None:
    """Chips have effects, a change is applied with what follows, scenarios are compared and restored from the address."""
    page = open_page(server + "/" + SMALL)
    chip = page.get_by_role("group", name="Tensor parallel, tp").locator('label:has(input[value="4"])')
    chip.locator("small").first.wait_for()
    follows = chip.locator("input").get_attribute("aria-description")
    assert "with shard = 1" in follows
    page.get_by_role("button", name="Pin as scenario").click()
    pick(page, "Tensor parallel, tp", "4")
    shows(page, "tp 4")
    settled(page)
    other = small(tp=4, shard=1).prediction
    assert milliseconds(number(page, "step")) == pytest.approx(1e3 * other.step_time_s, rel=5e-3)
    marked = page.locator("#scenarios tr", has_text="plan.tp").locator("mark")
    marked.wait_for()
    assert marked.inner_text() == "2"
    assert page.locator("#scenarios svg [data-scenario]").count() == 4  # two scenarios in two charts
    again = open_page(page.url)
    assert again.locator("#scenarios tr", has_text="plan.tp").locator("mark").inner_text() == "2"
    assert page.locator("#view[data-view=overview] .advice li").count() > 0
    check_old_advice_cannot_be_applied(page)
    moe = open_page(server + "/" + SMALL.replace("tiny", "tiny-moe", 1).replace("view=overview", "") + "&view=experts")
    settled(moe)
    table = moe.get_by_role("region", name="Step, memory and dropped copies by imbalance")
    assert table.locator("tbody tr").count() == 5
    table.get_by_role("button", name="Use imbalance 2").click()
    until(moe, "location.hash.includes('workload.imbalance=2')")


def test_scenarios_are_opened_renamed_and_at_most_eight(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    page.evaluate("""async () => {
      const state = await import("meshwright/state.js"), { pin } = await import("meshwright/scenarios.js");
      for (let k = 0; k < 9; k++) { state.set("workload.batch", 64 * (k + 1)); pin(); }
    }""")
    page.locator("#toast", has_text="At most 8").wait_for()
    assert page.url.count("pin=") == 8
    page.get_by_role("textbox", name="Name of scenario 1", exact=True).fill("base & <b>")
    page.keyboard.press("Enter")
    until(page, "location.hash.includes('base')")
    other = open_page(page.url)
    name = other.get_by_role("textbox", name="Name of scenario 1", exact=True)
    assert name.input_value() == "base & <b>"
    other.get_by_role("button", name="open", exact=True).first.click()
    until(other, "location.hash.includes('workload.batch=64')")
    labels = other.locator("#scenarios svg").first.locator(".axis text").all_text_contents()
    assert len({label for label in labels if "…" in label}) == 7  # scenarios of one model have different labels


def test_a_scenario_that_the_server_could_not_compute_is_asked_for_again(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)

    def busy(route: Any, every: bool = False) -> None:
        asked = route.request.post_data_json["views"]
        if asked != ["verdict", "memory", "waterfall"] and not every:
            return route.continue_()
        error = {"code": "MW-WEB-002", "what": "too many requests wait", "why": "", "valid": [], "fix": ""}
        lines = [json.dumps({"view": view, "data": None, "final": True, "error": error}) for view in asked]
        return route.fulfill(status=200, body="\n".join(lines) + "\n")

    page.route("**/api/views", busy)
    page.locator("#pin").click()
    page.locator("#scenarios", has_text="too many requests wait").wait_for()
    page.unroute("**/api/views")
    page.locator("#theme").click()  # draws everything anew
    page.locator("#scenarios svg.figure [data-scenario]").first.wait_for(state="attached", timeout=8000)
    page.route("**/api/views", lambda route: busy(route, every=True))
    page.evaluate("import('meshwright/state.js').then((s) => s.set('workload.batch', 128))")
    page.locator("#verdict", has_text="No answer. MW-WEB-002").wait_for(timeout=8000)  # not: an illegal plan


def test_find_the_best_puts_the_winner_into_the_plan(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    page.get_by_role("button", name="Find the best").click()
    until(page, "location.hash.includes('view=leaders')")
    settled(page)
    best = mw.plan("tiny", "dgx-h100", gpus=8, batch=64, seq=1024, stack="megatron-core")
    until(page, "document.querySelector('#view tbody tr.chosen') !== null")
    assert best.plan.title() in page.locator("#view tbody tr").first.inner_text()


def test_a_preset_leaves_nothing_of_what_the_page_showed_before(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL + "&adapter.rank=16")
    page.get_by_label("Start from").select_option(label="Mixtral 8x7B on 128: mixtral-8x7b")
    shows(page, "on 128 × h100")
    state = page.evaluate("import('meshwright/state.js').then((m) => m.config())")
    run = next(run for run in published.all_runs() if run.case.row_id == "mixtral-8x7b")
    assert run.prediction
    assert estimate(Config.from_document(state)).prediction.step_time_s == pytest.approx(
        run.prediction.step_time_s, rel=1e-4
    )


def test_a_value_that_the_framework_does_not_run_says_so(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    page.locator("option", has_text="zb-h1").filter(has_text="not run by Megatron-Core").wait_for(state="attached")
    chip = page.get_by_role("group", name="ZeRO stage").get_by_role("radio", name="3", exact=True)
    assert "Megatron-Core does not run it" in chip.get_attribute("aria-description")


def test_a_box_without_a_reason_shows_none(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL)
    page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    page.get_by_role("group", name="Overlap with compute").wait_for()
    assert page.locator(".chips .why").filter(visible=True).count() == 0


def test_an_address_with_values_of_other_types_is_drawn(server: str, open_page: Open) -> None:
    page = open_page(server + "/#view=runs&options.runs.shown=3")
    page.get_by_text("runs in", exact=False).first.wait_for()
    page = open_page(server + "/" + SMALL + "&plan.overlap=5", refused=True)
    shows(page, "plan.overlap = 5 is not valid", "#verdict")


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
    page.get_by_role("combobox", name="Model", exact=True).focus()
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


def test_a_model_of_your_own_has_its_fields_and_its_name(server: str, open_page: Open) -> None:
    page = open_page(server + "/" + SMALL, refused=True)
    page.wait_for_load_state("networkidle")
    page.get_by_text("All settings").click()
    page.get_by_text("Own shape").click()
    layers = page.get_by_label("Layers", exact=True)
    before = int(layers.input_value())
    layers.fill(str(2 * before))
    layers.press("Enter")
    shows(page, "own tiny")
    assert page.get_by_role("combobox", name="Model", exact=True).input_value() == "own tiny"
    page.get_by_label("Name", exact=True).first.fill("twice")
    page.keyboard.press("Enter")
    shows(page, "twice")
    heads = page.get_by_label("Attention heads", exact=True)
    heads.fill("7")
    heads.press("Enter")
    page.locator("p.why", has_text="7").first.wait_for()
    assert heads.get_attribute("aria-invalid") == "true"
    assert "model.heads" not in page.url


def test_adapters_are_a_knob_of_the_page(server: str, open_page: Open) -> None:
    """A rank, then all matrices and a quantised base; no rank takes the whole section away."""
    page = open_page(
        server + "/#model=llama3-8b&adapter.rank=8&adapter.targets=q_proj"
    )  # one name, as a file may have it
    page.get_by_text("All settings").click()
    pick(page, "Rank of adapters (LoRA)", "16")
    page.get_by_text("adapters of rank 16").wait_for()
    page.get_by_label("Adapted matrices").select_option("all-linear")
    page.wait_for_url(re.compile("all-linear"))
    pick(page, "Frozen base", "nf4")
    page.wait_for_url(re.compile(r"adapter\.rank=16.*adapter\.base=nf4|adapter\.base=nf4.*adapter\.rank=16"))
    pick(page, "Rank of adapters (LoRA)", "none")
    page.get_by_text("all parameters train").wait_for()
    page.wait_for_url(lambda url: "adapter" not in url)
