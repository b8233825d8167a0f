"""Run folders: listed, read while they grow, and never outside of the folder given at start."""

import json
import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from meshwright.describe.run_folder import EVENTS, RUN, STEP_KEYS, STEPS, json_line
from meshwright.errors import MeshwrightError
from meshwright.view.json_schema import schema_of
from meshwright.view.page import runs as page_runs
from meshwright.view.page.runs import MOST_ROWS, RunFolders, RunWatch
from meshwright.view.page.shapes import SHAPES
from meshwright.web.api import MOST_STREAMS
from web.running import CLIENT

PLAN = 'model = "tiny-gpt"\n[cluster]\nextends = "dgx-h100"\n[plan]\nshard = 2\nzero = 1\n'


def make_run(folder: Path, steps: int = 3) -> Path:
    """The files that `train` writes before its end."""
    folder.mkdir(parents=True)
    (folder / "plan.toml").write_text(PLAN)
    (folder / "prediction.json").write_text('{"step_time_s": 0.5}')
    add_steps(folder, range(steps))
    return folder


def add_steps(folder: Path, steps: range) -> None:
    with (folder / STEPS).open("ab") as file:
        for i in steps:
            file.write(json_line({"step": i, "loss": 4 - 0.1 * i if i != 1 else math.nan, "seconds": 0.5}))


def shown(rows: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Step, loss and seconds of rows."""
    return [tuple(row[STEP_KEYS.index(key)] for key in ("step", "loss", "seconds")) for row in rows]


def test_a_run_is_watched_while_it_grows(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first")
    runs = RunFolders(tmp_path)
    assert [(run["name"], run["state"], run["title"]) for run in runs.listing()["runs"]] == [
        ("first", "running", "dp 2 (ZeRO-1) · micro-batch 1")
    ]
    found = runs.run("first")
    jsonschema_rs.validate(schema_of(SHAPES["runs"], closed=True), runs.listing())
    jsonschema_rs.validate(schema_of(SHAPES["run"], closed=True), found)
    assert found["columns"] == list(STEP_KEYS)
    assert shown(found["rows"]) == [(0, 4.0, 0.5), (1, None, 0.5), (2, 3.8, 0.5)]
    assert found["fresh"]
    assert found["parts"] == {"prediction": {"step_time_s": 0.5}}
    nothing_new = runs.run("first", found["seen"])
    assert (nothing_new["rows"], nothing_new["parts"], nothing_new["fresh"]) == ([], {}, False)
    add_steps(folder, range(3, 5))
    with (folder / STEPS).open("a") as file:
        file.write('{"step":5,"lo')  # a row that is being written
    (folder / "measurement.json").write_text('{"step_time_s": NaN}')
    later = runs.run("first", found["seen"])
    assert [row[0] for row in later["rows"]] == [3, 4]
    assert later["parts"] == {"measurement": {"step_time_s": None}}
    assert (later["state"], later["steps"]) == ("done", 5)


def test_a_run_that_was_restarted_is_read_anew(tmp_path: Path) -> None:
    """Its rows after the checkpoint were removed, and by now it has as many as before."""
    folder = make_run(tmp_path / "restarted")
    (folder / EVENTS).write_bytes(json_line({"time": 1.0, "step": 2, "kind": "checkpoint", "text": "written"}))
    runs = RunFolders(tmp_path)
    before = runs.run("restarted")
    assert [event["kind"] for event in before["events"]] == ["checkpoint"]
    (folder / RUN).write_text('{"version": 1, "attempts": [{"ended": 1.0, "cause": "killed"}, {"ended": null}]}')
    after = runs.run("restarted", before["seen"])
    assert (after["fresh"], len(after["rows"]), len(after["events"])) == (True, 3, 1)
    assert not runs.run("restarted", after["seen"])["fresh"]
    (folder / STEPS).write_bytes(b"")
    assert runs.run("restarted", after["seen"])["fresh"]


def test_a_folder_that_is_a_run_itself_and_one_that_stopped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    for name in (STEPS, "plan.toml"):
        os.utime(folder / name, (1.0, 1.0))
    assert [(run["name"], run["state"]) for run in RunFolders(folder).listing()["runs"]] == [("one", "stopped")]
    assert RunFolders(None).listing()["runs"] == RunFolders(tmp_path / "missing").listing()["runs"] == []


def test_many_steps_are_thinned(tmp_path: Path) -> None:
    make_run(tmp_path / "long", steps=3 * MOST_ROWS + 1)
    found = RunFolders(tmp_path).run("long")
    assert MOST_ROWS // 2 <= len(found["rows"]) <= MOST_ROWS + 1
    assert found["rows"][-1][0] == 3 * MOST_ROWS
    assert found["steps"] == 3 * MOST_ROWS + 1


def test_links_and_paths_lead_nowhere(tmp_path: Path) -> None:
    inside = tmp_path / "runs"
    outside = make_run(tmp_path / "outside")
    make_run(inside / "good")
    (inside / "link").symlink_to(outside)
    (inside / "good" / "measurement.json").symlink_to(outside / "prediction.json")
    runs = RunFolders(inside)
    assert [run["name"] for run in runs.listing()["runs"]] == ["good"]
    assert set(runs.run("good")["parts"]) == {"prediction"}
    for name in ("link", "../outside", "..", "good/../../outside", str(outside)):
        with pytest.raises(MeshwrightError) as caught:
            runs.run(name)
        assert caught.value.code == "MW-REP-001"


def test_broken_files_are_reported(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "broken")
    (folder / "difference.json").write_text("{")
    with pytest.raises(MeshwrightError) as caught:
        RunFolders(tmp_path).run("broken")
    assert caught.value.code == "MW-REP-002"


def test_a_watch_says_what_is_new_and_goes_on_where_another_ended(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(page_runs, "LISTED_S", -1.0)
    folder = make_run(tmp_path / "a b&c")
    make_run(tmp_path / "other")
    runs = RunFolders(tmp_path)
    watch = RunWatch(runs, ["a b&c", "gone"])
    first = watch.news()
    assert [name for name, _ in first] == ["runs", "run"]
    assert len(first[1][1]["rows"]) == 3
    assert watch.news() == []
    add_steps(folder, range(3, 5))
    later = RunWatch(runs, ["a b&c"], watch.seen).news()  # another page, or this one after the server was restarted
    assert [row[0] for row in later[1][1]["rows"]] == [3, 4]
    assert [name for name, _ in watch.news()] == ["runs", "run"]
    (folder / "difference.json").write_text("{")
    assert watch.news()[-1][1]["error"]["code"] == "MW-REP-002"
    assert watch.news() == []
    (folder / "difference.json").write_text("[]")
    assert watch.news()[-1][1]["parts"] == {"difference": []}
    for seen in ("x" * 100_000, "a=1&b=2&c=3&d=4", "%ff=%00"):
        assert len(RunWatch(runs, ["a b&c"], seen).news()[1][1]["rows"]) == 5


def test_news_are_streamed_with_an_id_to_go_on_from(server: str, run_folders: Path) -> None:
    folder = make_run(run_folders / "streamed")

    def events(count: int, **headers: str) -> list[tuple[str, str, Any]]:
        found = []
        with CLIENT.stream("GET", f"{server}/api/watch?run=streamed", headers=headers) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                if line:
                    fields[line.partition(": ")[0]] = line.partition(": ")[2]
                    continue
                found.append((fields["event"], fields["id"], json.loads(fields["data"])))
                if len(found) == count:
                    return found
                if len(found) == 2:
                    add_steps(folder, range(3, 4))
        return found

    first = events(4)
    assert [name for name, _, _ in first] == ["runs", "run", "runs", "run"]
    assert (len(first[1][2]["rows"]), [row[0] for row in first[3][2]["rows"]]) == (3, [3])
    again = events(2, **{"Last-Event-ID": first[1][1]})
    assert [row[0] for row in again[1][2]["rows"]] == [3]


def test_only_so_many_pages_watch_at_once(server: str) -> None:
    with ExitStack() as stack:
        for _ in range(MOST_STREAMS):
            assert stack.enter_context(CLIENT.stream("GET", server + "/api/watch")).status_code == 200
        refused = CLIENT.get(server + "/api/watch")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "MW-WEB-002")
        assert refused.headers["retry-after"]


def test_over_http(server: str, run_folders: Path) -> None:
    make_run(run_folders / "second")
    assert "second" in [run["name"] for run in CLIENT.get(server + "/api/runs").json()["runs"]]
    found = CLIENT.get(f"{server}/api/runs/second").json()
    assert found["steps"] == 3
    assert found["parts"]["prediction"] == {"step_time_s": 0.5}
    assert CLIENT.get(f"{server}/api/runs/second?seen={found['seen']}").json()["rows"] == []
    for path in ("..%2F..", "%2e%2e", "none", "%00"):
        assert CLIENT.get(f"{server}/api/runs/{path}").status_code == 404
