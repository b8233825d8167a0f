"""The page of figures: it is what the code says, every verdict follows from its numbers, and known ones come out by hand."""

from pathlib import Path

import pytest

from figures import Figure, figures, markdown
from figures.__main__ import main
from figures.figure import half_unit, number

PAGE = Path(__file__).parents[2] / "docs" / "figures.md"
EVERY = figures()


def test_the_page_is_what_the_code_says():
    """After a change: make pages"""
    assert PAGE.read_text(encoding="utf-8") == markdown()


def test_every_verdict_follows_from_its_numbers():
    assert [f"{f.seed} {f.place} {f.claim}: {f.claimed}, ours {f.ours}" for f in EVERY if not f.follows] == []


def test_all_five_texts_are_checked():
    counted = {seed: sum(f.seed == seed for f in EVERY) for seed in ("000", "001", "002", "003", "004")}
    assert all(n >= 15 for n in counted.values())
    assert sum(counted.values()) == len(EVERY) > 300
    assert len({(f.seed, f.place, f.claim) for f in EVERY}) == len(EVERY)
    assert all(f.error == pytest.approx(0, abs=0.35) for f in EVERY if f.verdict == "holds")


# By hand, from the suspects: (text, words of the claim) → what is right.
KNOWN = {
    ("000", "8000×"): 9139, ("000", "10,000× growth"): 15_385, ("000", "1979 TFLOPS"): 989.4, ("000", "n* = 450.0 KB"): 439.5,
    ("000", "n* = 62.5 KB"): 61.04, ("000", "~40,000"): 19_788, ("000", "ZeRO-1: 42 GB"): 38.5, ("000", "ZeRO-2: 30 GB"): 26.25,
    ("000", "ZeRO-3: 18 GB"): 14, ("000", "DDP: 140 GB"): 112, ("000", "limit ~10B"): 5, ("000", "~175 MB per layer"): 352.3,
    ("000", "~16.8 GB"): 33.82, ("000", "active 2/P"): 25, ("000", "≈ 44 GB"): 5.456, ("000", "top-1%: 100×"): 33.33,
    ("000", "all-gathered: 100×"): 8.333, ("000", "≈ 275 GB"): 275.4, ("000", "~7B each"): 5.637, ("001", "20 GB per GPU"): 17.5,
    ("001", "3.5× improvement"): 4, ("001", "500+ GB"): 2800, ("002", "4.3 GB without"): 73.1, ("002", "97% saved"): 91,
    ("003", "3.9 TB/s"): 3.35, ("004", "97.66"): 104.86, ("004", "512 MB"): 256, ("004", "~4 MB"): 856, ("004", "38%"): 15.4,
    ("004", "31/32"): 9.375, ("004", "= 0.67 µs"): 671, ("004", "chunks 16"): 26, ("004", "32 MB"): 64, ("004", "1M, N = 8"): 4,
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), KNOWN, ids=str)
def test_known_figures(text, words):
    found = [f for f in EVERY if f.seed == text and words in f.claim]
    assert len(found) == 1
    assert found[0].ours == pytest.approx(KNOWN[text, words], rel=2e-3)


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
def test_rounding_is_read_off_the_digits(printed, half):
    assert half_unit(printed) == pytest.approx(half)


@pytest.mark.parametrize(
    ("claimed", "ours", "verdict"),
    [
        ("42", 42.49, "holds"),
        ("42", 42.51, "wrong"),
        ("42", 41.49, "wrong"),
        ("50–200", 49.6, "holds"),
        ("50–200", 206, "wrong"),
        ("2,000+", 1e9, "holds"),
        ("2,000+", 1949, "wrong"),
        ("<1", 0.9, "holds"),
        ("<1", 1.0, "wrong"),
        (100.0, 100.4, "holds"),
        (100.0, 100.6, "wrong"),
        ("0", 1, "wrong"),
    ],
)
def test_rule_of_the_verdict(claimed, ours, verdict):
    told = {v: Figure("000", "1", "x", claimed, ours, "", v).follows for v in ("holds", "wrong")}
    assert told[verdict]
    assert not told[{"holds": "wrong", "wrong": "holds"}[verdict]]


def test_numbers_read_well():
    shown = [number(x) for x in (9138.9, 0.20833, 38.5, 3.0e15, 0, 19788.0, 1.75e-4)]
    assert shown == ["9,139", "0.2083", "38.5", "3e+15", "0", "19,788", "0.000175"]


def test_command_prints_and_writes(tmp_path, capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == markdown()
    assert main(["--write", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == markdown()
    assert main(["--nonsense"]) == 2
