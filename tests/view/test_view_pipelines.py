"""Drawn pipelines: every action at its time, both bubble measures by name, within the requested width."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines import Durations, build, walk
from meshwright.view.page.timeline import schedules_html
from meshwright.view.pipelines import COLOURS, Unit, colour, messages, show_pipelines, timeline
from meshwright.view.show.pipelines import show, walked_for


def drawn(*names, width=100, colours=None, **options):
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=colours, force_terminal=colours is not None)
    ranks, microbatches = options.pop("size", (4, 8))
    show_pipelines([walked_for(n, ranks, microbatches, **options) for n in names], console)
    return out.getvalue()


def test_1f1b_as_text():
    """The figure of the textbooks, character by character."""
    assert drawn("1f1b", width=80).splitlines()[:6] == [
        "1f1b: 4 ranks, 8 micro-batches, 1 stage per rank                   in flight",
        "rank 0 F0F1F2F3············B0--F4B1--F5B2--F6B3--F7B4--··B5--··B6--··B7--  4",
        "rank 1 ··F0F1F2········B0--F3B1--F4B2--F5B3--F6B4--F7B5--··B6--··B7--····  3",
        "rank 2 ····F0F1····B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--··B7--········  2",
        "rank 3 ······F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--············  1",
        "       0         5         10        15        20        25        30    ",
    ]


def test_the_two_bubbles_have_two_names():
    text = drawn("1f1b")
    assert "bubble fraction 27.3% of the step, bubble overhead 37.5% of the work" in text
    assert "makespan 33 · in flight 4 micro-batches on the rank with the most, 1 on the rank with the fewest" in text
    assert "without a barrier between steps: one step every 24, 0.0% of it idle" in drawn("zb-h2")


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("size", [(1, 1), (4, 8), (8, 64), (4, 200)])
def test_any_schedule_fits_the_width(width, size):
    for name in ("1f1b", "interleaved", "zbv"):
        for colours in (None, "truecolor"):
            for line in drawn(name, width=width, size=size, colours=colours).splitlines():
                assert len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= width


def test_colours_show_kind_stage_and_micro_batch():
    text = drawn("zb-h1", colours="truecolor")
    for kind in "FIW":
        assert "48;2;" + ";".join(map(str, COLOURS[kind])) in text
    assert "48;2;" + ";".join(map(str, COLOURS["B"])) not in text
    assert colour("F", 1, 2) != colour("F", 0, 2) != colour("F", 0, 2, 1)
    assert "▌" in drawn("interleaved", size=(8, 64), colours="truecolor")


def test_comparison_draws_all_schedules_at_one_scale_with_a_table():
    text = drawn("gpipe", "1f1b", "zbv")
    assert text.index("gpipe:") < text.index("1f1b:") < text.index("zbv:")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if "%" in line}
    assert rows["gpipe"] == ["gpipe", "1", "33", "27.3%", "37.5%", "33", "8", "16"]
    assert rows["zbv"] == ["zbv", "2", "25.5", "5.9%", "6.2%", "24", "4", "32"]
    lanes = [line for line in text.splitlines() if line.startswith("rank 0")]
    assert len(lanes[0]) == len(lanes[1]) > len(lanes[2])


def test_messages_grow_with_the_stages_of_a_rank():
    assert messages(walk(build("1f1b", 4, 8))) == 16
    assert messages(walk(build("interleaved", 4, 8, 3))) == 48
    assert messages(walk(build("interleaved", 1, 8, 3))) == 0


def test_seconds_are_printed_in_a_readable_unit():
    walked = walk(build("1f1b", 2, 4), Durations.of(2, *([0.002] * 2,) * 3))
    out = io.StringIO()
    Console(file=out, width=100).print(timeline(walked, seconds=True))
    assert "makespan 30 ms" in out.getvalue()
    assert "0 ms" in out.getvalue()
    assert Unit().format(walked.makespan) == "0.03"


def data_of(page):
    found = json.loads(re.search(r'id="meshwright-data">(.*?)</script>', page, re.S)[1])
    return found["views"]["timeline"]["data"]


def test_the_page_contains_every_action_and_is_self_contained():
    several = [walk(build(name, 3, 6)) for name in ("1f1b", "zbv")]
    page = schedules_html(several, 'a "title" <b>')
    assert "<title>a &quot;title&quot; &lt;b&gt;</title>" in page
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)\s*=\s*["']?(http|/)|@import|url\(\s*["']?http""", page)
    data = data_of(page)
    for walked, panel in zip(several, data["panels"], strict=True):
        program, tick = walked.program, walked.makespan / data["ticks"]
        assert panel["bubble_fraction"] == walked.bubble_fraction
        for rank, lane in enumerate(panel["lanes"]):
            stages = lane["stage"] or [rank] * len(lane["kind"])
            names = [f"{s}{k}{m}" for s, k, m in zip(stages, lane["kind"], lane["microbatch"], strict=True)]
            assert names == [str(a) for a in program.actions(rank)]
            own = slice(int(program.first[rank]), int(program.first[rank + 1]))
            lengths = [panel["durations"][k][s] for k, s in zip(lane["kind"], stages, strict=True)]
            assert np.allclose(np.array(lane["start"]) * tick, walked.start[own], atol=tick)
            assert np.allclose((np.array(lane["start"]) + lengths) * tick, walked.end[own], atol=2 * tick)


def test_show_writes_the_requested_files(tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=100)
    page, trace = tmp_path / "p.html", tmp_path / "t.json"
    show("ZB_1P", stages=2, microbatches=3, html=page, trace=trace, json_out=True, console=console)
    found = json.loads(out.getvalue())
    assert (found["schedule"], found["ranks"], found["microbatches"]) == ("zb-h1", 2, 3)
    assert found["actions"][0][0] == {"action": "0F0", "start": 0.0, "end": 1.0}
    assert len(data_of(page.read_text())["panels"]) == 1
    assert json.loads(trace.read_text())["otherData"]["schedule"] == "zb-h1"
    with pytest.raises(MeshwrightError) as caught:
        show("1f1b", compare="gpipe", trace=trace, console=console)
    assert caught.value.code == "MW-PIPE-008"


def test_show_compares_and_searches():
    out = io.StringIO()
    console = Console(file=out, width=100)
    show("1f1b", compare="gpipe, 1f1b, zb-v", json_out=True, console=console)
    assert [found["schedule"] for found in json.loads(out.getvalue())] == ["gpipe", "1f1b", "zbv"]
    out.seek(0)
    out.truncate()
    show("zb-h2", compare="", json_out=True, console=console)
    assert [f["schedule"] for f in json.loads(out.getvalue())] == [
        "zb-h2",
        "gpipe",
        "1f1b",
        "interleaved",
        "zb-h1",
        "zbv",
    ]
    assert walked_for("auto", 4, 8).makespan <= walked_for("1f1b", 4, 8).makespan
    assert walked_for("interleaved", 4, 8, 4).program.virtual == 4
    assert walked_for("1f1b", 4, 8, 4).program.virtual == 1
