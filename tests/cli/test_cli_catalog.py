"""`meshwright catalog`: every kind has a list and every entry a card with its sources."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.describe import catalog
from meshwright.interop.frameworks import FRAMEWORKS


def run(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        main(["catalog", *arguments])
    captured = capsys.readouterr()
    assert leaving.value.code == 0, captured.err
    return captured.out


@pytest.mark.parametrize("kind", catalog.KINDS)
def test_a_list_names_every_entry(capsys, kind) -> None:
    out = run(capsys, kind)
    assert all(name in out for name in catalog.names(kind))
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("kind", catalog.KINDS)
def test_every_card_is_printed(capsys, kind) -> None:
    for name in catalog.names(kind):
        out = run(capsys, kind, name)
        assert out.startswith(name)
        assert kind == "models" or "source" in out


def test_the_overview_counts(capsys) -> None:
    out = run(capsys)
    for kind in catalog.KINDS:
        assert f"{kind} " in out
        assert str(len(catalog.names(kind))) in out


def test_frameworks_are_listed_with_the_versions_that_were_tried(capsys) -> None:
    out = run(capsys, "frameworks")
    assert all(name in out for name in FRAMEWORKS)
    assert json.loads(run(capsys, "frameworks", "--json"))["frameworks"]["deepspeed"]["versions_tried"] == ["0.19.8"]


def test_versions_that_were_tried_are_those_of_the_tests_with_real_frameworks() -> None:
    """versions.toml pins what `make test-frameworks` installs."""
    pinned = tomllib.loads((Path(__file__).parents[1] / "frameworks" / "versions.toml").read_text())
    for framework in FRAMEWORKS.values():
        package = framework.versions.split()[0]
        entries = [entry["packages"] for entry in pinned.values() if entry.get("writes") == framework.name]
        versions = {word.partition("==")[2] for words in entries for word in words if word.startswith(f"{package}==")}
        assert versions == set(framework.tried), framework.name


def test_a_cluster_card_shows_levels_and_rates(capsys) -> None:
    out = run(capsys, "clusters", "dgx-h100")
    for word in ("h100-sxm: 989 TFLOP/s bf16", "nvlink4", "450 GB/s", "ib-ndr", "50 GB/s", "SuperPOD"):
        assert word in out


def test_clusters_show_their_ridges(capsys) -> None:
    """989.4 TFLOP/s over 378 and 40 GB/s."""
    assert re.search(r"node .* 378 GB/s +2,617 .*\n +rail .* 40 GB/s +24,735", run(capsys, "clusters", "dgx-h100"))
    assert re.search(r"dgx-h100 .* 2\.6k · 25k", run(capsys, "clusters"))
    ridges = json.loads(run(capsys, "clusters", "dgx-h100", "--json"))["ridge_by_level"]
    assert ridges["rail"] == pytest.approx(989.4e12 / 40e9)


def test_a_model_card_shows_the_published_count(capsys) -> None:
    out = run(capsys, "models", "llama3-70b")
    assert "70.55B" in out
    assert "published" in out


def test_json_has_every_field(capsys) -> None:
    everything = json.loads(run(capsys, "--json"))
    assert list(everything) == list(catalog.KINDS)
    assert everything["models"]["llama3-8b"]["parameters"] == pytest.approx(8.03e9, rel=1e-3)
    one = json.loads(run(capsys, "links", "ib-ndr", "--json"))
    assert one["bandwidth"] == 50e9
    assert one == everything["links"]["ib-ndr"]


@pytest.mark.parametrize("kind", ["accelerators", "clusters", "links"])
def test_a_card_says_whether_its_figures_were_checked(capsys, kind) -> None:
    """An entry that was compared with a published page names the page and the date; all others say unchecked."""
    for name in catalog.names(kind):
        checked = catalog.load(kind, name).checked
        assert checked
        assert "unchecked" in checked or "2026-" in checked or name == "cpu", (name, checked)
    assert "checked" in run(capsys, kind, catalog.names(kind)[0])
