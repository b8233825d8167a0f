"""Read the trace of one rank from its file: Chrome's trace format as torch.profiler (Kineto) and our own profiles write it.

The file is streamed, plain or compressed, and only columns are kept, about 70 bytes per event. A file that ends early is read as far as it goes;
`RankTrace.notes` says so.
"""

import gc
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError, printable
from meshwright.explain.json_stream import EndOfText, JsonStream, open_text
from meshwright.explain.trace import (
    CATEGORIES,
    COLUMNS,
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
LONGEST_TEXT, LONGEST_VALUE = 400, 2000  # characters: of a name or of shapes, and of what is kept to find its number
TYPES = {"start": "d", "duration": "d", "category": "b"} | dict.fromkeys(("name", "thread", "detail"), "i")
NONE = -1
# Column → key of the arguments
NUMBERS = {"correlation": "correlation", "sequence": "Sequence number", "forward_thread": "Fwd thread id"}
ABOUT = ("distributedInfo", "otherData", "baseTimeNanoseconds", "host_name", "deviceProperties")  # of the members
LATEST, LONGEST = 4e15, 1e14  # microseconds of a time and of a duration: their sums fit into 64 bits of nanoseconds
NUMBERED = re.compile(r"(?:rank|worker)[-_ ]?(\d{1,6})(?!\d)", re.IGNORECASE)  # in a file name


class Interned(dict[Any, int]):
    """Numbers of distinct values in the order in which they are first looked up; beyond `MOST_TEXTS` all further ones share that of the last reserved
    one. `key` shortens a value: values with the same key have one number."""

    def __init__(self, *reserved: Any, key: Callable[[Any], Any] = lambda value: value) -> None:
        super().__init__()
        self.key, self.beyond = key, len(reserved) - 1
        self.numbers: dict[Any, int] = {value: number for number, value in enumerate(reserved)}

    def __missing__(self, value: Any) -> int:
        key = self.key(value)
        full = len(self.numbers) > MOST_TEXTS
        number = self.numbers.get(key, self.beyond) if full else self.numbers.setdefault(key, len(self.numbers))
        if len(self) < MOST_TEXTS and len(str(value)) < LONGEST_VALUE:
            self[value] = number
        return number


class EventColumns:
    """Collects the events of a file."""

    def __init__(self) -> None:
        self.columns: dict[str, array[Any]] = {name: array(TYPES.get(name, "q")) for name in COLUMNS}
        self.names = Interned("", "(other names)", key=lambda name: name[:LONGEST_TEXT])
        self.details = Interned(NO_DETAIL, key=lambda facts: Detail(*facts))
        self.threads = Interned(NONE, key=lambda place: tuple(str(part)[:100] for part in place))
        self.thread_names: dict[tuple[str, ...], str] = {}
        self.skipped = 0
        self.peak = {False: 0, True: 0}  # bytes allocated on the host, on a device

    def __len__(self) -> int:
        return len(self.columns["start"])

    def add(self, events: list[Any]) -> None:
        """Add the events of a part of the document: those as torch writes them all at once, column by column; others after a look at each value."""
        number, events = len(events), [event for event in events if isinstance(event, dict)]
        self.skipped += number - len(events)
        # Without the event that spans the whole recording
        spans = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
        for event in events if len(spans) < len(events) else ():
            self._note(event)
        try:
            columns = self._columns(spans)
        except (TypeError, KeyError, AttributeError, OverflowError):
            usable = [event for event in map(usable_span, spans) if event]
            self.skipped += len(spans) - len(usable)
            columns = self._columns(usable)
        for name, column in columns.items():
            self.columns[name].extend(column)

    def _columns(self, spans: list[Json]) -> dict[str, "array[Any]"]:
        """The columns of some events with times; raises where a value is not as torch writes it."""
        abouts, names, threads, details = [event["args"] for event in spans], self.names, self.threads, self.details
        categories, places = [event["cat"] for event in spans], [(event["pid"], event["tid"]) for event in spans]
        start, duration = (array("d", [event[key] for event in spans]) for key in ("ts", "dur"))
        times = np.array([start, duration])
        if not (np.abs(times[0]) < LATEST).all() or not ((times[1] >= 0) & (times[1] < LONGEST)).all():
            raise OverflowError
        out = {
            "start": start,
            "duration": duration,
            "external": array("q", [about.get("External id", about.get("external id", NONE)) for about in abouts]),
            "name": array("i", [names[event["name"]] for event in spans]),
            "thread": array("i", [threads[place] for place in places]),
            "detail": array("i", [details[facts_of(about)] if about else 0 for about in abouts]),
        }
        if "comm" in categories:  # our own profiles
            categories = [self._category(*event) for event in zip(categories, places, strict=True)]
        out["category"] = array("b", [CATEGORIES.get(category, OTHER) for category in categories])
        return out | {name: array("q", [about.get(key, NONE) for about in abouts]) for name, key in NUMBERS.items()}

    def _category(self, category: str, place: tuple[Any, Any]) -> str:
        on_device = self.thread_names.get(self.threads.key(place), "").startswith("GPU")
        return category if category != "comm" else "kernel" if on_device else "user_annotation"

    def _note(self, event: Json) -> None:
        """Keep the name of a thread, or the memory in use; count an event in two parts, which are not read."""
        phase, arguments = event.get("ph"), event.get("args")
        if phase == "M" and event.get("name") == "thread_name":
            if isinstance(arguments, dict) and len(self.thread_names) < MOST_TEXTS:
                place = self.threads.key((event.get("pid"), event.get("tid")))
                self.thread_names[place] = str(arguments.get("name"))[:LONGEST_TEXT]
        elif phase in ("B", "E"):
            self.skipped += 1
        elif phase == "i" and event.get("name") == "[memory]" and isinstance(arguments, dict):
            # The largest of a device, or of the host if there is no device
            on_device = arguments.get("Device Type") == 1
            self.peak[on_device] = max(self.peak[on_device], _whole(arguments.get("Total Allocated")))

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
        return EventTable(
            **out, names=tuple(map(printable, self.names.numbers)), details=tuple(self.details.numbers)
        ), origin


def usable_span(event: Json) -> Json:
    """An event with values of the types that torch writes; empty if its times cannot be used."""
    start, duration = event.get("ts"), event.get("dur", 0.0)
    if not _is_time(start) or not _is_time(duration) or not 0 <= duration < LONGEST:
        return {}
    about = event.get("args")
    about = about if isinstance(about, dict) else {}
    category = event.get("cat")
    place = {key: str(event.get(key)) for key in ("pid", "tid")}
    numbers = {key: _whole(about.get(key, about.get(key.lower()))) for key in (*NUMBERS.values(), "External id")}
    return {
        "ts": start,
        "dur": duration,
        "cat": category if isinstance(category, str) else "",
        "name": str(event.get("name", "")),
        "args": about | numbers,
    } | place


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) < LATEST  # false for nan


def _whole(value: Any) -> int:
    return value if type(value) is int and abs(value) < 1 << 62 else NONE


def facts_of(about: Json) -> tuple[Any, ...]:
    """What an event says beside its times: the fields of a `Detail`."""
    shapes = ("", "")
    if "Input Dims" in about:
        shapes = str(about["Input Dims"])[:LONGEST_TEXT], str(about.get("Input type", ""))[:LONGEST_TEXT]
    if "Collective name" not in about:
        return shapes
    elements = max(_whole(about.get("In msg nelems")), _whole(about.get("Out msg nelems")), 0)
    return (
        *shapes,
        str(about["Collective name"])[:100],
        elements,
        str(about.get("dtype", ""))[:40],
        str(about.get("Process Group Name", ""))[:100],
        ranks_in(str(about.get("Process Group Ranks", ""))),
    )


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
    others: set[str] = set()
    try:
        with open_text(path) as file, no_garbage_collection():
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
                        others.add(key)
                        if key in ABOUT:
                            about[key] = value
    except EndOfText as end:
        notes.append(f"{end}; {len(columns):,} events before it were read")
    except OSError as error:
        raise MeshwrightError("MW-EXPL-001", f"cannot read '{path}'", why=error.strerror or str(error)) from error
    if not found or not len(columns):
        why, fix = _without_events(path, others, notes)
        raise MeshwrightError("MW-EXPL-002", f"'{path}' is not a profiler trace", why=why, fix=fix)
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


def _without_events(path: Path, keys: set[str], notes: list[str]) -> tuple[str, str]:
    """Why a file has no events, and what to do: by its first bytes, and the keys of the document."""
    with path.open("rb") as file:
        head = file.read(1)
    if not head:
        return "The file is empty", "a program that ended while it wrote a trace must write it again"
    if head == b"\x80" or {"version", "entries"} <= keys:
        return "It is a pickle, or a flight record", f"meshwright explain --flight {path.parent}"
    if keys.intersection(ABOUT):
        why = "The profiler recorded no step: a schedule drops its active steps when its next cycle begins"
        return why, "export it in on_trace_ready=lambda p: p.export_chrome_trace(FILE)"
    why = notes[0] if notes else "It has no list traceEvents with timed events"
    return why, "export it with torch.profiler's export_chrome_trace"


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Parsed values have no cycles: looking for them takes a fifth of the time of reading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fill(columns: EventColumns, stream: JsonStream, most: int, notes: list[str]) -> bool:
    """Add the events of the list that begins here; False if there are too many."""
    for events in stream.batches():
        while events:
            room = most - len(columns)
            columns.add(events[:room])
            events = events[room:]
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
