"""Traces are read from streams: the same events as the whole document has, whatever the chunks; what is broken is said."""

import gzip
import json
import os
import pickle
import random
import subprocess
import sys
from contextlib import suppress
from io import StringIO
from itertools import chain

import numpy as np
import pytest
from chrome import HandMade

from meshwright.errors import MeshwrightError
from meshwright.explain import folder, json_stream, reader
from meshwright.explain.explanation import explain_traces
from meshwright.explain.folder import read_traces
from meshwright.explain.json_stream import EndOfText, JsonStream
from meshwright.explain.reader import read_trace
from meshwright.explain.trace import KERNEL


def small(tmp_path, name="rank-0.json", **options):
    trace = HandMade(**options)
    trace.span("ProfilerStep#1", 0, 100)
    trace.kernel("gemm", 10, 60, operator=("aten::mm", [[4, 8], [8, 16]], "c10::BFloat16"))
    trace.kernel("elementwise", 60, 90)
    return trace.write(tmp_path, name)


def test_elements_are_those_of_the_whole_document(monkeypatch):
    """Whatever the chunks are: each number of characters puts their ends at other places."""
    rows = [
        {"name": 'a "quoted" \\ ü', "n": [1, -2.5e3, None, True], "inner": {"x": {}}},
        17,
        "text",
        {"y": "]}"},
        {},
        [],
        -1.5e-7,
    ]
    document = {"first": {"a": [1, 2]}, "number": 12345, "rows": rows, "last": "ü"}
    for text in (json.dumps(document), json.dumps(document, indent=2), json.dumps(document, separators=(",", ":"))):
        for chunk in range(1, len(text) + 2):
            monkeypatch.setattr(json_stream, "CHUNK", chunk)
            stream, found = JsonStream(StringIO(text)), {}
            for key in stream.members():
                found[key] = list(chain.from_iterable(stream.batches())) if key == "rows" else stream.value()
            assert found == document


def test_a_document_that_ends_anywhere_gives_its_first_elements():
    rows = [{"number": i, "text": "x" * i} for i in range(5)]
    text = json.dumps(rows)
    for end in range(len(text)):
        found: list[object] = []
        with pytest.raises(EndOfText):
            found.extend(chain.from_iterable(JsonStream(StringIO(text[:end])).batches()))
        assert found == rows[: len(found)]
        assert len(found) == sum(text.find(row) + len(row) <= end for row in map(json.dumps, rows))


def test_columns_have_what_the_events_have(tmp_path):
    e = read_trace(small(tmp_path)).events
    kernels = e.where(e.category == KERNEL)
    assert [e.names[n] for n in kernels.name] == ["gemm", "elementwise"]
    assert kernels.start.tolist() == [10_000, 60_000]
    assert kernels.duration.tolist() == [50_000, 30_000]
    assert e.details[e.detail[[e.names[n] for n in e.name].index("aten::mm")]].dims == "[[4, 8], [8, 16]]"


def test_compressed_files_are_the_same_whatever_their_names(tmp_path):
    plain, packed = small(tmp_path), small(tmp_path, "rank-0.json.gz")
    renamed = tmp_path / "trace"
    renamed.write_bytes(packed.read_bytes())
    for file in (packed, renamed):
        assert np.array_equal(read_trace(file).events.start, read_trace(plain).events.start)


def test_truncated_traces_are_read_as_far_as_they_go(tmp_path):
    text = small(tmp_path).read_bytes()
    whole = len(read_trace(tmp_path / "rank-0.json").events)
    for cut in range(text.index(b"traceEvents") + 300, len(text) - 3, 97):
        (tmp_path / "cut.json").write_bytes(text[:cut])
        trace = read_trace(tmp_path / "cut.json")
        assert 0 < len(trace.events) <= whole
        assert any("ends early" in note for note in trace.notes), cut
    packed = gzip.compress(text * 1)
    (tmp_path / "cut.json.gz").write_bytes(packed[: len(packed) - 12])
    assert any("compressed data" in note for note in read_trace(tmp_path / "cut.json.gz").notes)


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", "[1, 2, 3]", '{"traceEvents": []}', '{"traceEvents": {"a": 1}}', "not json", '{"a": ', "[" * 200_000, "\x00\xff",
     '{"traceEvents": [{"ph": "X", "ts": "x"}, {"ph": "X", "ts": NaN, "dur": 1}, {"ph": "X", "ts": 1, "dur": -1}, null]}',
     '{"traceEvents": [{"ph": "X", "ts": 1e17, "dur": 1, "cat": "cpu_op"}, {"ph": "X", "ts": 1, "dur": 1e17, "cat": "cpu_op"}]}',
     '{"traceEvents": [{"ph": "X", "ts": 1, "dur": 5, "cat": "toplevel,devtools.timeline", "name": "RunTask", "pid": 1, "tid": 2}]}'],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, content):
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(MeshwrightError) as error:
        read_trace(file)
    assert error.value.code == "MW-EXPL-002"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "The file is empty"),
        (b'{"distributedInfo": {"rank": 0}, "traceEvents": [{"ph": "M", "name": "process_name"}]}', "on_trace_ready"),
        (b'{"version": "2.10", "pg_config": {}, "entries": []}', "--flight"),
        (pickle.dumps({"version": "2.10"}), "--flight"),
    ],
)
def test_a_file_without_events_says_why_and_what_to_do(tmp_path, content, says):
    (tmp_path / "rank_0.json").write_bytes(content)
    with pytest.raises(MeshwrightError) as error:
        read_trace(tmp_path / "rank_0.json")
    assert says in str(error.value)


def test_events_of_other_types_are_read_like_those_as_torch_writes_them(tmp_path):
    """One event that torch would not write: its batch is read value by value, and nothing else changes."""
    trace = HandMade()
    for i in range(40):
        trace.span(f"aten::op{i % 3}", i, i + 1, "cpu_op", **{"External id": i, "Input Dims": [[i, 8]]})
    plain = read_trace(trace.write(tmp_path)).events
    odd = [
        {"name": 7},
        {"args": None},
        {"pid": ["a"]},
        {"cat": 3},
        {"args": {"External id": "9"}},
        {"ts": "1"},
        {"dur": -1},
    ]
    for change in odd:
        trace.events.insert(20, trace.events[0] | {"ts": 1000} | change)
        read = read_trace(trace.write(tmp_path)).events
        del trace.events[20]
        assert len(read) == 40 + (change.keys().isdisjoint({"ts", "dur"})), change
        assert [read.names[n] for n in read.name][:40] == [plain.names[n] for n in plain.name], change
        assert [read.details[n] for n in read.detail][:40] == [plain.details[n] for n in plain.detail], change
        assert read.external.tolist()[:40] == plain.external.tolist()


def test_files_beyond_the_limit_are_named(tmp_path, monkeypatch):
    for rank in range(3):
        small(tmp_path, f"rank-{rank}.json", rank=rank)
    monkeypatch.setattr(folder, "MOST_FILES", 2)
    traces = read_traces([tmp_path])
    assert len(traces) == 2
    assert any("1 files after the first 2 were not read" in note for note in traces[0].notes)


def test_missing_files_and_folders_without_traces(tmp_path):
    for path, code in ((tmp_path / "none.json", "MW-EXPL-001"), (tmp_path, "MW-EXPL-003")):
        with pytest.raises(MeshwrightError) as error:
            read_traces([path])
        assert error.value.code == code


def test_the_number_of_events_is_bounded_and_the_rest_is_said(tmp_path):
    trace = read_trace(small(tmp_path), most_events=3)
    assert len(trace.events) == 3
    assert "more than 3 events" in trace.notes[0]


def test_hostile_names_stay_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MOST_TEXTS", 10)
    trace = HandMade()
    for i in range(100):
        trace.span(f"name {i} " + "x" * 10_000, i, i + 1, "cpu_op")
    e = read_trace(trace.write(tmp_path)).events
    assert len(e.names) <= 12
    assert max(map(len, e.names)) <= reader.LONGEST_TEXT
    assert "(other names)" in e.names


def test_memory_at_the_peak_is_that_of_the_device(tmp_path):
    trace = HandMade()
    trace.span("aten::mm", 0, 1, "cpu_op")
    for device, total in ((0, 900), (1, 500), (1, 700), (1, 300)):
        trace.events.append(
            {"ph": "i", "name": "[memory]", "ts": 1, "args": {"Device Type": device, "Total Allocated": total}}
        )
    assert read_trace(trace.write(tmp_path)).peak_bytes == 700


@pytest.mark.slow
def test_a_large_trace_takes_bounded_memory(tmp_path):
    """300 MB of distinct events: well under a tenth of their size in objects."""
    file, row = (
        tmp_path / "large.json",
        {
            "ph": "X",
            "cat": "cpu_op",
            "pid": 1,
            "tid": 1,
            "args": {"External id": 1, "Input Dims": [[4, 8], [8, 4]], "Input type": ["float", "float"]},
        },
    )
    with file.open("w") as out:
        out.write(
            '{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 1e9}'
        )
        text = json.dumps(row)[:-1]
        for i in range(1_500_000):
            out.write(f', {text}, "name": "aten::op{i % 200}", "ts": {i * 3}, "dur": 2}}')
        out.write("]}")
    assert file.stat().st_size > 250e6
    code = f"""
import resource, pathlib
from meshwright.explain.reader import read_trace
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
events = read_trace(pathlib.Path({str(file)!r})).events
print(len(events), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=os.environ, check=True
    )
    events, memory = map(int, done.stdout.split())
    assert events == 1_500_001
    assert memory < 600e6


def test_random_bytes_never_raise_anything_else(tmp_path):
    text, generator = bytearray(small(tmp_path).read_bytes()), random.Random(0)
    for _ in range(60):
        broken = bytearray(text)
        for _ in range(generator.randrange(1, 6)):
            broken[generator.randrange(len(broken))] = generator.randrange(256)
        (tmp_path / "broken.json").write_bytes(broken)
        with suppress(MeshwrightError):
            read_trace(tmp_path / "broken.json")


def test_a_group_without_a_description_is_read_although_torch_leaves_its_value_out(tmp_path, monkeypatch):
    """`"Process Group Description": ,` is no JSON (Kineto pull request 1119)."""
    trace = HandMade()
    for i in range(20):
        name = {"Process Group Description": "" if i % 2 else f"mesh {i}", "Process Group Name": "0"}
        trace.span(f"nccl:{i}", i, i + 1, **name, **{"Process Group Description ": "last"})
    file = trace.write(tmp_path)
    text = file.read_text().replace('"Process Group Description": "",', '"Process Group Description": ,')
    assert text.count('Description": ,') == 10
    file.write_text(text)
    for chunk in (1 << 22, 300, 7):
        monkeypatch.setattr(json_stream, "CHUNK", chunk)
        found = read_trace(file)
        assert len(found.events) == 20
        assert found.notes == ()


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["Qwen1.5-Chat__1016005.json"], [0]),  # not a rank
        (["worker7_step_12.1694128201553.pt.trace.json", "worker0_step_12.16941.pt.trace.json"], [0, 7]),
        (["rank1_trace.json", "b.json", "a.json"], [0, 1, 2]),
    ],
)
def test_a_rank_that_the_file_does_not_say_is_in_its_name_or_the_next_free_one(tmp_path, names, ranks):
    for name in names:
        path = small(tmp_path, name)
        content = json.loads(path.read_text())
        del content["distributedInfo"]
        path.write_text(json.dumps(content))
    traces = read_traces([tmp_path])
    assert [t.rank for t in traces] == ranks
    assert max(t.world for t in traces) == max(ranks) + 1


def test_files_that_are_not_used_are_named(tmp_path):
    small(tmp_path)
    small(tmp_path, "rank-0-later.json")
    (tmp_path / "rank-1.json").write_text("{}")
    notes = " ".join(read_traces([tmp_path])[0].notes)
    assert "another file of rank 0" in notes
    assert "rank-1.json' is not a profiler trace" in notes


def test_notes_that_are_not_shown_are_counted(tmp_path):
    small(tmp_path)
    for copy in range(50):
        small(tmp_path, f"rank-0-{copy}.json")
    notes = explain_traces(read_traces([tmp_path])).notes
    assert any("further notes on single ranks" in note for note in notes)


@pytest.mark.parametrize(
    "bad",
    [
        '{"ph": "M", "name": "thread_name", "args": ["x"]}',
        '{"ph": "X", "cat": "cpu_op", "ts": 1' + "0" * 400 + ', "dur": 1}',
        '{"ph": "X", "cat": "cpu_op", "ts": 1' + "0" * 5000 + ', "dur": 1}',
        '{"ph": "X", "cat": "kernel", "name": "nccl", "ts": 1, "dur": 1, "args": {"Collective name": "allreduce", '
        '"dtype": "Float", "Input Dims": "[[8 4], [4, 8]]"}}',
        '{"ph": "X", "cat": "kernel", "name": "nccl", "ts": 1, "dur": 1, "args": {"Collective name": "allreduce", '
        '"In msg nelems": 2305843009213693952, "dtype": "Float", "Process Group Ranks": "[\u00b2, 1]"}}',
    ],
)
def test_an_event_of_any_content_leaves_the_others_readable(bad, tmp_path):
    file = small(tmp_path)
    text = file.read_text().removesuffix("]}")
    file.write_text(f"{text}, {bad}]}}")
    e = explain_traces(read_traces([file]))
    assert {"gemm", "elementwise"} <= set(e.run.ranks[0].found.events.names)
