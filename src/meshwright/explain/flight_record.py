"""Read the flight records of a hung program: one file per rank with its last collectives, and stacks if there are any.

torch writes a record in three ways. All hold the same fields:

    rank_3, nccl_trace_rank_3     the pickle that the NCCL watchdog writes at a timeout (TORCH_FR_DUMP_TEMP_FILE + rank)
    _dump_fr_trace()              the same pickle, called in the process, for gloo and other backends too
    _dump_fr_trace_json()         JSON, without stack frames

Pickles are read as data (`pickle_data`). The kind of a file is known by its first bytes, its rank by the number after "rank" in its name
(rank_3_pid_812), else by the last one. What differs between versions of torch is translated here: `seq_id` became `collective_seq_id`, the
list of members is a text, JSON has no frames. gloo records neither members nor the times of start and end; its calls are `retired` once
they are done.
"""

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.describe.files import check_depth
from meshwright.errors import MeshwrightError, printable
from meshwright.explain.reader import NUMBERED
from meshwright.pickle_data import UnreadPickle, parse

LARGEST_RECORD = 256 * 2**20  # bytes; a record of 2,000 calls with stacks has 2 to 5 MB
MOST_FILES = 20_000
LARGEST_SIZE = 2**48
LATEST_NS, LONGEST_MS = 2**63, 1e12
INPUT_CUT = ("reduce_scatter", "_reduce_scatter", "all_reduce", "allreduce", "reduce", "broadcast", "send")
UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "coalesced")  # sizes may differ between ranks


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return printable(f"{self.function} ({self.file}:{self.line})")


class GroupKey(NamedTuple):
    """A process group: ranks give several groups one name, so its members belong to it where they are recorded."""

    name: str
    description: str
    members: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.description, len(self.members), self.members[:2]))  # not all: there are thousands

    def __str__(self) -> str:
        return f"group {self.name}" + (f" ({self.description})" if self.description not in ("", "undefined") else "")


class RecordedCall(NamedTuple):
    """One collective, send or receive that a rank issued."""

    operation: str  # as torch calls it: all_reduce, send 0->1
    group: GroupKey
    sequence: int
    elements: int  # of the side that must be equal on all ranks; -1 where it may differ
    dtype: str
    shapes: str
    created_ns: int
    started: bool  # on the device; for gloo: issued
    done: bool
    duration_ms: float
    p2p: bool
    frames: tuple[Frame, ...]

    @property
    def key(self) -> tuple[GroupKey, int]:
        return self.group, self.sequence

    def __str__(self) -> str:
        sizes = f", {self.shapes} {self.dtype}" if self.shapes else ""
        return f"{self.operation} number {self.sequence} of {self.group}{sizes}"


@dataclass(frozen=True)
class FlightRecord:
    """The record of one rank: its calls in the order in which they were issued."""

    rank: int
    file: str
    version: str
    calls: tuple[RecordedCall, ...]
    groups: tuple[GroupKey, ...]
    truncated: bool  # earlier calls were overwritten


@dataclass
class FlightFolder:
    """All records and stacks of a folder, and what was left out."""

    records: dict[int, FlightRecord] = field(default_factory=dict)
    stacks: dict[int, tuple[Frame, ...]] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)  # rank: why its record cannot be read
    notes: list[str] = field(default_factory=list)
    groups: dict[GroupKey, GroupKey] = field(default_factory=dict)  # one object for equal groups of all ranks


def read_folder(folder: Path) -> FlightFolder:
    """The records of a folder. Raises if there is none that can be read."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    except OSError as error:
        raise MeshwrightError(
            "MW-EXPL-010",
            f"'{folder}' is not a folder of flight records",
            why=str(error.strerror),
            fix=f"--flight {folder.parent}" if folder.is_file() else "the folder with a record of each rank",
        ) from None
    if len(names) > MOST_FILES:
        raise MeshwrightError(
            "MW-EXPL-010", f"'{folder}' has {len(names):,} files", why=f"At most {MOST_FILES:,} are read"
        )
    found = FlightFolder()
    for name in names:
        _read_file(folder / name, found)
    found.damaged = {rank: why for rank, why in found.damaged.items() if rank not in found.records}
    found.notes = [printable(note) for note in found.notes]
    found.notes += [f"the record of rank {rank} cannot be read: {why}" for rank, why in sorted(found.damaged.items())]
    if not found.records:
        raise MeshwrightError(
            "MW-EXPL-011",
            f"'{folder}' has no flight record that can be read",
            why="; ".join(found.notes[:3]) or "No file is a pickle or JSON with the rank at the end of its name",
            fix="TORCH_FR_BUFFER_SIZE=2000 TORCH_FR_DUMP_TEMP_FILE=DIR/rank_ (docs/trouble/hang.md)",
        )
    versions = sorted({record.version for record in found.records.values()})
    if len(versions) > 1:
        found.notes.append(f"the ranks wrote records of different versions ({', '.join(versions)}): different torch")
    return found


def _read_file(path: Path, found: FlightFolder) -> None:
    """Add one file to the folder's records, stacks or damaged files."""
    try:
        if path.stat().st_size > LARGEST_RECORD:
            found.notes.append(f"{path.name} is larger than {LARGEST_RECORD // 2**20} MiB: not read")
            return
        data = path.read_bytes()
    except OSError as error:
        found.notes.append(f"{path.name}: {error.strerror}")
        return
    after_word = NUMBERED.search(path.name)
    numbers = [after_word[1]] if after_word else re.findall(r"\d+", path.name)
    text = "" if data[:1] in (b"\x80", b"{") else data.decode("utf-8", "replace")
    is_stack = "most recent call first" in text or bool(re.search(r"^Thread \S+ \(", text, re.MULTILINE))
    if (text and not is_stack) or not data:
        found.notes.append(f"{path.name} is {'empty' if not data else 'neither a record nor a stack'}: not read")
        return
    if not numbers or len(numbers[-1]) > 7:
        found.notes.append(f"{path.name} has no rank in its name: not read")
        return
    rank = int(numbers[-1])
    if is_stack:
        found.stacks[rank] = main_stack(text)
        return
    try:
        table = parse(data) if data[:1] == b"\x80" else _json(data)
        record = _record(rank, path.name, table, found.groups)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        why = "it is truncated or damaged" if isinstance(error, UnreadPickle | json.JSONDecodeError) else str(error)
        found.damaged[rank] = printable(f"{path.name}: {why[:120]}")
        return
    if rank not in found.records or data[:1] == b"\x80":  # of two records the pickle has frames
        found.records[rank] = record


def _json(data: bytes) -> Any:
    return check_depth(json.loads(data), "record")


def _record(rank: int, name: str, table: Any, known: dict[GroupKey, GroupKey]) -> FlightRecord:
    """The record in a parsed file; raises where it has other fields."""
    if not isinstance(table, dict) or not isinstance(table.get("version"), str):
        raise ValueError("it has no version, so it is not a flight record")
    groups = {}
    for key, group in (table.get("pg_config") or {}).items():
        members = tuple(int(x) for x in re.findall(r"\d+", str(group.get("ranks", ""))))
        made = GroupKey(printable(str(group.get("name", key))), printable(str(group.get("desc", ""))), members)
        groups[str(key)] = known.setdefault(made, made)
    frames: dict[tuple[Any, ...], tuple[Frame, ...]] = {}
    entries = table.get("entries") or []
    calls = tuple(_call(entry, groups, frames) for entry in entries)
    truncated = bool(entries) and int(entries[0].get("record_id", 0)) > 0
    named = tuple(group for group in groups.values() if group.members)
    return FlightRecord(rank, name, table["version"], calls, named, truncated)


def _call(
    entry: dict[str, Any], groups: dict[str, GroupKey], seen: dict[tuple[Any, ...], tuple[Frame, ...]]
) -> RecordedCall:
    name, description = (printable(str(x)) for x in entry["process_group"])
    group = groups.get(name)
    if group is None or group.description != description:
        group = GroupKey(name, description)
    backend, _, operation = printable(str(entry["profiling_name"])).partition(":")
    p2p = bool(entry.get("is_p2p", False))
    sequence = entry["p2p_seq_id"] if p2p else entry.get("collective_seq_id", entry.get("seq_id", 0))
    side = "input" if operation.startswith(INPUT_CUT) else "output"
    shapes = [tuple(int(n) for n in shape) for shape in entry.get(f"{side}_sizes") or []]
    if any(not 0 <= n < LARGEST_SIZE for shape in shapes for n in shape):
        raise ValueError("it has a size that no tensor has")
    created, duration = int(entry.get("time_created_ns") or 0), float(entry.get("duration_ms") or 0.0)
    if not (abs(created) < LATEST_NS and abs(duration) < LONGEST_MS):
        raise ValueError("it has a time that no clock shows")
    elements = sum(math.prod(shape) for shape in shapes)
    uneven = p2p or operation.startswith(UNEVEN)
    state, retired = entry.get("state"), bool(entry.get("retired", False))
    stack = tuple((str(f["filename"]), int(f["line"]), str(f["name"])) for f in entry.get("frames") or [])
    return RecordedCall(
        operation,
        group,
        int(sequence),
        -1 if uneven else elements,
        " ".join(dict.fromkeys(str(x) for x in entry.get(f"{side}_dtypes") or [])),
        " ".join("×".join(map(str, shape)) or "scalar" for shape in shapes[:3]) + " …" * (len(shapes) > 3),
        created,
        retired or backend == "gloo" or state in ("started", "completed"),
        retired or state == "completed",
        duration,
        p2p,
        seen.setdefault(stack, tuple(Frame(*frame) for frame in stack)),
    )


FAULTHANDLER = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
PY_SPY = re.compile(r"^\s+(?P<function>\S.*) \((?P<file>[^()]+?):(?P<line>\d+)\)$")


def main_stack(text: str) -> tuple[Frame, ...]:
    """The stack of the main thread, innermost frame first, from the output of `py-spy dump` or of `faulthandler`."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if re.match(r"^(Current thread|Thread) ", line):
            threads.append((line, []))
        elif threads and (found := FAULTHANDLER.match(line) or PY_SPY.match(line)):
            threads[-1][1].append(Frame(found["file"], int(found["line"]), found["function"].strip()))
    by_sign = [frames for title, frames in threads if "MainThread" in title]
    by_root = [frames for _, frames in threads if frames and frames[-1].function == "<module>"]
    return tuple(next(iter((*by_sign, *by_root, *(frames for _, frames in threads[-1:]))), []))


def place(frames: Iterable[Frame]) -> str:
    """The innermost line that belongs to the user: not to torch, to another installed package or to Python."""
    frames = list(frames)
    for frame in frames:
        if not re.search(r"site-packages|dist-packages|/lib/python3|^<|[/\\]torch[/\\]|^torch[/\\]", frame.file):
            return str(frame)
    return str(frames[-1]) if frames else ""
