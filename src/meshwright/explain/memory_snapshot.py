"""What filled a GPU at its peak, from a memory snapshot of torch.

`torch.cuda.memory._dump_snapshot()` writes a pickle with every block that the allocator holds, and the last allocations and frees before it
(`_record_memory_history`). It is read as data. The events are replayed from the first to the last:

    live at the start   blocks that are freed, or still there at the end, without having been allocated in the record
    live later          + what is allocated, − what is freed (`free_requested`: from then on torch does not count it)
    reserved            − and + segments, so that the end is what the snapshot holds

A block belongs to a category by the stack that allocated it and the one that freed it:

    parameters     by the code that builds modules or moves them
    optimizer      inside the optimizer's step, and kept after it
    activations    inside a forward and freed in backward or later, or by any other code and freed in backward
    gradients      in backward (its threads have no Python stack), and kept after it
    working        freed in the phase that allocated it
    before         before the record began: with a record that starts late, parameters and states are here
    other          by any other code: batches, losses, metrics
    slack          reserved and not allocated: fragments and cached blocks

Without stacks all but the first and the last row is unknown, and the report says so. Sizes are requested ones rounded up to 512 bytes, as
torch counts them except for the rests of large blocks that it does not split.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.explain.flight_record import LARGEST_SIZE, Frame, place
from meshwright.pickle_data import UnreadPickle, parse

LARGEST_SNAPSHOT = 512 * 2**20  # bytes; reading takes up to five times as much memory, and a minute per 200 MB
ROUNDING = 512
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "working", "before", "other")
SHOWN_PLACES = 40
BUILDS = {
    "__init__",
    "_apply",
    "reset_parameters",
    "to_empty",
    "load_state_dict",
    "_load_from_state_dict",
    "init_weights",
}
OPTIMIZER_FILE = re.compile(r"[/\\_.]optim(izer)?s?[/\\_.]", re.IGNORECASE)


class LivePlace(NamedTuple):
    """Bytes of one category that one line of code holds at the peak."""

    category: str
    place: str
    bytes: int
    blocks: int


@dataclass(frozen=True)
class MemoryReport:
    """The memory of one device at its peak."""

    device: int
    moment: str  # "peak", "out of memory" or "snapshot": without a history only the state at its end is known
    allocated: int
    reserved: int
    by_category: dict[str, int]  # bytes; the sum is `reserved`
    places: tuple[LivePlace, ...]
    asked: int = 0  # bytes of the allocation that failed
    largest_free: int = 0  # of the blocks at the end of the snapshot
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "places": [p._asdict() for p in self.places]}


def is_snapshot(path: Path) -> bool:
    """Whether a file is a memory snapshot, by the first key of its pickle."""
    if not path.is_file():  # opening a pipe would wait for a writer
        return False
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError:
        return False
    return head[:1] == b"\x80" and (b"segments" in head or b"device_traces" in head or b"total_size" in head)


def read_snapshot(path: Path) -> list[MemoryReport]:
    """A report for each device that the snapshot knows, the fullest first."""
    try:
        size = path.stat().st_size
        if size > LARGEST_SNAPSHOT:
            raise refused(
                path,
                f"It has {size / 2**20:,.0f} MiB; at most {LARGEST_SNAPSHOT // 2**20} are read",
                "record fewer events: _record_memory_history(max_entries=100000)",
            )
        root = parse(path.read_bytes())
        table = {"segments": root} if isinstance(root, list) else root  # memory_snapshot() is the list alone
        if not isinstance(table, dict) or not isinstance(table.get("segments"), list):
            raise refused(path, "It has no segments")
        traces = table.get("device_traces") or []
        segments: dict[int, list[Any]] = {i: [] for i, trace in enumerate(traces) if trace}
        for segment in table["segments"]:
            segments.setdefault(int(segment.get("device", 0)), []).append(segment)
        reports = [
            _report(device, of_device, traces[device] if device < len(traces) else [])
            for device, of_device in sorted(segments.items())
        ]
    except OSError as error:
        raise refused(path, str(error.strerror)) from None
    except UnreadPickle:
        raise refused(path, "It is truncated, or has more than plain data") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        if isinstance(error, MeshwrightError):
            raise
        raise refused(path, f"{type(error).__name__}: {str(error)[:120]}") from None
    if not reports:
        raise refused(path, "No device has segments or events")
    return sorted(reports, key=lambda r: -r.allocated)


def refused(path: Path, why: str, fix: str = "torch.cuda.memory._dump_snapshot(FILE)") -> MeshwrightError:
    return MeshwrightError("MW-EXPL-020", f"'{path.name}' is not a memory snapshot that can be read", why=why, fix=fix)


class _Block(NamedTuple):
    """An allocation: its rounded size, its stack, and whether the record began later."""

    size: int
    frames: Any  # the list in the snapshot: converted only if it is live at the peak
    before: bool


def _rounded(size: int) -> int:
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


def _events(trace: list[Any]) -> Iterator[tuple[str, int, int, Any]]:
    for event in trace:
        size = int(event["size"])
        if not 0 <= size < LARGEST_SIZE:
            raise ValueError("it has a size that no block has")
        yield event["action"], event.get("addr", 0), size, event.get("frames") or ()


def _start(segments: list[Any], trace: list[Any]) -> tuple[dict[int, _Block], int]:
    """What was allocated before the first event, and the bytes that were reserved."""
    live: dict[int, _Block] = {}
    last: dict[int, bool] = {}  # by address: whether its last event was an allocation
    change = 0
    for action, address, size, _ in _events(trace):
        if action == "alloc":
            last[address] = True
        elif action == "free_requested":
            if address not in last:
                live[address] = _Block(_rounded(size), (), True)
            last[address] = False
        else:
            change += {"segment_alloc": size, "segment_map": size, "segment_free": -size, "segment_unmap": -size}.get(
                action, 0
            )
    for block in _blocks(segments):
        if block["state"] == "active_allocated" and block["address"] not in last:
            live[block["address"]] = _Block(int(block["size"]), block.get("frames") or (), True)
    return live, sum(int(s["total_size"]) for s in segments) - change


def _blocks(segments: list[Any]) -> Iterator[dict[str, Any]]:
    """All blocks; old versions of torch leave out addresses, which follow from the sizes."""
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            yield {"address": address, **block}
            address += block["size"]


def _report(device: int, segments: list[Any], trace: list[Any]) -> MemoryReport:
    live, reserved = _start(segments, trace)
    allocated = sum(block.size for block in live.values())
    peak, peak_at, peak_reserved, failed = allocated, -1, reserved, 0
    sizes = {address: block.size for address, block in live.items()}
    for index, (action, address, size, _) in enumerate(_events(trace)):
        if action == "alloc":
            allocated += _rounded(size) - sizes.get(address, 0)
            sizes[address] = _rounded(size)
        elif action == "free_requested":
            allocated -= sizes.pop(address, 0)
        elif action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
        elif action == "oom" and not failed:
            peak, peak_at, peak_reserved, failed = allocated, index, reserved, size
        if allocated > peak and not failed:
            peak, peak_at, peak_reserved = allocated, index, reserved
    _replay(live, trace, peak_at)
    categories, places, stacks = _categories(live, _freed_in(trace, peak_at))
    notes = list(_notes(trace, stacks, live))
    if peak_reserved < peak:
        notes.append("the segments hold less than the record allocates: the snapshot is incomplete")
    peak_reserved = max(peak_reserved, peak)
    categories["slack"] = peak_reserved - peak
    free = [int(b["size"]) for b in _blocks(segments) if b["state"] == "inactive"]
    return MemoryReport(
        device,
        "out of memory" if failed else "peak" if trace else "snapshot",
        peak,
        peak_reserved,
        {name: categories[name] for name in (*CATEGORIES, "slack") if categories[name]},
        places,
        failed,
        max(free, default=0),
        tuple(notes),
    )


def _replay(live: dict[int, _Block], trace: list[Any], until: int) -> None:
    """Apply the events up to one of them to the live blocks."""
    for _, (action, address, size, frames) in zip(range(until + 1), _events(trace), strict=False):
        if action == "alloc":
            live[address] = _Block(_rounded(size), frames, False)
        elif action == "free_requested":
            live.pop(address, None)


def _freed_in(trace: list[Any], peak_at: int) -> dict[int, str]:
    """By address: the phase in which the block that was live at the peak is freed first after it."""
    phases: dict[int, str] = {}
    seen: dict[int, str] = {}  # by the identity of a stack, which many events share
    for event in trace[peak_at + 1 :]:
        if event["action"] == "free_requested" and event["addr"] not in phases:
            frames = event.get("frames") or ()
            phases[event["addr"]] = seen.setdefault(id(frames), phase_of(_frames(frames)))
    return phases


def _frames(raw: Any) -> tuple[Frame, ...]:
    return tuple(Frame(str(f["filename"]), int(f["line"]), str(f["name"])) for f in raw)


def phase_of(frames: tuple[Frame, ...]) -> str:
    """build, forward, backward, optimizer or other: what ran, by its stack, innermost frame first. Recomputation is forward."""
    if not frames:
        return "backward"
    for frame in frames:
        if frame.function in ("forward", "_call_impl", "_wrapped_call_impl"):
            return "forward"
        if frame.function == "zero_grad":
            return "other"
        if OPTIMIZER_FILE.search(frame.file) or frame.function in ("optimizer_step", "_optimizer_step"):
            return "optimizer"
        if frame.function in ("_engine_run_backward", "backward"):
            return "backward"
        if frame.function in BUILDS:
            return "build"
    return "other"


def category_of(made: str, freed: str | None) -> str:
    """The category of a block by the phases that allocated and freed it (nothing: it was kept)."""
    if made == "other":  # a loss outside of modules is kept for backward too
        return "activations" if freed == "backward" else "other"
    if made == freed:
        return "working"
    return {"build": "parameters", "forward": "activations", "backward": "gradients", "optimizer": "optimizer"}[made]


def _categories(live: dict[int, _Block], freed: dict[int, str]) -> tuple[Counter[str], tuple[LivePlace, ...], bool]:
    """Bytes by category, the lines that hold most, and whether there are stacks."""
    stacks = any(block.frames for block in live.values())
    totals: Counter[str] = Counter()
    held: dict[tuple[str, str], list[int]] = {}
    known: dict[int, tuple[str, str]] = {}
    for address, block in live.items():
        if id(block.frames) not in known:
            frames = _frames(block.frames)
            known[id(block.frames)] = (phase_of(frames), place(frames))
        made, line = known[id(block.frames)]
        if block.before and (not block.frames or made == "other"):
            category = "before"
        else:
            category = category_of(made, freed.get(address)) if stacks else "other"
        totals[category] += block.size
        here = held.setdefault((category, line), [0, 0])
        here[0] += block.size
        here[1] += 1
    largest = sorted(held.items(), key=lambda item: -item[1][0])[:SHOWN_PLACES]
    return totals, tuple(LivePlace(*key, *value) for key, value in largest), stacks


def _notes(trace: list[Any], stacks: bool, live: dict[int, _Block]) -> Iterator[str]:
    if not trace:
        yield "no history was recorded: this is the state when the snapshot was written, not the peak (_record_memory_history)"
    if not stacks and live:
        yield "no stacks were recorded, so blocks have no category: _record_memory_history(context='all', stacks='python')"
    elif any(block.before and not block.frames for block in live.values()):
        yield "the record began after some allocations: they have no stack"
