"""The course: every chapter has what it needs, its command and its Python call give the same number, and its figures follow their controls."""

import html
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import blocks
from course_notebooks import last_value
from meshwright.describe.config import load
from meshwright.errors import MeshwrightError
from meshwright.units import Json
from meshwright.view.page import learn
from meshwright.view.page.course.markdown import inline
from meshwright.view.page.subject import Subject
from web.browser import fragment, shows, until

Open = Callable[..., Any]
PICTURES = blocks.ROOT / "docs" / "pictures" / "course"


@cache
def subject() -> Subject:
    return Subject(load(str(blocks.ROOT / "examples" / "llama3-70b-64xh100.toml")))


def figure(name: str, **values: Any) -> Json:
    found: Json = learn.data(subject().with_options({"figure": name, "values": values}))["figure"]
    return found


def of(chapter: str, kind: str) -> list[Json]:
    return [block for block in learn.chapter(chapter)["blocks"] if block["kind"] == kind]


@pytest.mark.parametrize("key", learn.CHAPTERS)
def test_a_chapter_has_prose_a_figure_a_question_and_a_number(key: str) -> None:
    assert len(of(key, "text")) >= 5
    assert [block["name"] for block in of(key, "figure")]
    (question,) = of(key, "question")
    assert question["ask"]
    assert len(question["options"]) >= 3
    assert sum(option["right"] for option in question["options"]) == 1
    assert all(len(" ".join(map(str, option["why"]))) > 30 for option in question["options"])
    (number,) = of(key, "number")
    assert number["text"]
    assert number["commands"]
    assert number["python"]


def texts(value: Any) -> Iterator[str]:
    """All words of a block."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("commands", "python", "name", "path"):
                yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)


@pytest.mark.parametrize("key", learn.CHAPTERS)
def test_prose_has_no_options_of_commands_and_no_marks(key: str) -> None:
    for block in learn.chapter(key)["blocks"]:
        for words in texts({k: v for k, v in block.items() if k != "kind"}):
            assert not re.search(r"(^|\s)--\w|`|\*\*|</?\w+>|\]\(", words), words


def test_every_figure_is_in_a_chapter_and_has_a_picture_for_the_site() -> None:
    named = [block["name"] for key in learn.CHAPTERS for block in of(key, "figure")]
    assert sorted(named) == sorted(learn.FIGURES)
    assert sorted(file.stem for file in PICTURES.glob("*.svg")) == sorted(named)


def test_the_chapters_are_the_pages_of_the_site() -> None:
    pages = {file.stem for file in (blocks.ROOT / "docs" / "concepts").glob("*.md")} - {"index"}
    assert pages == set(learn.CHAPTERS)
    site = (blocks.ROOT / "mkdocs.yml").read_text("utf-8")
    assert re.findall(r"concepts/([\w-]+)\.md", site) == ["index", *learn.CHAPTERS]


SEARCHES = ("goodput", "scaling-laws", "case-studies")  # their commands plan


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.slow if key in SEARCHES else ()) for key in learn.CHAPTERS]
)
def test_the_command_and_the_call_give_the_same_number(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(blocks.ROOT)
    (block,) = of(key, "number")
    found: Any = json.loads("\n".join(blocks.printed(f"{block['commands'][-1]} --json")))
    for step in block["path"].split("."):
        found = found[int(step) if isinstance(found, list) else step]
    assert math.isclose(found, last_value(block["python"]), rel_tol=1e-9)
    assert math.isclose(found, block["number"], rel_tol=1e-9), f"{found}: make pages"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "sizes" else ()) for name in learn.FIGURES]
)
def test_a_figure_follows_its_controls(name: str) -> None:
    """At the first and the last value of each control the data are finite, and some of them differ."""
    start = figure(name)
    json.dumps(start, allow_nan=False)
    for control in start["controls"]:
        ends = [
            figure(name, **{control["name"]: v})
            for v in (control["values"] or [control["value"]])[:: max(1, len(control["values"]) - 1)]
        ]
        assert len({json.dumps(end, allow_nan=False) for end in ends}) == len(ends), control["name"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h2", "zbv"])
def test_memory_beside_the_pipeline_rises_to_the_peak(schedule: str) -> None:
    data = figure("pipeline", schedule=schedule)["data"]
    assert [max(level for _, level in held) for held in data["held"]] == data["peak"]
    assert all(held[-1][1] == 0 for held in data["held"])


def test_experts_share_all_copies() -> None:
    """No expert takes more copies than there are tokens, and together they take all."""
    for top, skew in ((1, 1.2), (2, 1.2), (4, 0.8)):
        rows = figure("experts", top=top, skew=skew)["data"]["rows"]
        copies = [sum(part["value"] for part in row["parts"]) for row in rows]
        assert sum(copies) == pytest.approx(4096 * top)
        assert max(copies) <= 4096 * (1 + 1e-9)


def test_values_that_a_control_does_not_have_are_refused() -> None:
    for name, values in (
        ("message", {"size": -1}),
        ("message", {"latency": "1us"}),
        ("player", {"values": "1,2/3,4"}),
        ("player", {"values": "x"}),
    ):
        with pytest.raises(MeshwrightError):
            figure(name, **values)


def test_a_plan_that_is_not_legal_leaves_the_rest_of_the_roofline() -> None:
    config = load(str(blocks.ROOT / "examples" / "llama3-70b-64xh100.toml"), ["plan.tp=7"])
    found: Json = learn.data(Subject(config).with_options({"figure": "link-roofline"}))["figure"]
    assert "7" in found["note"]
    assert len(found["data"]["series"]) == len(figure("link-roofline")["data"]["series"]) - 1


def test_marks_are_read() -> None:
    assert inline("a **b** `c`\n[d](e.md#f) n\\* = *g* 2*3") == [
        "a ", ["bold", "b", ""], " ", ["code", "c", ""], " ", ["link", "d", "e.md#f"], " n* = ", ["italic", "g", ""], " 2*3",
    ]  # fmt: skip


def test_an_installed_package_has_the_chapters() -> None:
    """The folder in the package is that of the site; a wheel gets the files it leads to."""
    folder = Path(learn.__file__).parent / "course" / "chapters"
    assert os.path.realpath(folder) == str(blocks.ROOT / "docs" / "concepts")
    assert "view/page/course/chapters/*.md" in (blocks.ROOT / "pyproject.toml").read_text("utf-8")


def chapter(server: str, key: str) -> str:
    return server + "/" + fragment(view="learn", options__learn__chapter=key)


READY = "article.chapter:not(:has([aria-busy=true])) .drawing > *"


@pytest.mark.daily
def test_a_chapter_plays_answers_and_is_remembered(server: str, open_page: Open) -> None:
    page = open_page(chapter(server, "collectives"), ready=READY)
    player = page.locator("[data-figure=player]")
    player.get_by_role("button", name="Next step").click()
    shows(page, "after step 0 of 6", "[data-figure=player]")
    values = player.get_by_label("Own values")
    values.fill("10,20,30,40")
    values.press("Enter")
    page.locator("[data-figure=player] svg text", has_text="43").first.wait_for()  # 40 + 3 on the last rank
    values.fill("1,2/3,4")
    values.press("Enter")
    shows(page, "MW-PROG-009", "[data-figure=player] [role=alert]")
    wrong = page.get_by_role("radio", name="70 GB")
    wrong.focus()
    page.keyboard.press("Space")
    shows(page, "✗ No.", ".question [role=status]")
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    shows(page, "✓ Right.", ".question [role=status]")
    page.reload()
    shows(page, f"1 of {len(learn.CHAPTERS)} answered", ".contents")
    assert page.get_by_role("radio", name="17.5 GB").is_checked()


def test_progress_lasts_while_storage_is_refused(server: str, open_page: Open) -> None:
    page = open_page("about:blank", ready="")
    page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('refused', 'SecurityError'); } })"
    )
    page.goto(chapter(server, "alpha-beta"))
    page.get_by_role("radio", name="6 µs").check()
    shows(page, f"1 of {len(learn.CHAPTERS)} answered", ".contents")


OVERFLOW = """() => [...document.querySelectorAll("article *, .contents *")].filter((node) => {
  const box = node.getBoundingClientRect();
  return box.width > 0 && box.right > document.documentElement.clientWidth + 1 && !node.closest(".table, pre");
}).map((node) => node.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("key", learn.CHAPTERS)
def test_a_chapter_fits_and_is_accessible(key: str, server: str, open_page: Open) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for dark, phone in ((False, False), (True, True)):
        page = open_page(chapter(server, key), dark=dark, phone=phone, ready=READY)
        assert page.evaluate(OVERFLOW) == []
        found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa"]}).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"][:150]) for one in found] == []
        pictures = page.locator("figure.embedded svg.figure")
        assert pictures.count() >= 1


def test_pictures_of_the_site_are_those_of_the_page(server: str, open_page: Open) -> None:
    """The accessible name of a figure has its main numbers: it is the same in the picture."""
    for key in learn.CHAPTERS:
        page = open_page(chapter(server, key), ready=READY)
        for block in of(key, "figure"):
            name = page.locator(f"[data-figure={block['name']}] .drawing svg[aria-label]").last.get_attribute(
                "aria-label"
            )
            picture = (PICTURES / f"{block['name']}.svg").read_text("utf-8")
            assert f'aria-label="{name}"' in html.unescape(picture), f"make pictures ({block['name']})"


def test_a_configuration_that_cannot_be_read_stops_no_chapter(server: str, open_page: Open) -> None:
    page = open_page(chapter(server, "zero") + "&model=nosuch", ready=READY, refused=True)
    shows(page, "112 GB", "[data-figure=zero]")


def test_a_slider_moves_a_figure(server: str, open_page: Open) -> None:
    page = open_page(chapter(server, "alpha-beta"), ready=READY)
    slider = page.get_by_role("slider", name=re.compile("^Bandwidth"))
    slider.focus()
    page.keyboard.press("ArrowRight")
    shows(page, "900 kB", "[data-figure=message] .stats")
    until(page, "document.activeElement.type === 'range'")


def test_the_keyboard_goes_on_at_the_title_of_the_next_chapter(server: str, open_page: Open) -> None:
    page = open_page(chapter(server, "zero"), ready=READY)
    page.get_by_role("button", name="Tensor parallelism →").press("Enter")
    until(page, "document.activeElement.textContent === 'Tensor parallelism'")


def test_commands_of_chapters_are_written_for_a_shell() -> None:
    for key in learn.CHAPTERS:
        for command in of(key, "number")[0]["commands"]:
            assert shlex.split(command)[0] == "meshwright"


CROSSED = """() => [...document.querySelectorAll("svg.figure")].flatMap((svg) => {
  const dashed = [...svg.querySelectorAll("line[stroke-dasharray]")].map((node) => node.getBoundingClientRect());
  return [...svg.querySelectorAll("text.halo[dy]")].filter((text) => dashed.some((line) => {
    const box = text.getBoundingClientRect();
    return line.left > box.left && line.left < box.right && line.top < box.bottom && line.bottom > box.top;
  })).map((text) => text.textContent);
})"""


def test_no_limit_crosses_the_numbers_of_bars(server: str, open_page: Open) -> None:
    """On a phone the end of a bar is often close to the dashed line of the memory of a GPU."""
    for address, number in ((chapter(server, "recompute"), "65.7 GB"), (server, "61.5 GiB")):
        page = open_page(address, phone=True)
        page.locator("svg.figure text", has_text=number).first.wait_for()
        assert page.evaluate(CROSSED) == []
