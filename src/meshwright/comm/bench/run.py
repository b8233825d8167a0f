"""One rank of a bench, and the collector that makes a `Bench` of what the ranks send.

bench_rank       what every rank runs, whether the local launcher started it (`meshwright bench --ranks 4`) or torchrun or Slurm did
Collector        receives the messages of rank 0; `result` is complete or, after an interruption, what was measured until then

The options of `meshwright bench`, checked before any rank starts.

Hosts, devices, links and interfaces as the system reports them: `nvidia-smi topo -m`, sysfs, network interfaces, NUMA nodes.

A report is plain data, for the result of a bench and for the causes that `calibrate` names: which link joins two GPUs (NV18, PIX, SYS),
which interface is fastest and which one gloo would use, whether an RDMA device is there at all.
Nothing here fails: what a system does not report is left out.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from meshwright.calibrate.points import IDLE_SHARE, Bench, DevicePoint, Point, RankInfo
from meshwright.comm.bench import collectives
from meshwright.comm.bench.backends import BACKENDS, OPERATIONS, BenchContext, Session, session, usable
from meshwright.comm.bench.collectives import DEVICE, LARGEST, PAIR, SMALLEST, Emit, Sweep
from meshwright.comm.bench.device import measure_device
from meshwright.comm.bench.operations import rate_cases
from meshwright.comm.bench.timing import busy_cores
from meshwright.errors import MeshwrightError, unknown
from meshwright.units import Json, parse_bytes, parse_seconds

LEAST_BUDGET_S, MOST_BUDGET_S = 1.0, 86_400.0


def sweep_of(backends: str, operations: str, smallest: str, largest: str, budget: str) -> Sweep:
    """The sweep that these words describe; empty words take the defaults."""
    sizes = [int(parse_bytes(text)) for text in (smallest or SMALLEST, largest or LARGEST)]
    if not 4 <= sizes[0] <= sizes[1] <= 2**40:
        what, why = (
            f"message sizes from {smallest} to {largest} are not a range",
            "The smallest is at least 4 bytes, the largest at most 1 TiB",
        )
        raise MeshwrightError("MW-BENCH-006", what, why=why, fix="--min-size 1KiB --max-size 1GiB")
    seconds = parse_seconds(budget)
    if not LEAST_BUDGET_S <= seconds <= MOST_BUDGET_S:
        what = f"--budget {budget} is not a time from {LEAST_BUDGET_S:.0f} s to one day"
        raise MeshwrightError("MW-BENCH-006", what, fix="--budget 60s")
    names = tuple(words(backends, BACKENDS, "backend", "--backends"))
    everything = [PAIR, *OPERATIONS, DEVICE]
    known = words(operations, everything, "operation", "--operations") or everything
    return Sweep(names, tuple(known), sizes[0], sizes[1], seconds)


def words(text: str, known: Iterable[str], what: str, option: str) -> list[str]:
    """The words of a list separated by commas; an unknown one is refused."""
    choices = list(known)
    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found:
        if word not in choices:
            raise unknown("MW-BENCH-006", what, word, choices, option + " {}")
    return list(dict.fromkeys(found))


SYS = Path("/sys")
COMMAND_S = 10.0  # a driver that does not answer must not stop a bench
MARKER = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")


def detect(root: Path = SYS) -> Json:
    """Return the facts of one host: devices, interfaces, links."""
    found = {
        "interfaces": interfaces(root),
        "rdma": rdma_devices(root),
        "numa": numa_nodes(root),
        "cpu": cpu_model(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0,
        "gpu_links": gpu_links(command_output("nvidia-smi", "topo", "-m")),
    }
    return {name: value for name, value in found.items() if value}


def interfaces(root: Path = SYS) -> dict[str, Json]:
    """Network interfaces by name: rate in bytes/s where the driver says it, state, MTU, and whether it is real hardware."""
    found = {}
    for folder in sorted(_entries(root / "class" / "net")):
        speed = _number(folder / "speed")  # Mbit/s; -1 where unknown
        found[folder.name] = {
            "state": _text(folder / "operstate") or "unknown",
            "mtu": int(_number(folder / "mtu") or 0),
            "virtual": not (folder / "device").exists(),
            **({"bytes_per_s": speed * 1e6 / 8} if speed and speed > 0 else {}),
        }
    return found


def rdma_devices(root: Path = SYS) -> dict[str, str]:
    """RDMA devices (InfiniBand or RoCE) with the rate of their first port, such as mlx5_0: 400 Gb/sec (4X NDR)."""
    return {
        folder.name: _text(folder / "ports" / "1" / "rate") or "unknown rate"
        for folder in sorted(_entries(root / "class" / "infiniband"))
    }


def numa_nodes(root: Path = SYS) -> dict[str, str]:
    """NUMA nodes with their cores."""
    nodes = [n for n in _entries(root / "devices" / "system" / "node") if re.fullmatch(r"node\d+", n.name)]
    return {node.name: _text(node / "cpulist") for node in sorted(nodes)}


def cpu_model() -> str:
    """The name of the processor, where Linux reports one."""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.M)
    return found[1].strip() if found else ""


def gpu_links(text: str) -> list[list[str]]:
    """The matrix of `nvidia-smi topo -m` between GPUs: X, NV18 (18 NVLinks), PIX, PXB, PHB, NODE or SYS (through the CPUs)."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0"), [])
    count = len([name for name in header if re.fullmatch(r"GPU\d+", name)])
    matrix = [row[1 : 1 + count] for row in rows if row and row != header and re.fullmatch(r"GPU\d+", row[0])]
    complete = len(matrix) == count and all(len(r) == count and all(map(MARKER.fullmatch, r)) for r in matrix)
    return matrix if complete else []


def command_output(*command: str) -> str:
    """Return the output of a command; empty if it is missing, fails or takes too long."""
    path = shutil.which(command[0])
    if not path:
        return ""
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:  # a missing file; an interface that is down refuses to tell its speed
        return ""


def _number(path: Path) -> float | None:
    try:
        return float(_text(path))
    except ValueError:
        return None


LOOK_S, LOOKS = 0.25, 2  # how long and how often a bench looks whether its machine is idle
DEVICE_PART, MOST_DEVICE_S = 0.25, 20.0  # of the budget, for the device


def bench_rank(context: BenchContext, sweep: Sweep) -> None:
    """Measure on this rank; rank 0 sends the messages."""
    measure_all(session(context.device), sweep, context.send)


def measure_all(here: Session, sweep: Sweep, emit: Emit) -> None:
    """Say where the ranks run, then measure. Messages are sent by rank 0."""
    tell = emit if here.rank == 0 else (lambda message: None)
    start = time.monotonic()
    first = here.hosts.index(here.hosts[here.rank]) == here.rank
    reports = here.gather(json.dumps({**detect(), "busy_cores": load(here)} if first else None))
    detected = {host: json.loads(text) for host, text in zip(here.hosts, reports, strict=True) if text != "null"}
    tell({"ranks": [info.model_dump() for info in here.ranks], "topology": detected, "libraries": versions()})
    one_each = len({(info.host, str(k)) for k, info in enumerate(here.ranks)}) == here.world
    backends = []
    for backend in sweep.backends or (("nccl",) if here.device.type == "cuda" else ("gloo",)):
        if reason := usable(backend, here.device, one_each):
            tell({"skipped": f"{backend}: {reason}"})
        else:
            backends.append(backend)
    memory = here.smallest(min(sweep.memory_bytes, device_memory(here.device)))
    device_s = min(DEVICE_PART * sweep.budget_s, MOST_DEVICE_S) if DEVICE in sweep.operations else 0.0
    if device_s:
        tell({"left_s": sweep.budget_s - (time.monotonic() - start), "doing": "the device"})
        device_points(here, device_s, lambda points: tell({"device": [p.model_dump(mode="json") for p in points]}))
    rest = replace(
        sweep, backends=tuple(backends), memory_bytes=memory, budget_s=sweep.budget_s - (time.monotonic() - start)
    )
    if here.world > 1:
        collectives.run(here, rest, emit)
    else:
        tell({"skipped": "collectives: one rank has no other rank to exchange with"})


def load(here: Session) -> float:
    """Cores of this host that other processes use before the measurements; the other ranks wait meanwhile."""
    return busy_cores(IDLE_SHARE * here.ranks[here.rank].cores, LOOK_S, LOOKS)


def device_points(here: Session, seconds: float, so_far: Callable[[list[DevicePoint]], object]) -> None:
    """The operations of a training step on this rank's device. `so_far` gets all that is measured, again and again."""
    dtype, rates = ("bf16", []) if here.device.type == "cuda" else ("fp32", list(rate_cases(torch.float32)))
    so_far(measure_device(str(here.device), here.synchronization, dtype, seconds, here.rank, so_far, seconds, rates))


def device_memory(device: torch.device) -> float:
    """Half of the free memory of a GPU; no limit on a CPU, whose memory the sweep's own limit counts."""
    return torch.cuda.mem_get_info(device)[0] / 2 if device.type == "cuda" else float("inf")


def versions() -> dict[str, str]:
    """Versions of the libraries that the figures depend on."""
    found = {"torch": str(torch.__version__), "threads": str(torch.get_num_threads())}
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        with contextlib.suppress(Exception):  # a torch without NCCL has no version of it
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


class Collector:
    """Receives the messages of a bench. `show` is called with (seconds left, what is measured)."""

    def __init__(self, show: Callable[[float, str], None] = lambda left, doing: None) -> None:
        self.show = show
        self.about: Json = {}
        self.points: list[Point] = []
        self.device: list[DevicePoint] = []
        self.skipped: list[str] = []

    def __call__(self, message: Json) -> None:
        match message:
            case {"left_s": left, "doing": doing}:
                self.show(left, doing)
            case {"point": fields}:
                self.points.append(Point(**fields))
            case {"device": points}:
                self.device = [DevicePoint(**fields) for fields in points]
            case {"skipped": text}:
                self.skipped.append(text)
            case {"ranks": ranks, "topology": detected, "libraries": libraries}:
                known = tuple(RankInfo(**info) for info in ranks)
                self.about = {"ranks": known, "topology": detected, "libraries": libraries}
            case _:
                raise MeshwrightError("MW-CLI-001", f"a rank sent an unknown message: {sorted(message)}")

    def result(self, interrupted: str = "") -> Bench:
        """Return the measurements; `interrupted` says why they are incomplete."""
        return Bench(
            made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            state="interrupted" if interrupted else "complete",
            why=interrupted,
            skipped=tuple(self.skipped),
            points=tuple(self.points),
            device=tuple(self.device),
            **self.about,
        )
