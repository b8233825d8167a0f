"""The peak of a memory snapshot, by category: snapshots in torch's layout whose content is known, and bad files."""

import json
import lzma
import pickle
import random
import re
from contextlib import suppress
from pathlib import Path

import pytest

from meshwright.cli import run_command
from meshwright.errors import MeshwrightError
from meshwright.explain import memory_snapshot
from meshwright.explain.memory_snapshot import is_snapshot, read_snapshot

MIB = 2**20
SNAPSHOTS = Path(__file__).parent / "snapshots"
TORCH = "/usr/lib/python3/dist-packages/torch"


def stack(*frames):
    return [{"name": name, "filename": file, "line": line} for name, file, line in frames]


MAIN = ("<module>", "/home/ada/train.py", 30)
BUILD = stack(("__init__", f"{TORCH}/nn/modules/linear.py", 106), ("__init__", "/home/ada/model.py", 5), MAIN)
FORWARD = stack(("forward", f"{TORCH}/nn/modules/linear.py", 125), ("forward", "/home/ada/model.py", 9), MAIN)
BACKWARD = []  # the threads of autograd have no Python stack
ADAM = stack(("_init_group", f"{TORCH}/optim/adamw.py", 90), ("step", f"{TORCH}/optim/adamw.py", 200), MAIN)
ZERO = stack(("zero_grad", f"{TORCH}/optim/optimizer.py", 900), MAIN)


class Device:
    """An allocator that writes down what it does."""

    def __init__(self):
        self.trace, self.live, self.address = [], {}, 2**40

    def event(self, action, address, size, frames):
        event = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": len(self.trace)}
        self.trace.append(event | ({"frames": frames} if frames is not None else {}))

    def alloc(self, size, frames):
        self.address += 2**24
        self.live[self.address] = (size, frames)
        self.event("alloc", self.address, size, frames)
        return self.address

    def free(self, address, frames):
        size, _ = self.live.pop(address)
        self.event("free_requested", address, size, frames)
        self.event("free_completed", address, size, frames)

    def snapshot(self, reserved):
        blocks = [
            {
                "address": a,
                "size": -(-size // 512) * 512,
                "requested_size": size,
                "state": "active_allocated",
                "frames": frames,
            }
            for a, (size, frames) in self.live.items()
        ]
        blocks.append({"address": 1, "size": 3 * MIB, "requested_size": 0, "state": "inactive", "frames": []})
        segment = {
            "device": 0,
            "address": 2**40,
            "total_size": reserved,
            "stream": 0,
            "segment_type": "large",
            "blocks": blocks,
        }
        return {"segments": [segment], "device_traces": [self.trace]}


def train(steps=2, device=None):
    """Two parameters of 1 MiB; each step two activations of 4 MiB, a temporary of 2 MiB, gradients and Adam's states."""
    device = device or Device()
    for _ in range(2):
        device.alloc(MIB, BUILD)
    device.event("segment_alloc", 2**40, 64 * MIB, BUILD)
    for step in range(steps):
        activations = [device.alloc(4 * MIB, FORWARD) for _ in range(2)]
        device.free(device.alloc(2 * MIB, FORWARD), FORWARD)
        gradients = [device.alloc(MIB, BACKWARD) for _ in range(2)]
        working = device.alloc(500, BACKWARD)
        for address in (*activations, working):
            device.free(address, BACKWARD)
        for _ in range(4 * (step == 0)):
            device.alloc(MIB, ADAM)
        for address in gradients:
            device.free(address, ZERO)
    return device


def written(tmp_path, snapshot):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    return path


def test_the_peak_is_found_and_its_categories_add_up(tmp_path):
    (report,) = read_snapshot(written(tmp_path, train().snapshot(64 * MIB)))
    assert report.allocated == (2 + 4 + 8 + 2) * MIB + 512  # of the second step, when the last gradient is there
    assert report.by_category == {
        "parameters": 2 * MIB, "gradients": 2 * MIB, "optimizer": 4 * MIB, "activations": 8 * MIB, "working": 512,
        "slack": report.reserved - report.allocated,
    }  # fmt: skip
    assert sum(report.by_category.values()) == report.reserved == 64 * MIB
    assert report.places[0][:3] == ("activations", "forward (/home/ada/model.py:9)", 8 * MIB)
    assert (report.moment, report.largest_free, report.notes) == ("peak", 3 * MIB, ())


@pytest.mark.parametrize("second_activations", [False, True])
def test_a_record_that_begins_late_has_the_same_peak(tmp_path, second_activations):
    """The ring buffer overwrote the beginning: what was there before is known by what is freed later or still there."""
    device = train()
    whole = read_snapshot(written(tmp_path, device.snapshot(64 * MIB)))[0]
    middle = next(i for i, e in enumerate(device.trace) if e["frames"] == ADAM) + 4
    if second_activations:  # the record begins between the two activations of the second step
        middle = next(i for i, e in enumerate(device.trace) if i > middle and e["frames"] == FORWARD) + 1
    late = device.snapshot(64 * MIB) | {"device_traces": [device.trace[middle:]]}
    for block in late["segments"][0]["blocks"]:
        block["frames"] = []
    (report,) = read_snapshot(written(tmp_path, late))
    assert (report.allocated, report.reserved) == (whole.allocated, whole.reserved)
    assert report.by_category["before"] == (6 + 4 * second_activations) * MIB
    assert "began after" in report.notes[0]


def test_out_of_memory_is_the_moment_that_counts(tmp_path):
    device = train()
    held = device.alloc(5 * MIB, FORWARD)
    device.event("oom", 0, 50 * MIB, FORWARD)
    device.free(held, MAIN and BACKWARD)
    (report,) = read_snapshot(written(tmp_path, device.snapshot(64 * MIB)))
    assert (report.moment, report.asked, report.allocated) == ("out of memory", 50 * MIB, 11 * MIB)


def test_without_stacks_and_without_history_the_report_says_what_is_missing(tmp_path):
    device = train()
    device.trace = [{k: v for k, v in event.items() if k != "frames"} for event in device.trace]
    device.live = {address: (size, []) for address, (size, _) in device.live.items()}
    (report,) = read_snapshot(written(tmp_path, device.snapshot(64 * MIB)))
    assert report.allocated == 16 * MIB + 512
    assert set(report.by_category) == {"other", "slack"}
    assert "no stacks" in report.notes[0]
    (state,) = read_snapshot(written(tmp_path, train().snapshot(64 * MIB)["segments"]))  # memory_snapshot()
    assert (state.moment, state.allocated) == ("snapshot", 6 * MIB)
    assert state.by_category["parameters"] == 2 * MIB
    assert "no history" in state.notes[0]


@pytest.mark.parametrize("name", ["late", "no_stacks"])
def test_a_real_snapshot_has_the_peak_that_torch_counted(tmp_path, name):
    """Three steps of a small Llama on an H200 with torch 2.11. Late: recorded from the second step on. torch counts the rests of blocks that it
    does not split, which a record does not tell: up to 1.5% here."""
    max_allocated, max_reserved, parameters, states, at_end = (
        753_552_384,
        819_986_432,
        84_166_656,
        168_333_312,
        324_737_536,
    )
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(lzma.decompress((SNAPSHOTS / f"snapshot_{name}.pickle.xz").read_bytes()))
    assert is_snapshot(path)
    (report,) = read_snapshot(path)
    assert report.reserved == max_reserved
    assert report.allocated == pytest.approx(max_allocated, rel=0.015)
    assert sum(report.by_category.values()) == max_reserved
    if name == "late":
        assert report.by_category["before"] == pytest.approx(at_end, rel=0.01)
        assert report.by_category["before"] > parameters + states  # and the workspaces of cuBLAS
        assert "gradients" not in report.by_category  # the peak is at the beginning of backward
        logits = 4 * 512 * 8192 * 4  # in fp32, made by the script and kept for backward
        assert report.by_category["activations"] > 200 * MIB + logits
        assert report.by_category["working"] == pytest.approx(2 * logits, rel=0.02)  # their gradients
        assert {p.place.partition(" ")[0] for p in report.places} <= {"forward", "main", ""}


def test_explain_knows_a_snapshot_by_its_content(tmp_path, capsys):
    run_command("explain", [str(written(tmp_path, train().snapshot(64 * MIB)))])
    shown = capsys.readouterr().out
    assert "activations" in shown
    assert "model.py:9" in shown
    examples = Path(__file__).parents[2] / "examples"
    for plan in ("llama3-70b-64xh100.toml", "settings/torchtitan-llama3-70b.toml"):
        words = ["--plan", str(examples / plan), "--cluster", "dgx-h100"]
        run_command("explain", [str(tmp_path / "snapshot.pickle"), *words])
        assert "predicted" in capsys.readouterr().out
    assert not is_snapshot(tmp_path / "none")


def test_a_snapshot_beside_a_trace_is_on_its_page(tmp_path, capsys):
    trace, page = Path(__file__).parent / "traces" / "gpu-item-rank-0.json.gz", tmp_path / "page.html"
    snapshot = written(tmp_path, train().snapshot(64 * MIB))
    run_command("explain", [str(trace), str(snapshot), "--html", str(page)])
    shown = capsys.readouterr().out
    assert "Where the step went" in shown
    assert "activations" in shown
    rows = re.search(r'"columns":\s*\[\["category".*?"rows":\s*(\[.*?\}\])', page.read_text())[1]
    held = {category: numbers for category, *numbers in (row["cells"] for row in json.loads(rows))}
    assert sum(gib for gib, _ in held.values()) == pytest.approx(64 / 1024)
    assert all(held[category][1] > 0 for category in ("parameters", "activations"))


def test_bad_files_raise_one_error(tmp_path, monkeypatch):
    good = pickle.dumps(train().snapshot(64 * MIB))
    draw = random.Random(0)
    for _ in range(40):
        changed = bytearray(good)
        changed[draw.randrange(len(changed))] = draw.randrange(256)
        path = tmp_path / "bad.pickle"
        path.write_bytes(changed[: draw.choice((len(changed), len(changed) // 2))])
        with suppress(MeshwrightError):
            read_snapshot(path)
    monkeypatch.setattr(memory_snapshot, "LARGEST_SNAPSHOT", 100)
    with pytest.raises(MeshwrightError, match="max_entries"):
        read_snapshot(written(tmp_path, train().snapshot(64 * MIB)))
