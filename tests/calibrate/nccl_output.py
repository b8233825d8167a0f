"""Outputs of nccl-tests as its versions print them (src/util.cu and src/common.cu of NVIDIA/nccl-tests), with times of our choice."""

import json
from collections.abc import Callable, Sequence

SIZES = tuple(4**k for k in range(6, 16))  # 4 KiB to 1 GiB
# busbw / algbw on n ranks, as doc/PERFORMANCE.md of nccl-tests has them; redop and root as the programs print them.
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "sendrecv": lambda n: 1.0,
    "broadcast": lambda n: 1.0,
}
COLUMNS = {"all_reduce": ("sum", -1), "reduce_scatter": ("sum", -1), "all_gather": ("none", -1), "alltoall": ("none", -1),
           "sendrecv": ("sum", -1), "broadcast": ("none", 0)}  # fmt: skip
OLD = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "alltoall",
    "sendrecv",
)  # without a root, so that `old_text` prints them
DEVICE = "NVIDIA H100 80GB HBM3"


def number(value: float, width: int) -> str:
    """A number in `width` characters with two digits after the point, or fewer where it is large."""
    digits = len(str(int(value))) if value >= 1 else 0
    return f"{value:{width}.{min(2, max(0, width - 1 - digits))}f}"


def body(program: str, ranks: int, size: int, microseconds: float, wrong: str = "0") -> str:
    algbw = size / microseconds / 1e3
    busbw = algbw * FACTORS[program](ranks)
    return f"  {number(microseconds, 7)}  {number(algbw, 6)}  {number(busbw, 6)}  {wrong:>6}"


def text(
    program: str,
    hosts: Sequence[str],
    seconds: Callable[[int], float],
    *,
    names_program: bool = True,
    prefix: str = "",
    sizes: Sequence[int] = SIZES,
) -> str:
    """The table of one run with a rank for each entry of `hosts`; in-place takes 1% longer."""
    n, (reduction, root) = len(hosts), COLUMNS[program]
    lines = [
        "# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809",
        f"# Collective test starting: {program}_perf",
    ] * names_program
    lines += [
        f"# nThread 1 nGpus 1 minBytes {sizes[0]} maxBytes {sizes[-1]} step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0",
        "#",
        "# Using devices",
        *(
            f"#  Rank {k:2} Group  0 Pid {4000 + k:6} on {host:>10} device {hosts[:k].count(host):2} [0000:{16 * k:02x}:00] {DEVICE}"
            for k, host in enumerate(hosts)
        ),
        "#",
        "#                                                              out-of-place                       in-place          ",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       ",
    ]  # fmt: skip
    for size in sizes:
        count = size // 4 // (n if program in ("all_gather", "reduce_scatter", "alltoall") else 1)
        row = f"{size:12}  {count:12}  {'float':>8}  {reduction:>6}  {root:6}"
        lines.append(
            row + body(program, n, size, seconds(size) * 1e6) + body(program, n, size, seconds(size) * 1.01e6, "N/A")
        )
    average = sum(FACTORS[program](n) * size / seconds(size) / 1e9 for size in sizes) / len(sizes)
    lines += ["# Out of bounds values : 0 OK", f"# Avg bus bandwidth    : {average:g} ", "#", ""]
    return "\n".join(prefix + line for line in lines)


def old_text(program: str, hosts: Sequence[str], seconds: Callable[[int], float]) -> str:
    """Version 2.0 to 2.12: no groups, no root, and no redop in the tests that reduce nothing."""
    n, reduction = len(hosts), COLUMNS[program][0]
    redop, shown = ("", "") if reduction == "none" else ("   redop", f"  {reduction:>6}")
    lines = [
        "# nThread 1 nGpus 8 minBytes 4096 maxBytes 1073741824 step: 4(factor) warmup iters: 5 iters: 20 validation: 1 ",
        *(
            f"#   Rank {k:2} Pid {4000 + k:6} on {host:>10} device {k:2} [0x1a] Tesla V100-SXM3-32GB"
            for k, host in enumerate(hosts)
        ),
        f"#       size         count    type{redop}     time   algbw   busbw  error     time   algbw   busbw  error",
    ]
    for size in SIZES:
        cells = body(program, n, size, seconds(size) * 1e6, "1e-07") + body(
            program, n, size, seconds(size) * 1e6, "0e+00"
        )
        lines.append(f"{size:12}  {size // 4:12}  {'float':>6}{shown}{cells}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 123.456 ", ""])


def as_json(program: str, hosts: Sequence[str], seconds: Callable[[int], float], gpus_per_process: int = 1) -> str:
    """The file of `-J`: one device for each process."""
    n, (reduction, root) = len(hosts), COLUMNS[program]
    devices = [{"rank": k, "group": 0, "pid": 1, "hostname": host, "device": 0, "device_hex": "0000:1a:00", "device_info": DEVICE}
               for k, host in enumerate(hosts) if k % gpus_per_process == 0]  # fmt: skip
    results = []
    for size in SIZES:
        algbw = size / seconds(size) / 1e9
        timed = {
            "time": round(seconds(size) * 1e6, 6),
            "alg_bw": round(algbw, 6),
            "bus_bw": round(algbw * FACTORS[program](n), 6),
            "nwrong": 0.0,
        }
        results.append({"size": size, "count": size // 4, "type": "float", "redop": reduction, "root": f"{root:6}", "out_of_place": timed,
                        "in_place": timed, "actual_iterations": 20, "experiment_name": ""})  # fmt: skip
    document = {
        "version": 2, "start_time": "2026-01-02 03:04:05", "args": [f"./build/{program}_perf", "-J", "out.json"], "env": ["PATH=/bin"],
        "nccl_version": 22809,
        "config": {"nthreads": 1, "ngpus": gpus_per_process, "devices": devices}, "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"}, "average_bus_bandwidth": {"bandwidth": 1.0, "okay": "unchecked"},
        "errors": [], "end_time": "2026-01-02 03:05:05",
    }  # fmt: skip
    return json.dumps(document, separators=(",", ":"))
