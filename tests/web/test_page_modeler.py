"""The modeler: the published tool's numbers stand next to the corrected ones; and sums of other views."""

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.describe.config import load
from meshwright.view.page import memory, modeler, overlap, waterfall
from meshwright.view.page.subject import Subject
from web.browser import shows

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(load("examples/llama3-70b-64xh100.toml"))


def test_the_modeler_has_the_published_numbers_and_the_corrected_ones(subject: Subject) -> None:
    found = {row["name"]: row for row in modeler.data(subject)["rows"]}
    assert found["Pipeline efficiency"]["ours"] == pytest.approx(8 / 11)
    assert found["Compute per step"]["ours"] == pytest.approx(81.92e-3)
    speed, memory_row = found["Inter-stage speed needed"], found["Peak activations of a stage"]
    assert (speed["tool"] / 1e9, speed["ours"] / 1e9) == (
        pytest.approx(97.66, abs=5e-3),
        pytest.approx(104.86, abs=5e-3),
    )
    assert (memory_row["tool"], memory_row["ours"]) == (512 * 2**20, 256 * 2**20)
    advice = modeler.data(subject)["advice"]
    assert advice["low"]
    assert advice["tool"] == {"microbatches": 16, "stages": 3}
    assert advice["ours"] == {"microbatches": 12, "stages": 3}


def test_parts_sum_to_the_step_and_to_the_peak(subject: Subject) -> None:
    step, room = waterfall.data(subject), memory.data(subject)
    *bars, whole = step["bars"]["rows"]
    assert sum(bar["parts"][0]["value"] for bar in bars) == pytest.approx(subject.estimate.prediction.step_time_s)
    assert bars[-1]["start"] + bars[-1]["parts"][0]["value"] == pytest.approx(whole["parts"][0]["value"])
    for stage in room["stages"]:
        assert sum(p["gib"] for p in stage["parts"]) == pytest.approx(stage["total_gib"])
    (curves,) = [part for part in room["parts"] if part["kind"] == "curves"]
    assert max(y for _, y in curves["series"][1]["points"]) == pytest.approx(
        room["stages"][room["fullest"]]["total_gib"]
    )
    ways, axes = [part["rows"] for part in overlap.data(subject)["parts"] if part["kind"] == "bars"]
    longest = {row["label"]: sum(piece["value"] for piece in row["parts"]) for row in ways}
    assert longest["no overlap"] >= longest["this plan"] >= longest["double buffering"]
    assert [len(row["parts"]) for row in axes] == [2] * len(axes)


def test_the_modeler_shows_both_values_and_applies_its_advice(server: str, open_page: Open) -> None:
    page = open_page(server + "/#view=modeler")
    shows(page, "104.86 Gb/s", "#view table")
    shows(page, "97.66 Gb/s", "#view table")
    page.get_by_role("button", name="12 micro-batches").click()
    shows(page, "80.0%", "#view table")
    assert "modeler.microbatches" in page.url or "microbatches" in page.url


def test_the_modeler_takes_own_numbers(server: str, open_page: Open) -> None:
    """A hidden size that is no power of two, tensor parallelism, and bytes of one's own; a size of zero is refused at the field."""
    page = open_page(server + "/#view=modeler")
    hidden = page.locator("#view").get_by_label("Hidden size")
    hidden.fill("12288")
    hidden.press("Enter")
    shows(page, "96 MiB", "#view table")
    hidden.fill("0")
    hidden.press("Enter")
    assert "from 1 to" in hidden.evaluate("field => field.validationMessage")
    shows(page, "96 MiB", "#view table")
    size = page.get_by_label("Bytes reduced in chunks, MB")
    size.fill("2000")
    size.press("Enter")
    shows(page, "52 chunks", "#view")  # √(2 · 2 GB / 300 GB/s / 5 µs)
    page.get_by_label("Precision").select_option(label="fp8")
    shows(page, "48 MiB", "#view table")
