"""The page of figures: it equals the code's output, every verdict follows from its numbers, and known values match a hand calculation."""

from pathlib import Path

import pytest

from figures import Figure, figures, markdown
from figures.figure import half_unit, number, rows
from figures.page import TEXTS, counts

PAGE = Path(__file__).parents[2] / "docs" / "figures.md"


def test_the_page_equals_the_generated_one():
    """After a change: make pages"""
    assert PAGE.read_text(encoding="utf-8") == markdown()


def test_every_verdict_follows_from_its_numbers():
    assert [f"{f.text} {f.place} {f.claim}: {f.expected}" for f in figures() if f.verdict != f.expected] == []


def test_every_convention_is_named_and_every_wrong_figure_has_a_reason():
    assert all(bool(f.convention) == (f.verdict == "convention") == (f.by_convention is not None) for f in figures())
    assert [f.claim for f in figures() if f.verdict == "wrong" and not f.remark] == []


def test_all_five_texts_are_checked():
    counted = {text: sum(f.text == text for f in figures()) for text in TEXTS}
    assert all(n >= 15 for n in counted.values())
    assert sum(counted.values()) == len(figures()) > 300
    assert len({(f.text, f.place, f.claim) for f in figures()}) == len(figures())
    assert all(f.error == pytest.approx(0, abs=0.35) for f in figures() if f.verdict in ("holds", "bound"))


# Computed by hand: (text, words of the claim) → the right value.
KNOWN = {
    ("guide", "8000×"): 9139, ("guide", "10,000× growth"): 15_385, ("guide", "1979 TFLOPS"): 989.4, ("guide", "n* = 450.0 KB"): 439.5,
    ("guide", "n* = 62.5 KB"): 61.04, ("guide", "~40,000"): 19_788, ("guide", "ZeRO-1: 42 GB"): 38.5, ("guide", "ZeRO-2: 30 GB"): 26.25,
    ("guide", "ZeRO-3: 18 GB"): 14, ("guide", "DDP: 140 GB"): 112, ("guide", "limit ~10B"): 5, ("guide", "~175 MB per layer"): 352.3,
    ("guide", "~16.8 GB"): 33.82, ("guide", "active 2/P"): 25, ("guide", "≈ 44 GB"): 5.456, ("guide", "top-1%: 100×"): 33.33, ("guide", "n* = 300.0"): 37.5,
    ("guide", "much smaller"): 8.333, ("guide", "≈ 275 GB"): 275.4, ("guide", "~7B each"): 5.637, ("basics", "20 GB per GPU"): 17.5,
    ("basics", "3.5× improvement"): 4, ("basics", "500+ GB"): 2800, ("at-scale", "4.3 GB without"): 73.1, ("at-scale", "97% saved"): 91,
    ("lecture", "3.9 TB/s"): 3.35, ("modeler", "97.66"): 104.86, ("modeler", "512 MB"): 256, ("modeler", "~4 MB"): 856, ("modeler", "38%"): 15.4,
    ("modeler", "31/32"): 9.375, ("modeler", "= 0.67 µs"): 671, ("modeler", "chunks 16"): 26, ("modeler", "32 MB"): 64, ("modeler", "1M, N = 8"): 4,
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), KNOWN, ids=str)
def test_known_figures(text, words):
    found = [f for f in figures() if f.text == text and words in f.claim]
    assert len(found) == 1
    assert found[0].ours == pytest.approx(KNOWN[text, words], rel=2e-3)


# Figures that quote a source correctly, hold as a bound, or use a convention that the text states.
RECHECKED = {
    ("guide", "GPT-2 1.5B"): "convention", ("guide", "LLaMA-65B: 65.2B"): "convention", ("guide", "1979 TFLOPS"): "convention",
    ("guide", "all-to-all has the worst latency"): "holds", ("guide", "312 TFLOPS / 900 GB/s"): "holds", ("guide", "4096 GPUs"): "convention",
    ("basics", "500+ GB"): "bound", ("basics", "20 GB per GPU"): "convention", ("at-scale", "than the naive pipeline"): "bound",
    ("modeler", "over 1.2 TB"): "bound", ("modeler", "97.66"): "convention", ("modeler", "= 0.67 µs"): "wrong",
    ("basics", "18× slower"): "wrong", ("guide", "scatter: log₂P"): "wrong",
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), RECHECKED, ids=str)
def test_verdicts_of_bounds_and_conventions(text, words):
    found = {f.verdict for f in figures() if f.text == text and words in f.claim}
    assert found == {RECHECKED[text, words]}


@pytest.mark.parametrize(
    ("printed", "half"),
    [
        ("8.6", 0.05),
        ("2.22", 0.005),
        ("42", 0.5),
        ("7", 0.5),
        ("20", 0.5),
        ("400", 5),
        ("8000", 50),
        ("2,200", 50),
        ("2,496", 0.5),
        ("200,000", 5000),
        ("1.0000", 0.00005),
        ("105", 0.5),
    ],
)
def test_rounding_follows_the_printed_digits(printed, half):
    assert half_unit(printed) == pytest.approx(half)


@pytest.mark.parametrize(
    ("claimed", "ours", "verdict"),
    [
        ("42", 42.49, "holds"),
        ("42", 42.51, "wrong"),
        ("42", 41.49, "wrong"),
        ("50–200", 49.6, "holds"),
        ("50–200", 206, "wrong"),
        ("2,000+", 1e9, "bound"),
        ("2,000+", 1949, "wrong"),
        ("<1", 0.9, "bound"),
        ("<1", 1.0, "wrong"),
        (100.0, 100.4, "holds"),
        (100.0, 100.6, "wrong"),
        ("0", 1, "wrong"),
    ],
)
def test_verdict_rules(claimed, ours, verdict):
    assert Figure("guide", "1", "x", claimed, ours, "", "holds").expected == verdict


def test_a_convention_needs_its_value_inside_and_ours_outside():
    _, _, convention, _ = rows("guide")
    case = ("1", "x", "20")
    assert convention(*case, 17.5, "GB", "2 for 2(P−1)/P", 20).expected == "convention"
    assert convention(*case, 17.5, "GB", "2 for 2(P−1)/P", 21).expected == "wrong"
    assert convention(*case, 20, "GB", "2 for 2(P−1)/P", 20).expected == "holds"


def test_the_page_names_the_texts_and_counts_the_verdicts():
    page = markdown()
    assert all(f"## {title}\n" in page for title, _ in TEXTS.values())
    assert "seed" not in page
    assert counts(figures()) in page
    assert "| holds by another convention | 20: ~2D, as the sentence before says; 2(N−1)/N · D |" in page


def test_number_format():
    shown = [number(x) for x in (9138.9, 0.20833, 38.5, 3.0e15, 0, 19788.0, 1.75e-4)]
    assert shown == ["9,139", "0.2083", "38.5", "3e+15", "0", "19,788", "0.000175"]
