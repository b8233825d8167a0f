"""Read the trace of one rank from its file: Chrome's trace format as torch.profiler (Kineto) and our own profiles write it.

The file is streamed, plain or compressed, and only columns are kept, about 70 bytes per event. A file that ends early is read as far as it goes;
`RankTrace.notes` says so.
"""

import re
from array import array
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError, printable
from meshwright.explain.json_stream import EndOfText, JsonStream, open_text
from meshwright.explain.trace import (
    ANNOTATION,
    CATEGORIES,
    COLUMNS,
    KERNEL,
    NO_DETAIL,
    OTHER,
    Detail,
    EventTable,
    ListedGroup,
    RankTrace,
)
from meshwright.units import Json

MOST_EVENTS = 24_000_000  # of all ranks together
MOST_TEXTS = 400_000  # distinct names, or distinct details
LONGEST_TEXT = 400
TYPES = {"start": "d", "duration": "d", "category": "b"} | dict.fromkeys(("name", "thread", "detail"), "i")
NONE = -1
ABOUT = ("distributedInfo", "otherData", "baseTimeNanoseconds", "host_name", "deviceProperties")  # of the members
LATEST, LONGEST = 4e15, 1e14  # microseconds of a time and of a duration: their sums fit into 64 bits of nanoseconds
NUMBERED = re.compile(r"(?:rank|worker)[-_ ]?(\d{1,6})(?!\d)", re.IGNORECASE)  # in a file name


class Interned:
    """Distinct values and their numbers; beyond `MOST_TEXTS` all further ones share the last number."""

    def __init__(self, first: Any, rest: Any) -> None:
        self.numbers: dict[Any, int] = {first: 0}
        self.rest = self.numbers.setdefault(rest, len(self.numbers))

    def __getitem__(self, value: Any) -> int:
        number = self.numbers.get(value)
        if number is None:
            number = len(self.numbers)
            if number > MOST_TEXTS:
                return self.rest
            self.numbers[value] = number
        return number

    def values(self) -> tuple[Any, ...]:
        return tuple(self.numbers)


class EventColumns:
    """Collects the events of a file."""

    def __init__(self) -> None:
        self.columns: dict[str, array[Any]] = {name: array(TYPES.get(name, "q")) for name in COLUMNS}
        self.names, self.details = Interned("", "(other names)"), Interned(NO_DETAIL, NO_DETAIL)
        self.threads: dict[tuple[Any, Any], int] = {}
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.skipped = 0
        self.peak = {False: 0, True: 0}  # bytes allocated on the host, on a device

    def __len__(self) -> int:
        return len(self.columns["start"])

    def add(self, event: Any) -> None:
        if not isinstance(event, dict):
            self.skipped += 1
            return
        phase = event.get("ph")
        if phase == "X":
            self._add_span(event)
        elif phase == "M" and event.get("name") == "thread_name":
            arguments = event.get("args")
            if isinstance(arguments, dict) and len(self.thread_names) < MOST_TEXTS:
                self.thread_names[_place(event)] = str(arguments.get("name"))[:LONGEST_TEXT]
        elif phase in ("B", "E"):
            self.skipped += 1
        elif phase == "i" and event.get("name") == "[memory]":
            self._note_memory(event.get("args"))

    def _note_memory(self, arguments: Any) -> None:
        """Keep the largest "Total Allocated" of a device, or of the host if there is no device."""
        if isinstance(arguments, dict):
            on_device = arguments.get("Device Type") == 1
            self.peak[on_device] = max(self.peak[on_device], _whole(arguments.get("Total Allocated")))

    def _add_span(self, event: Json) -> None:
        start, duration, category = event.get("ts"), event.get("dur", 0.0), event.get("cat", "")
        arguments = event.get("args")
        if not _is_time(start) or not _is_time(duration) or not 0 <= duration < LONGEST:
            self.skipped += 1
            return
        if category == "Trace":  # the span of the whole recording
            return
        if not isinstance(arguments, dict):
            arguments = {}
        place = _place(event)
        thread = self.threads.setdefault(place, len(self.threads))
        kind = CATEGORIES.get(category, OTHER) if isinstance(category, str) else OTHER
        if category == "comm":  # our own profiles
            kind = KERNEL if self.thread_names.get(place, "").startswith("GPU") else ANNOTATION
        c, number = self.columns, arguments.get
        c["name"].append(self.names[str(event.get("name", ""))[:LONGEST_TEXT]])
        c["category"].append(kind)
        c["thread"].append(thread)
        c["start"].append(start)
        c["duration"].append(duration)
        c["correlation"].append(_whole(number("correlation")))
        c["external"].append(_whole(number("External id", number("external id"))))
        c["sequence"].append(_whole(number("Sequence number")))
        c["forward_thread"].append(_whole(number("Fwd thread id")))
        c["detail"].append(self.details[detail_of(arguments)] if arguments else 0)

    def table(self) -> tuple[EventTable, float]:
        """The events in order, and the profiler's time of their origin in microseconds."""
        start = np.frombuffer(self.columns["start"], np.float64) if len(self) else np.empty(0)
        origin = float(start.min()) if len(self) else 0.0
        nanoseconds = np.rint((start - origin) * 1000).astype(np.int64)
        duration = np.rint(np.frombuffer(self.columns["duration"], np.float64) * 1000).astype(np.int64)
        order = np.lexsort((-duration, nanoseconds))
        out: dict[str, NDArray] = {"start": nanoseconds[order], "duration": duration[order]}
        for name in COLUMNS:
            if name not in out:
                column = self.columns[name]
                out[name] = np.frombuffer(column, np.dtype(column.typecode))[order] if len(self) else np.empty(0, int)
        threads = tuple(self.thread_names.get(place, "") or f"thread {place[1]}" for place in self.threads)
        return EventTable(
            **out, names=tuple(map(printable, self.names.values())), threads=threads, details=self.details.values()
        ), origin


def _place(event: Json) -> tuple[str, str]:
    return str(event.get("pid"))[:100], str(event.get("tid"))[:100]


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) < LATEST  # false for nan


def _whole(value: Any) -> int:
    return value if type(value) is int and abs(value) < 1 << 62 else NONE


def detail_of(arguments: Json) -> Detail:
    """What an event says beside its times; one object for all events that say the same."""
    if "Input Dims" in arguments:
        dims, dtypes = arguments["Input Dims"], arguments.get("Input type", "")
        return Detail(str(dims)[:LONGEST_TEXT], str(dtypes)[:LONGEST_TEXT], **_collective(arguments))
    return Detail(**_collective(arguments)) if "Collective name" in arguments else NO_DETAIL


def _collective(arguments: Json) -> Json:
    if "Collective name" not in arguments:
        return {}
    elements = max(_whole(arguments.get("In msg nelems")), _whole(arguments.get("Out msg nelems")), 0)
    return {
        "collective": str(arguments["Collective name"])[:100],
        "elements": elements,
        "dtype": str(arguments.get("dtype", ""))[:40],
        "group": str(arguments.get("Process Group Name", ""))[:100],
        "ranks": ranks_in(str(arguments.get("Process Group Ranks", ""))),
    }


def ranks_in(text: str) -> tuple[int, ...]:
    """The ranks of "[0, 1, 2]"; none of a list that the profiler cut short ("[0, 1, ..., 7]")."""
    if not text.startswith("[") or "." in text:
        return ()
    parts = [part.strip() for part in text.strip("[]").split(",")]
    return tuple(int(part) for part in parts if part.isdecimal() and len(part) < 10)


def read_trace(path: Path, most_events: int = MOST_EVENTS) -> RankTrace:
    """The trace of one rank. Raises where the file is not a trace; a part of one is read, and its notes say so."""
    columns, about, notes = EventColumns(), dict[str, Any](), list[str]()
    found = False
    try:
        with open_text(path) as file:
            stream = JsonStream(file)
            if stream.next_character() == "[":
                found = True
                _fill(columns, stream, most_events, notes)
            else:
                for key in stream.members():
                    if key == "traceEvents" and stream.next_character() == "[":
                        found = True
                        if not _fill(columns, stream, most_events, notes):
                            break
                    else:
                        value = stream.value()
                        if key in ABOUT:
                            about[key] = value
    except EndOfText as end:
        notes.append(f"{end}; {len(columns):,} events before it were read")
    except OSError as error:
        raise MeshwrightError("MW-EXPL-001", f"cannot read '{path}'", why=error.strerror or str(error)) from error
    if not found or not len(columns):
        raise MeshwrightError(
            "MW-EXPL-002",
            f"'{path}' is not a profiler trace",
            why=notes[0] if notes and not found else "It has no list traceEvents with timed events",
            fix="export it with torch.profiler's export_chrome_trace",
        )
    if set(columns.columns["category"]) == {OTHER}:
        raise MeshwrightError(
            "MW-EXPL-002",
            f"'{path}' is not the trace of a program with torch",
            why="None of its events is an operator, an annotation or a kernel",
            fix="export it with torch.profiler's export_chrome_trace",
        )
    if columns.skipped:
        notes.append(f"{columns.skipped:,} events without a usable time were left out")
    return _trace(path, columns, about, notes)


def _fill(columns: EventColumns, stream: JsonStream, most: int, notes: list[str]) -> bool:
    """Add the events of the list that begins here; False if there are too many."""
    add = columns.add
    for event in stream.elements():
        add(event)
        if len(columns) >= most:
            notes.append(f"more than {most:,} events: those after them were not read")
            return False
    return True


def _trace(path: Path, columns: EventColumns, about: Json, notes: list[str]) -> RankTrace:
    events, origin = columns.table()
    distributed = about.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    own = about.get("otherData")
    own = own if isinstance(own, dict) else {}
    rank = _whole(distributed.get("rank", own.get("rank")))
    if rank < 0:
        match = NUMBERED.search(path.name)
        rank = int(match[1]) if match else NONE
    base = about.get("baseTimeNanoseconds", 0)
    if isinstance(own.get("origin_s"), float):
        base = own["origin_s"] * 1e9
    clock = float(base) if isinstance(base, int | float) and abs(base) < LATEST * 1000 else 0.0
    devices = about.get("deviceProperties")
    return RankTrace(
        printable(str(path)),
        rank,
        max(_whole(distributed.get("world_size")), rank + 1),
        events,
        round(clock + origin * 1000),
        printable(str(about.get("host_name", ""))[:200]),
        process_groups(distributed),
        tuple(d for d in devices if isinstance(d, dict))[:64] if isinstance(devices, list) else (),
        (),
        columns.peak[True] or columns.peak[False],
        tuple(notes),
    )


def process_groups(distributed: Json) -> dict[str, ListedGroup]:
    """The process groups that the profiler lists, by name."""
    config = distributed.get("pg_config")
    out = {}
    for group in config if isinstance(config, list) else ():
        if isinstance(group, dict) and isinstance(group.get("ranks"), list):
            ranks = tuple(r for r in group["ranks"] if type(r) is int)
            out[str(group.get("pg_name"))[:100]] = ListedGroup(str(group.get("pg_desc", ""))[:100], ranks)
    return out
