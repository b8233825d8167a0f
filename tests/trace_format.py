"""The trace-event format: required fields of each phase, and errors that Perfetto does not draw."""

REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid"},
    "M": {"name", "ph", "pid", "args"},
    "s": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "C": {"name", "ph", "ts", "pid", "args"},
}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def problems(trace):
    """All violations of the format in a trace."""
    found = []
    if not isinstance(trace.get("traceEvents"), list):
        return ["traceEvents is not a list"]
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        found.append("displayTimeUnit")
    for e in trace["traceEvents"]:
        missing = REQUIRED.get(e.get("ph"), {"a known phase"}) - set(e)
        if missing:
            found.append(f"{e}: lacks {sorted(missing)}")
            continue
        if not all(isinstance(e[k], int) for k in ("pid", "tid") if k in e):
            found.append(f"{e}: pid and tid are integers")
        if not all(isinstance(e[k], int | float) and e[k] >= 0 for k in ("ts", "dur") if k in e):
            found.append(f"{e}: ts and dur are numbers from 0 up, in microseconds")
        if e["ph"] == "M" and (e["name"] not in METADATA or not ({"name", "sort_index"} & set(e["args"]))):
            found.append(f"{e}: unknown metadata")
        if e["ph"] == "C" and not all(isinstance(v, int | float) for v in e["args"].values()):
            found.append(f"{e}: counters are numbers")
        if e["ph"] == "f" and e.get("bp") != "e":
            found.append(f"{e}: an arrow's end must bind to the slice around it")
    return found or crossing(trace["traceEvents"]) + loose_arrows(trace["traceEvents"])


def crossing(events):
    """Spans of one thread that overlap without nesting."""
    found = []
    threads: dict = {}
    for e in events:
        if e["ph"] == "X":
            threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for thread, spans in threads.items():
        open_ends: list[float] = []
        for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= start + 1e-2:
                open_ends.pop()
            if open_ends and end > open_ends[-1] + 1e-2:
                found.append(f"{thread}: {start}..{end} crosses a span that ends at {open_ends[-1]}")
            open_ends.append(end)
    return found


def loose_arrows(events):
    """Arrows that lack an end, run backward in time, or end outside all spans."""
    spans = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    found = [f"arrow {i} has one end" for i in set(starts) ^ set(ends)]
    found += [f"arrow {i} runs backward" for i in set(starts) & set(ends) if ends[i]["ts"] < starts[i]["ts"]]
    for e in [*starts.values(), *ends.values()]:
        if not any((p, t) == (e["pid"], e["tid"]) and a - 1e-2 <= e["ts"] <= b + 1e-2 for p, t, a, b in spans):
            found.append(f"{e} is on no span")
    return found
