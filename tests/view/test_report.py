"""The file of training runs, and errors for broken run folders."""

import json
import re

import pytest

from meshwright.cli import main
from meshwright.describe.config import load
from meshwright.describe.run_folder import EVENTS, STEP_KEYS, STEPS, json_line
from meshwright.errors import MeshwrightError
from meshwright.view.report import page, trace_of

PARTS = {
    "prediction": {"exposed_s": {"attention": 0.03, "tp": 0.01}, "step_time_s": 0.04},
    "measurement": {"loss": [5.0, 4.0, 3.5], "step_time_s": 0.05},
    "difference": [
        {"what": "step time", "unit": "s", "predicted": 0.04, "measured": 0.05, "error": -0.2},
        {"what": "traffic tp", "unit": "bytes", "predicted": 1e6, "measured": 0.0, "error": None},
    ],
}
PROOF = {"passed": True, "plan": "dp 2 · tp </script>", "ranks": 4, "steps": 5, "errors": {"fp64": {"gradient": 1e-15}}}


def folder(path, **changes):
    path.mkdir(parents=True)
    (path / "plan.toml").write_text(load("examples/demo-dp2-tp2.toml").to_toml())
    rows = [{"step": i, "loss": loss, "seconds": 0.05} for i, loss in enumerate((5.0, None, 3.5))]
    (path / STEPS).write_bytes(b"".join(map(json_line, rows)))
    (path / EVENTS).write_bytes(json_line({"time": 1.0, "step": 1, "kind": "restart", "text": "attempt 2 begins"}))
    for name, value in {**PARTS, **changes}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (path / f"{name}.json").write_text(text)
    return path


def data_in(text):
    """The data that a file draws."""
    return json.loads(re.search(r'id="meshwright-data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_file_has_the_curves_and_results_of_each_run(tmp_path):
    text = page([folder(tmp_path / "a", proof=PROOF), folder(tmp_path / "b")])
    data = data_in(text)
    assert [run["name"] for run in data["runs"]["runs"]] == ["a", "b"]
    run = data["run"]["a"]
    losses = [row[STEP_KEYS.index("loss")] for row in run["rows"]]
    assert losses == [5.0, None, 3.5]
    assert run["events"][0]["kind"] == "restart"
    assert run["parts"] == {**PARTS, "proof": PROOF}  # text of a file cannot end the script
    assert run["title"].startswith("dp 2 · tp 2 · micro-batch 4")
    assert not re.search(r"https?://(?!www\.w3\.org)", text)  # nothing is fetched


def test_runs_of_the_same_name_stay_apart(tmp_path):
    folders = [folder(tmp_path / side / "run") for side in ("first", "second")]
    assert list(data_in(page(folders))["run"]) == [str(path) for path in folders]


def test_a_run_that_has_not_ended_is_shown(tmp_path):
    """It has no measurement: its curves come from the rows."""
    run = folder(tmp_path / "a")
    for name in ("measurement", "difference"):
        (run / f"{name}.json").unlink()
    entry, data = data_in(page([run]))["runs"]["runs"][0], data_in(page([run]))["run"]["a"]
    assert set(data["parts"]) == {"prediction"}
    assert (entry["steps"], entry["loss"], entry["step_time_s"]) == (3, 3.5, 0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {"prediction": "{"},
        {"prediction": []},
        {"difference": {}},
        {"difference": [{"what": "step time"}]},
        {"measurement": [1]},
        {"run": {"version": 2}},
    ],
)
def test_broken_files_are_named(tmp_path, changes):
    with pytest.raises(MeshwrightError) as error:
        page([folder(tmp_path / "a", **changes)])
    assert error.value.code == "MW-REP-002"
    assert f"{next(iter(changes))}.json of a" in str(error.value)


def test_missing_folders_and_files_are_named(tmp_path):
    (folder(tmp_path / "a") / "plan.toml").unlink()
    (folder(tmp_path / "b") / "prediction.json").unlink()
    for name, words in (("none", "does not exist"), ("a", "lacks plan.toml"), ("b", "lacks prediction.json")):
        with pytest.raises(MeshwrightError, match=words) as error:
            page([tmp_path / name])
        assert error.value.code == "MW-REP-001"


def spans(rank):
    span = {"rank": rank, "stream": "compute", "name": "optimizer", "start_s": 0.0, "duration_s": 0.5}
    return [{**span, "category": "optimizer", "args": {}}]


TIMELINE = {"version": 1, "step": 7, "measured": [*spans(0), *spans(1)], "simulated": spans(0)}


def process_names(trace):
    return [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]


def test_one_trace_has_the_measured_and_the_simulated_step(tmp_path):
    run = folder(tmp_path / "a", timeline=TIMELINE)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run), "--html", str(tmp_path / "r.html"), "--trace", str(tmp_path / "t.json")])
    assert ended.value.code == 0
    written = json.loads((tmp_path / "t.json").read_text())
    assert process_names(written) == ["measured: rank 0", "measured: rank 1", "simulated: rank 0"]
    assert trace_of([run])["traceEvents"] == written["traceEvents"]


def test_profiled_ranks_follow_on_one_clock(tmp_path):
    """Rank 1 began its trace 2 s after rank 0."""
    run = folder(tmp_path / "a", timeline=TIMELINE)
    (run / "profile").mkdir()
    for rank in (0, 1):
        events = [
            {"name": "process_name", "ph": "M", "ts": 0, "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}},
            {"name": "aten::mm", "cat": "cpu_op", "ph": "X", "ts": 5.0, "dur": 1.0, "pid": rank, "tid": 0, "args": {}},
        ]
        about = {"rank": rank, "steps": [3, 4], "origin_s": 100.0 + 2 * rank}
        (run / "profile" / f"rank-{rank}.json").write_text(json.dumps({"traceEvents": events, "otherData": about}))
    trace = trace_of([run])
    assert process_names(trace)[3:] == ["profiled: rank 0", "profiled: rank 1"]
    assert [(e["pid"], e["ts"]) for e in trace["traceEvents"] if e["name"] == "aten::mm"] == [(3, 5.0), (4, 2e6 + 5)]
    (run / "profile" / "rank-1.json").write_text("{}")
    with pytest.raises(MeshwrightError, match="MW-REP-002"):
        trace_of([run])


def test_a_trace_needs_one_complete_run(tmp_path):
    runs = [folder(tmp_path / "a"), folder(tmp_path / "b", timeline=TIMELINE)]
    for chosen in (runs, runs[:1]):
        with pytest.raises(MeshwrightError) as error:
            trace_of(chosen)
        assert error.value.code == "MW-REP-003"


@pytest.mark.parametrize("timeline", [{**TIMELINE, "version": 2}, {"version": 1, "measured": [{"rank": 0}]}])
def test_a_timeline_of_another_version_or_shape_is_an_error(tmp_path, timeline):
    with pytest.raises(MeshwrightError) as error:
        page([folder(tmp_path / "a", timeline=timeline)])
    assert error.value.code == "MW-REP-002"


def test_runs_are_listed_and_compared(tmp_path, capsys):
    started = {"version": 1, "steps": 10, "seed": 3, "started": 1.0, "device": "cpu"}
    attempts = [{"start": 1.0, "world": 4, "plan": "", "resumed_from": None, "ended": 61.0, "cause": "rank 1 died"}]
    folder(tmp_path / "one", run={**started, "attempts": attempts})
    second = folder(tmp_path / "two", run={**started, "attempts": [{**attempts[0], "cause": ""}]})
    text = (second / "plan.toml").read_text()
    (second / "plan.toml").write_text(text.replace("microbatch = 4", "microbatch = 2"))
    (folder(tmp_path / "three") / "measurement.json").write_text("[")
    (tmp_path / "not a run").mkdir()

    def printed(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["runs", *map(str, arguments)])
        assert ended.value.code == 0
        return capsys.readouterr().out

    listed = {run["name"]: run for run in json.loads(printed(tmp_path, "--json"))["runs"]}
    assert {name: run["state"] for name, run in listed.items()} == {
        "one": "failed", "two": "done", "three": "unreadable",
    }  # fmt: skip
    assert (listed["two"]["steps"], listed["two"]["planned_steps"], listed["two"]["elapsed_s"]) == (3, 10, 60.0)
    shown = printed(tmp_path)
    assert re.search(r"one +failed +3 of 10 +3\.500 +50 ms +40 ms -20%", shown)
    assert "one: rank 1 died" in shown
    assert len(shown.splitlines()) < 12  # one line for each run
    compared = printed(tmp_path / "one", tmp_path / "two")
    assert re.search(r"plan\.microbatch +4 +2", compared)
    assert re.search(r"time +0:01:00 +0:01:00", compared)
    with pytest.raises(SystemExit):
        main(["runs", str(tmp_path / "missing")])
    assert "MW-REP-001" in capsys.readouterr().err


def test_a_comparison_says_which_runs_it_cannot_read(tmp_path, capsys):
    one, two, three = (folder(tmp_path / name) for name in ("one", "two", "three"))
    (two / "plan.toml").write_text((two / "plan.toml").read_text().replace("microbatch = 4", "microbatch = 2"))
    (three / "plan.toml").write_text("")
    (three / "measurement.json").write_text("[")

    def compared(*folders):
        with pytest.raises(SystemExit):
            main(["runs", *map(str, folders)])
        return capsys.readouterr().out

    shown = compared(one, two, three)
    assert re.search(r"plan\.microbatch +4 +2 +–", shown)
    assert "three: MW-REP-002: measurement.json of three is not JSON" in shown
    assert "The run files of three cannot be read: not compared" in shown
    assert "equal" not in compared(one, three)


def test_a_run_that_ended_is_watched_at_once(tmp_path, capsys):
    folder(tmp_path / "one")
    with pytest.raises(SystemExit):
        main(["runs", str(tmp_path), "--watch"])
    out = capsys.readouterr().out
    assert "step 3 of" in out
    assert "3.5000" in out
