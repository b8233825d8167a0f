"""Hangs and slow ranks from flight records: those of real programs on gloo (`hanging.py`), and of NCCL's format with its states and times."""

import json
import pickle
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from meshwright.cli import run_command
from meshwright.errors import MeshwrightError
from meshwright.explain.flight import explain_flight
from meshwright.explain.flight_record import GroupKey, main_stack, place, read_folder
from meshwright.pickle_data import parse
from meshwright.view.flight import SHOWN

HERE = Path(__file__).parent
RECORDS = HERE / "flight"  # written by hanging.py with torch 2.13, four ranks


def explained(folder):
    return explain_flight(read_folder(Path(folder)))


@pytest.mark.parametrize(
    ("kind", "cause", "culprits", "words"),
    [
        (
            "missing",
            "missing",
            (2,),
            ["broadcast number 5 of group 0", "It is now at load_batch (/home/ada/train.py:35)"],
        ),
        ("order", "operation", (3,), ["rank 3: all_reduce 5 Float, from train_step", "left broadcast out"]),
        ("sizes", "sizes", (1,), ["rank 1: all_reduce 6 Float", "ranks 0, 2, 3: all_reduce 5 Float"]),
        ("dtypes", "dtypes", (1,), ["all_reduce 5 Double", "all_reduce 5 Float"]),
        ("dead", "missing", (2, 0), ["Rank 2 has no record", "ranks 1, 3 wait there"]),
        ("circle", "circle", (0, 1), ["group 1 (tensor)", "waits for rank 0"]),
        ("slow", "slow", (1,), ["Rank 1 is the last to arrive in 8 calls", "100 ms after all others"]),
    ],
)
def test_the_cause_of_a_real_hang_is_named(kind, cause, culprits, words):
    report = explained(RECORDS / kind)
    assert (report.kind, report.culprits) == (cause, culprits)
    assert all(word in " ".join(report.summary) for word in words), report.summary
    assert all(waiting.place.endswith(")") for waiting in report.waiting)


def test_json_records_say_the_same_without_lines(tmp_path):
    for file in (RECORDS / "missing").glob("json_*"):
        shutil.copy(file, tmp_path)
    report, whole = explained(tmp_path), explained(RECORDS / "missing")
    assert (report.kind, report.culprits, report.call) == (whole.kind, whole.culprits, whole.call)
    assert {waiting.place for waiting in report.waiting} == {""}


@pytest.mark.slow  # four processes that import torch
def test_a_program_that_hangs_now_is_explained(tmp_path):
    """The formats are those of the installed torch."""
    words = [sys.executable, str(HERE / "hanging.py"), "missing", str(tmp_path), str(tmp_path / "store"), "1"]
    subprocess.run(words, check=True, timeout=90)
    (tmp_path / "store").unlink()
    report = explained(tmp_path)
    assert (report.kind, report.culprits) == ("missing", (2,))
    assert "load_batch" in report.summary[1]


def nccl_call(number, state, group="0", operation="all_reduce", size=1000, at=0, duration=None, p2p=False):
    """An entry as `FlightRecorderDetail.hpp` writes it for NCCL."""
    times = {"scheduled": (None, None), "started": (at + 1, None), "completed": (at + 1, at + 2)}[state]
    entry = {
        "frames": [{"name": "step", "filename": "/home/ada/train.py", "line": 7}], "record_id": number, "pg_id": int(group),
        "process_group": (group, {"0": "default_pg"}.get(group, "mesh_tp")), "thread_name": "pt_main", "thread_id": "1",
        "collective_seq_id": 0 if p2p else number, "p2p_seq_id": number if p2p else 0, "op_id": number,
        "profiling_name": f"nccl:{operation}", "time_created_ns": at, "input_sizes": [[size]], "input_dtypes": ["BFloat16"],
        "output_sizes": [[size]], "output_dtypes": ["BFloat16"], "state": state, "time_discovered_started_ns": times[0],
        "time_discovered_completed_ns": times[1], "retired": state == "completed", "timeout_ms": 600000, "is_p2p": p2p,
    }  # fmt: skip
    return entry | ({"duration_ms": duration} if duration else {})


def test_the_fields_are_those_of_a_real_record_of_nccl():
    """Written by torch 2.11 on an H200: a group of one rank, and an all-reduce behind a kernel that does not end."""
    data = (RECORDS / "nccl" / "nccl_trace_rank_0").read_bytes()
    *done, last = parse(data)["entries"]
    assert set(last) == set(nccl_call(1, "scheduled"))
    assert set(done[0]) == set(nccl_call(1, "completed", duration=1.0))
    record = read_folder(RECORDS / "nccl").records[0]
    assert [call.done for call in record.calls] == [True] * 9 + [False]
    assert not record.calls[-1].started
    assert record.groups == (GroupKey("0", "default_pg", (0,)),)
    assert [call.operation for call in record.calls[6:8]] == ["allreduce_coalesced", "coalesced"]


def write_nccl(folder, calls_by_rank, groups, version="2.10"):
    config = {name: {"name": name, "desc": "default_pg" if name == "0" else "mesh_tp", "ranks": str(list(ranks))}
              for name, ranks in groups.items()}  # fmt: skip
    for rank, calls in calls_by_rank.items():
        record = {
            "version": version,
            "pg_config": config,
            "comm_lib_version": "2.27.3",
            "pg_status": {},
            "entries": calls,
        }
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(record, protocol=2))


def test_with_nccl_a_rank_arrives_when_its_device_starts(tmp_path):
    """All ranks issued call 2; on rank 1 an earlier kernel does not end, so that its device never starts it."""
    states = {0: "started", 1: "scheduled", 2: "started"}
    write_nccl(
        tmp_path, {r: [nccl_call(1, "completed"), nccl_call(2, s, at=5)] for r, s in states.items()}, {"0": range(3)}
    )
    report = explained(tmp_path)
    assert (report.kind, report.culprits) == ("missing", (1,))
    assert "its device has not started it" in report.summary[1]
    assert [waiting.rank for waiting in report.waiting] == [0, 2]


def test_a_chain_over_groups_leads_to_its_end(tmp_path):
    """0 waits in the world for 1, which waits in its group for 2, which waits for 3, which left no record."""
    world, pair_a, pair_b = {"0": range(4)}, {"1": [1, 2]}, {"2": [2, 3]}
    calls = {
        0: [nccl_call(1, "started", at=1)],
        1: [nccl_call(4, "started", "1", at=9)],
        2: [nccl_call(5, "started", "2", at=9)],
    }
    write_nccl(tmp_path, calls, world | pair_a | pair_b)
    report = explained(tmp_path)
    assert (report.kind, report.culprits[0]) == ("missing", 3)
    assert report.notes == ("no record of rank 3",)


def test_a_device_that_all_reached_is_the_transport(tmp_path):
    write_nccl(tmp_path, {r: [nccl_call(3, "started")] for r in range(2)}, {"0": range(2)})
    assert explained(tmp_path).kind == "transport"


def test_sizes_that_may_differ_are_no_difference(tmp_path):
    """Experts send what the router chose: rank 1 is missing at call 2, not wrong at call 1."""
    calls = {r: [nccl_call(1, "completed", operation="all_to_all", size=100 + r)] for r in range(2)}
    calls[0].append(nccl_call(2, "started", at=5))
    calls[0][0]["state"], calls[0][0]["retired"] = "started", False
    write_nccl(tmp_path, calls, {"0": range(2)})
    report = explained(tmp_path)
    assert (report.kind, report.culprits) == ("missing", (1,))


def test_messages_are_matched_by_their_ends(tmp_path):
    """A pipeline: rank 1 receives twice, rank 0 sent once and is done."""
    calls = {
        0: [nccl_call(1, "completed", operation="send 0->1", p2p=True)],
        1: [nccl_call(n, s, operation="recv 1<-0", p2p=True) for n, s in ((1, "completed"), (2, "started"))],
    }
    write_nccl(tmp_path, calls, {"0": range(2)})
    report = explained(tmp_path)
    assert (report.kind, report.culprits) == ("missing", (0,))
    assert "recv 1<-0 number 2" in report.call


def test_the_slow_rank_by_nccls_durations_needs_no_clocks(tmp_path):
    """The last rank waits least. The clock of rank 0 is an hour late, which would make it the slow one."""
    hour = 3_600_000_000_000
    calls = {
        rank: [nccl_call(n, "completed", at=n * 10**8 + hour * (rank == 0), duration=2.0 if rank == 2 else 30.0 + rank) for n in range(1, 9)]
        for rank in range(4)
    }  # fmt: skip
    write_nccl(tmp_path, calls, {"0": range(4)})
    report = explained(tmp_path)
    assert (report.kind, report.culprits) == ("slow", (2,))
    assert "28 ms" in report.summary[0]


def test_groups_that_ranks_made_differently(tmp_path):
    write_nccl(tmp_path, {0: [nccl_call(1, "started", "1")]}, {"0": range(3), "1": [0, 1]})
    write_nccl(tmp_path, {1: [nccl_call(1, "started", "1")]}, {"0": range(3), "1": [0, 1, 2]})
    report = explained(tmp_path)
    assert (report.kind, report.culprits) == ("groups", (0, 1))


def test_truncated_records_and_other_files_are_named_and_the_rest_is_used(tmp_path):
    shutil.copytree(RECORDS / "missing", tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("json_*"):
        file.unlink()
    whole = (tmp_path / "rank_3").read_bytes()
    (tmp_path / "rank_3").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "notes.md").write_text("hello")
    (tmp_path / "empty_5").write_bytes(b"")
    report = explained(tmp_path)
    assert (report.kind, report.culprits) == ("missing", (2,))
    assert any("rank 3 cannot be read" in note and "truncated" in note for note in report.notes)


def test_different_versions_are_said(tmp_path):
    for rank, version in enumerate(("2.4", "2.10")):
        write_nccl(tmp_path, {rank: [nccl_call(1, "started")]}, {"0": range(2)}, version)
    assert any("2.10, 2.4" in note for note in explained(tmp_path).notes)


def test_hostile_records_run_nothing_and_raise_one_error(tmp_path):
    mark = tmp_path / "mark"

    class Bomb:
        def __reduce__(self):
            return Path.touch, (mark,)

    folder = tmp_path / "records"
    folder.mkdir()
    (folder / "rank_0").write_bytes(pickle.dumps({"version": Bomb()}))
    (folder / "rank_1").write_bytes(json.dumps({"version": "2.1", "entries": [[[]]]}).encode())
    (folder / "rank_2").write_bytes(b"{" * 100_000)
    with pytest.raises(MeshwrightError, match="MW-EXPL-011"):
        read_folder(folder)
    assert not mark.exists()
    with pytest.raises(MeshwrightError, match="MW-EXPL-010"):
        read_folder(tmp_path / "none")
    with pytest.raises(MeshwrightError, match=f"Fix: --flight {folder}"):
        read_folder(folder / "rank_0")


def test_the_rank_is_the_number_after_the_word_or_the_last_number(tmp_path):
    for number, file in enumerate(sorted((RECORDS / "order").glob("*rank*"))):
        shutil.copy(file, tmp_path / f"nccl_trace_rank_{number}_pid_99{number}_2026.bin")
    (tmp_path / "dump-7-stack-1.txt").write_text("Thread 0x1 (most recent call first):\n")
    folder = read_folder(tmp_path)
    assert sorted(folder.records) == list(range(len(folder.records)))
    assert list(folder.stacks) == [1]


def test_notes_beyond_those_shown_are_counted(tmp_path, capsys):
    shutil.copytree(RECORDS / "order", tmp_path, dirs_exist_ok=True)
    for number in range(SHOWN + 5):
        (tmp_path / f"core.{number}").touch()
    run_command("explain", ["--flight", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.count("is empty: not read") == SHOWN
    assert "and 5 notes more" in printed


def test_random_changes_of_records_give_a_report_or_one_error(tmp_path):
    draw = random.Random(0)
    for _ in range(30):
        for file in (RECORDS / "order").iterdir():
            data = bytearray(file.read_bytes())
            for _ in range(draw.choice((0, 1, 3))):
                data[draw.randrange(len(data))] = draw.randrange(256)
            (tmp_path / file.name).write_bytes(data)
        with suppress(MeshwrightError):
            asdict(explained(tmp_path))


def test_the_command_shows_the_rank_and_writes_a_page(tmp_path, capsys):
    run_command("explain", ["--flight", str(RECORDS / "missing"), "--html", str(tmp_path / "page.html")])
    assert "load_batch" in capsys.readouterr().out
    assert "load_batch" in (tmp_path / "page.html").read_text()
    run_command("explain", ["--flight", str(RECORDS / "missing"), "--json"])
    assert json.loads(capsys.readouterr().out)["culprits"] == [2]


def test_the_stack_of_the_main_thread():
    text = """Process 12: python train.py
Thread 99 (idle): "watchdog"
    wait (threading.py:331)
Thread 12 (active): "MainThread"
    read (torch/utils/data/dataloader.py:700)
    next_batch (data.py:12)
    <module> (train.py:3)
"""
    assert [frame.function for frame in main_stack(text)] == ["read", "next_batch", "<module>"]
    assert place(main_stack(text)) == "next_batch (data.py:12)"


def test_hostile_numbers_and_names_are_refused_or_escaped(tmp_path, capsys):
    entry = nccl_call(1, "started")
    write_nccl(
        tmp_path, {1: [entry | {"output_sizes": [[1 << 4000] * 9], "input_sizes": [[1 << 4000] * 9]}]}, {"0": range(2)}
    )
    write_nccl(tmp_path, {0: [entry | {"process_group": ("0", "\x1b[31mred")}]}, {})
    run_command("explain", ["--flight", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "no tensor has" in shown
    assert "\x1b" not in shown


def test_times_and_partners_that_cannot_be_are_no_internal_error(tmp_path):
    sent = nccl_call(1, "started", operation="send \u00b2->0", p2p=True)
    write_nccl(tmp_path, {0: [sent], 1: [nccl_call(1, "started", at=10**400)]}, {"0": range(2)})
    report = explained(tmp_path)
    assert report.ranks == (0,)
    assert "no clock shows" in " ".join(report.notes)


def test_the_members_of_a_large_group_are_one_object_of_all_ranks(tmp_path):
    write_nccl(tmp_path, {rank: [nccl_call(1, "started")] for rank in range(3)}, {"0": range(3)})
    groups = [record.groups[0] for record in read_folder(tmp_path).records.values()]
    assert groups[0] is groups[1] is groups[2]
