"""The output of nccl-tests (and of rccl-tests, which prints the same) as a `Bench`: its table, or the JSON file of newer versions.

    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
    #        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        33554432       8388608     float     sum      -1    212.4  157.98  276.46      0    211.9  158.35  277.11      0

`size` is n, the full buffer, as in `points`; of the two groups of columns, the first (out-of-place) is read. The launcher may write a prefix before
each line (`[1,0]<stdout>:`, `0:`), and NCCL its log between them. Older versions do not print which collective they ran. Then the name in a
command line, the name of the file, or busbw/algbw identifies it: the quotient is 2(P−1)/P for an all-reduce, (P−1)/P for a reduce-scatter, 1 for a
send. The same quotient shows whether the number of ranks is the one that the file says (nccl-tests, doc/PERFORMANCE.md).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.calibrate.points import LARGEST_FILE, Bench, Point, RankInfo, bus_factor
from meshwright.describe.files import check_depth, read_text
from meshwright.errors import MeshwrightError

TOOL = "nccl-tests"
ANY_ROOT = -1  # what nccl-tests prints as the root of a collective that has none
# By program: the operation, whether it reduces, whether it has a root.
PROGRAMS = {
    "all_reduce": ("all-reduce", True, False), "all_gather": ("all-gather", False, False),
    "reduce_scatter": ("reduce-scatter", True, False), "alltoall": ("all-to-all", False, False),
    "sendrecv": ("point-to-point", True, False), "broadcast": ("broadcast", False, True), "reduce": ("reduce", True, True),
    "gather": ("gather", False, True), "scatter": ("scatter", False, True),
}  # fmt: skip
DTYPES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "double": "fp64"}
ROUNDING = 0.006  # GB/s: bandwidths are printed with two digits after the point

HEADER = re.compile(r"#\s+size\s+count\s+type\s+(.*)$", re.MULTILINE)
RANK = re.compile(
    r"#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.*)$", re.MULTILINE
)
ROW = re.compile(
    r"(?<![\w.#])(\d+)[ \t]+(\d+)[ \t]+(float|half|double|bfloat16|u?int\d+|f\w*8_?e\dm\d)[ \t]+(\S.*)$", re.MULTILINE
)
TIMESTAMP = re.compile(r"\s\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
WRONG = re.compile(r"# Out of bounds values\s*:\s*(\d+)")
PROGRAM = re.compile(rf"(?<![a-z_])({'|'.join(PROGRAMS)}|hypercube|alltoallv)_perf\b")
JSON_START = re.compile(r'\s*\{\s*"version"\s*:\s*\d+\s*,\s*"start_time"')
VERSION = re.compile(r"# nccl-tests version (\S+)")


@dataclass(frozen=True)
class NcclRow:
    """One size: n in bytes, microseconds, and the two bandwidths in GB/s."""

    size: int
    dtype: str
    reduction: str
    root: int
    time: float
    algbw: float
    busbw: float


def read_result(path: str | Path) -> Bench:
    """The result of `meshwright bench --json`, or the output of one run of nccl-tests."""
    text = read_text(path, LARGEST_FILE)
    of_nccl_tests = HEADER.search(text) or "# nThread " in text or JSON_START.match(text)
    return read_nccl_tests(text, str(path)) if of_nccl_tests else Bench.of_json(text, str(path))


def read_nccl_tests(text: str, name: str) -> Bench:
    """The measured points of one run of one test; a file with several runs, or with a part of one, is refused."""
    if text.lstrip().startswith("{"):
        return from_json(text, name)
    headers = HEADER.findall(text)
    if len(headers) > 1:
        raise unreadable(
            name, f"It holds {len(headers)} tables", "write each test to a separate file; build nccl-tests with MPI=1"
        )
    wrong = WRONG.findall(text)
    if not headers or not wrong:
        raise unreadable(name, "It ends before the line '# Out of bounds values'", "run the test again to its end")
    ranks = [RankInfo(rank=int(rank), host=host, device=device.strip()) for rank, _, host, device in RANK.findall(text)]
    if len({group or "0" for _, group, _, _ in RANK.findall(text)}) > 1:
        raise unreadable(
            name, "Several groups ran at the same time", "unset NCCL_TESTS_SPLIT and NCCL_TESTS_SPLIT_MASK"
        )
    rows = [text_row(m, headers[0].split(), name) for m in ROW.finditer(text)]
    version = VERSION.findall(text)
    return bench_of(rows, ranks, PROGRAM.findall(text), int(wrong[0]), name, version[0] if version else "")


def text_row(match: re.Match[str], columns: list[str], name: str) -> NcclRow:
    """A line of the table. Values are counted from the right: old versions leave the columns redop and root empty."""
    if "time" not in columns:
        raise unreadable(
            name, "It has the time of the host (option -C), not that of the operation", "run the test without -C"
        )
    first = columns.index("time")
    shown = [column for column in columns[first:] if column != "timestamp"]
    words = TIMESTAMP.sub("", match[4]).split()
    labels, values = words[: -len(shown)], words[-len(shown) :]
    try:
        if len(values) < len(shown):
            raise ValueError
        time, algbw, busbw = (float(values[shown.index(column)]) for column in ("time", "algbw", "busbw"))
        root = int(labels[1]) if len(labels) > 1 else ANY_ROOT
    except ValueError:
        raise unreadable(name, f"The line of {match[1]} bytes is incomplete", "run the test again to its end") from None
    return NcclRow(int(match[1]), match[3], labels[0] if labels else "", root, time, algbw, busbw)


def from_json(text: str, name: str) -> Bench:
    """The JSON file of `-J FILE`. It lists one device for each process, which has nthreads × ngpus ranks."""
    try:
        document = check_depth(json.loads(text), name)
        config, version = document["config"], str(document["version"])
        per_process = int(config["nthreads"]) * int(config["ngpus"])
        devices = [device for device in config["devices"] for _ in range(per_process)]
        ranks = [
            RankInfo(rank=k, host=device["hostname"], device=device["device_info"]) for k, device in enumerate(devices)
        ]
        rows = [json_row(row) for row in document["results"]]
        wrong, program = int(document["out_of_bounds"]["count"]), PROGRAM.findall(Path(document["args"][0]).name)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        if isinstance(error, MeshwrightError):
            raise
        if "cpu_time" in text:
            raise unreadable(
                name, "It has the time of the host (option -C), not that of the operation", "run the test without -C"
            ) from None
        why = f"It has no {error}" if isinstance(error, KeyError) else "It is not complete"
        raise unreadable(name, why, "run the test again to its end") from None
    return bench_of(rows, ranks, program, wrong, name, f"(JSON version {version})", str(document.get("start_time", "")))


def json_row(row: dict[str, Any]) -> NcclRow:
    shown = row["out_of_place"] or row["in_place"]
    times = (float(shown[name]) for name in ("time", "alg_bw", "bus_bw"))
    return NcclRow(int(row["size"]), str(row["type"]), str(row["redop"]), int(row["root"]), *times)


def bench_of(
    rows: Sequence[NcclRow],
    ranks: Sequence[RankInfo],
    programs: Sequence[str],
    wrong: int,
    name: str,
    version: str,
    made: str = "",
) -> Bench:
    """The rows as points, after the checks that text and JSON share."""
    count = len(ranks)
    if wrong:
        raise unreadable(
            name,
            f"nccl-tests found {wrong} wrong values: the GPUs, the links or NCCL compute wrong results",
            "repair that first",
        )
    if sorted(info.rank for info in ranks) != list(range(count)):
        raise unreadable(
            name,
            "Its ranks are not numbered 0, 1, 2, …",
            "build nccl-tests with MPI=1, and give all lines of its output",
        )
    rows = [row for row in rows if row.size and row.time > 0]
    if count < 2 or not rows:
        raise unreadable(
            name, f"It has {count} ranks and {len(rows)} measured sizes", "measure at least 2 ranks and 2 sizes"
        )
    program = program_of(rows, count, programs, name)
    operation = PROGRAMS[program][0]
    # In sendrecv_perf each rank sends to the next one: as many transfers at once as ranks
    ring = count > 2 and operation == "point-to-point"
    points = tuple(
        Point(
            median_s=row.time * 1e-6, low_s=row.time * 1e-6, high_s=row.time * 1e-6, samples=1, operation=operation, backend="nccl",
            ranks=tuple(range(count)), bytes=row.size, dtype=DTYPES.get(row.dtype, row.dtype), concurrent=count if ring else 1,
        )
        for row in rows
    )  # fmt: skip
    return Bench(tool=TOOL, made=made, ranks=tuple(ranks), points=points, libraries={f"{TOOL} {program}_perf": version})


def program_of(rows: Sequence[NcclRow], count: int, named: Sequence[str], name: str) -> str:
    """The test that ran: what the file says, else what its name says, else the only one with these columns. It must agree with the columns."""
    row = max(rows, key=lambda row: row.algbw)
    candidates = [program for program in PROGRAMS if agrees(program, row, count)]
    spelled = re.sub(r"[^a-z]", "", Path(name).stem.lower().replace("all-to-all", "alltoall"))
    from_name = [program for program in PROGRAMS if program.replace("_", "") in spelled]
    programs = list(dict.fromkeys(named)) or [max(from_name, key=len)] if named or from_name else candidates
    if len(programs) == 1 and programs[0] in candidates:
        return programs[0]
    valid, fix = list(PROGRAMS), "give the whole output of one run"
    if len(programs) > 1:
        why = f"It names several tests: {', '.join(programs)}" if named else "It does not say which test ran"
        valid, fix = candidates, "save the output of each test under its name, such as all_gather_perf.txt"
    elif programs and programs[0] not in PROGRAMS:
        why = f"{programs[0]}_perf has no point in the cost model"
    else:
        quotient = f"busbw / algbw = {row.busbw / row.algbw:.3g}" if row.algbw else "the columns redop and root"
        why = f"{quotient} is not that of {programs[0] + '_perf' if programs else 'any test'} on {count} ranks"
    raise unreadable(name, why, fix, tuple(f"{program}_perf" for program in valid))


def agrees(program: str, row: NcclRow, count: int) -> bool:
    """Whether a row has the columns of a program: its bandwidths (within their rounding), its reduction and its root."""
    operation, reduces, rooted = PROGRAMS[program]
    rounding = 3 * max(ROUNDING, 1e-4 * row.busbw)  # of both numbers; from 1000 GB/s on with one digit less
    if abs(row.busbw - bus_factor(operation, count) * row.algbw) > rounding or (row.root == ANY_ROOT) == rooted:
        return False
    return not row.reduction or (row.reduction != "none") == reduces or program == "sendrecv"


def unreadable(name: str, why: str, fix: str, valid: tuple[str, ...] = ()) -> MeshwrightError:
    return MeshwrightError(
        "MW-BENCH-003", f"'{name}' is no complete output of one run of nccl-tests", why=why, valid=valid, fix=fix
    )
