"""One rank of a bench, and the collector that makes a `Bench` of what the ranks send.

bench_rank       what every rank runs, whether the local launcher started it (`meshwright bench --ranks 4`) or torchrun or Slurm did
Collector        receives the messages of rank 0; `result` is complete or, after an interruption, what was measured until then
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from meshwright.calibrate.points import IDLE_SHARE, Bench, DevicePoint, Point, RankInfo
from meshwright.comm.bench import collectives, topology
from meshwright.comm.bench.backends import usable
from meshwright.comm.bench.collectives import DEVICE, Emit, Sweep
from meshwright.comm.bench.device import measure_device
from meshwright.comm.bench.host_cases import rate_cases
from meshwright.comm.bench.interference import busy_cores
from meshwright.comm.bench.session import Session, session
from meshwright.comm.bench.slowdown import measure_slowdown
from meshwright.errors import MeshwrightError

LOOK_S, LOOKS = 0.25, 2  # how long and how often a bench looks whether its machine is idle
DEVICE_PART, MOST_DEVICE_S = 0.25, 20.0  # of the budget, for the device


class Context(Protocol):
    """What the local launcher gives a rank (`training.rank.RankContext`)."""

    @property
    def device(self) -> str: ...

    @property
    def send(self) -> Callable[[Any], None]: ...


def bench_rank(context: Context, sweep: Sweep) -> None:
    """Measure on this rank; rank 0 sends the messages."""
    measure_all(session(context.device), sweep, context.send)


def measure_all(here: Session, sweep: Sweep, emit: Emit) -> None:
    """Say where the ranks run, then measure. Messages are sent by rank 0."""
    tell = emit if here.rank == 0 else (lambda message: None)
    start = time.monotonic()
    first = here.hosts.index(here.hosts[here.rank]) == here.rank
    reports = here.gather(json.dumps({**topology.detect(), "busy_cores": load(here)} if first else None))
    detected = {host: json.loads(text) for host, text in zip(here.hosts, reports, strict=True) if text != "null"}
    tell({"ranks": [info.model_dump() for info in here.ranks], "topology": detected, "libraries": versions()})
    one_each = len({(info.host, str(k)) for k, info in enumerate(here.ranks)}) == here.world
    asked = sweep.backends or (("nccl",) if here.device.type == "cuda" else ("gloo",))
    reasons = {backend: usable(backend, here.device, one_each) for backend in asked}
    for backend, reason in reasons.items():
        if reason:
            tell({"skipped": f"{backend}: {reason}"})
    backends = tuple(backend for backend, reason in reasons.items() if not reason)
    memory = here.smallest(min(sweep.memory_bytes, device_memory(here.device)))
    device_s = min(DEVICE_PART * sweep.budget_s, MOST_DEVICE_S) if DEVICE in sweep.operations else 0.0
    if device_s:
        tell({"left_s": sweep.budget_s - (time.monotonic() - start), "doing": "the device"})
        device_points(here, device_s, lambda points: tell({"device": [p.model_dump(mode="json") for p in points]}))
    rest = _but(sweep, backends=backends, memory_bytes=memory, budget_s=sweep.budget_s - (time.monotonic() - start))
    if here.world > 1:
        collectives.run(here, rest, emit)
    else:
        tell({"skipped": "collectives: one rank has no other rank to exchange with"})


def load(here: Session) -> float:
    """Cores of this host that other processes use before the measurements; the other ranks wait meanwhile."""
    return busy_cores(IDLE_SHARE * here.ranks[here.rank].cores, LOOK_S, LOOKS)


def device_points(here: Session, seconds: float, so_far: Callable[[list[DevicePoint]], object]) -> None:
    """The operations of a training step on this rank's device, and how much slower a product is while something else runs. `so_far` gets
    all that is measured, again and again."""
    cuda, part = here.device.type == "cuda", seconds * 3 / 4
    dtype, rates = ("bf16", []) if cuda else ("fp32", list(rate_cases(torch.float32)))
    found = measure_device(str(here.device), here.synchronization, dtype, part, here.rank, so_far, part, rates)
    so_far([*found, *measure_slowdown(here, seconds / 4)])


def _but(sweep: Sweep, **changes: Any) -> Sweep:
    return Sweep(**{**sweep.__dict__, **changes})


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
        self.about: dict[str, Any] = {}
        self.points: list[Point] = []
        self.device: list[DevicePoint] = []
        self.skipped: list[str] = []

    def __call__(self, message: dict[str, Any]) -> None:
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
                self.about = {
                    "ranks": tuple(RankInfo(**info) for info in ranks), "topology": detected, "libraries": libraries
                }  # fmt: skip
            case _:
                raise MeshwrightError("MW-CLI-001", f"a rank sent an unknown message: {sorted(message)}")

    def result(self, interrupted: str = "") -> Bench:
        """What was measured; `interrupted` says why it is incomplete."""
        return Bench(
            made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            state="interrupted" if interrupted else "complete",
            why=interrupted,
            skipped=tuple(self.skipped),
            points=tuple(self.points),
            device=tuple(self.device),
            **self.about,
        )
