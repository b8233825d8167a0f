"""The records of `meshwright bench`: one measured point, and the result of a whole run, written to and read from JSON.

`comm.bench` measures and writes them; this room fits them. They stand here, below torch, so that `meshwright calibrate` runs on a
machine without torch.

    n                    bytes of the full, unsharded buffer, as everywhere in Meshwright: the input of a reduce-scatter, the
                         output of an all-gather, what one rank sends in an all-to-all
    algorithm bandwidth  n / t: how fast the caller sees its buffer processed
    bus bandwidth        bytes that one rank sends / t: comparable with the rate of a link, whatever the operation and the
                         number of ranks (2(P−1)/P · n for all-reduce, (P−1)/P · n for all-gather, reduce-scatter, all-to-all,
                         gather and scatter, n for broadcast, reduce and point-to-point; the conventions of nccl-tests)
"""

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from meshwright.cost.collective import OPERATIONS as PRICED
from meshwright.describe.base import Described, Seconds
from meshwright.describe.files import check_depth, read_text, write_text
from meshwright.errors import MeshwrightError
from meshwright.lower.program import sent

VERSION = 1
IDLE_SHARE = 0.10  # a machine is idle if other processes use less than this share of its cores
LARGEST_FILE = 256 * 2**20
COLLECTIVE_NAMES = {operation: name for name, operation in PRICED.items()}
SHARDED = ("gather", "scatter")  # operations outside the training step that move (P−1)/P of the buffer


class Timed(Described):
    """Seconds of one call: the median of several samples, and their lower and upper quartile."""

    median_s: Seconds = Field(gt=0)
    low_s: Seconds = Field(gt=0)
    """lower quartile of the samples"""
    high_s: Seconds = Field(gt=0)
    """upper quartile of the samples"""
    samples: int = Field(ge=1)
    """number of samples"""
    calls: int = Field(default=1, ge=1)
    """calls per sample; a sample's time is divided by it"""

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a share of the median."""
        return (self.high_s - self.low_s) / 2 / self.median_s


class Point(Timed):
    """One collective, or one transfer between two ranks, at one size."""

    operation: str
    """all-reduce, all-gather, …, or point-to-point"""
    backend: str
    """gloo, nccl or meshwright"""
    algorithm: str = ""
    """the program that ran; empty: the library chose"""
    ranks: tuple[int, ...] = Field(min_length=1)
    """the ranks that took part"""
    bytes: int = Field(ge=0)
    """n, the full buffer"""
    dtype: str = "fp32"
    concurrent: int = Field(default=1, ge=1)
    """pairs that exchange at the same time (point-to-point)"""

    @property
    def series(self) -> tuple[str, str, str, int]:
        """Points of one series differ in size only and are fitted by one line (pairs of point-to-point: by level)."""
        return self.operation, self.backend, self.algorithm, self.concurrent

    @property
    def algorithm_bandwidth(self) -> float:
        return self.bytes / self.median_s

    @property
    def bus_bandwidth(self) -> float:
        return bus_factor(self.operation, len(self.ranks)) * self.bytes / self.median_s


class DevicePoint(Timed):
    """One operation of the device: a matrix product, attention, a copy, an optimizer step, a kernel launch."""

    kind: str
    """gemm, attention, copy, optimizer, launch, …"""
    dtype: str = "fp32"
    shape: dict[str, float] = Field(default_factory=dict)
    """sizes by name, such as m, n, k"""
    work: float = Field(gt=0)
    """FLOPs, bytes or launches of one call"""
    unit: Literal["FLOP", "byte", "launch"] = "FLOP"
    rank: int = Field(default=0, ge=0)
    condition: str = ""
    """what ran at the same time; empty: nothing"""
    slowdown: float = Field(default=1.0, gt=0)
    """median under `condition` / median without it"""

    @property
    def rate(self) -> float:
        """Work per second."""
        return self.work / self.median_s


class RankInfo(Described):
    """Host and device of one rank."""

    rank: int = Field(ge=0)
    host: str
    device: str = "cpu"
    cores: int = Field(default=0, ge=0)
    """cores that the rank may use"""


class Bench(Described):
    """The result of one `meshwright bench`."""

    version: int = VERSION
    tool: str = "meshwright bench"
    """the program that measured"""
    made: str = ""
    """date and time, UTC"""
    state: Literal["complete", "interrupted"] = "complete"
    why: str = ""
    """why a bench is incomplete"""
    skipped: tuple[str, ...] = ()
    """what was not measured, with the reason"""
    ranks: tuple[RankInfo, ...] = ()
    topology: dict[str, Any] = Field(default_factory=dict)
    """as detected (comm.bench.topology), by host"""
    libraries: dict[str, str] = Field(default_factory=dict)
    """versions of torch, NCCL, the driver, …"""
    points: tuple[Point, ...] = ()
    device: tuple[DevicePoint, ...] = ()

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def hosts(self) -> dict[str, list[int]]:
        """Ranks by host, in the order of their first rank."""
        by_host: dict[str, list[int]] = {}
        for info in sorted(self.ranks, key=lambda info: info.rank):
            by_host.setdefault(info.host, []).append(info.rank)
        return by_host

    def load(self) -> list[str]:
        """A sentence for each host that other processes kept busy."""
        files = []
        for host, ranks in self.hosts.items():
            detected = self.topology.get(host)
            busy = detected.get("busy_cores", 0.0) if isinstance(detected, dict) else 0.0
            cores = next((info.cores for info in self.ranks if info.rank == ranks[0]), 0)
            if isinstance(busy, float) and cores and busy > IDLE_SHARE * cores:
                files.append(
                    f"{host} was busy: other processes used {busy:.1f} of {cores} cores before the measurements"
                )
        return files

    def write(self, path: str | Path) -> Path:
        """Write the result as JSON."""
        return write_text(path, json.dumps(self.model_dump(mode="json"), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The result in a JSON file; other files and other versions are refused."""
        return cls.of_json(read_text(path, LARGEST_FILE), str(path))

    @classmethod
    def of_json(cls, text: str, name: str) -> Self:
        try:
            document = check_depth(json.loads(text), name)
        except (ValueError, RecursionError) as error:
            if isinstance(error, MeshwrightError):
                raise
            raise not_a_bench(name, f"It is not JSON: {error}"[:200]) from None
        if not isinstance(document, dict) or not {"version", "points", "ranks"} <= document.keys():
            raise not_a_bench(name, "It has no version, ranks and points")
        if document["version"] != VERSION:
            what = f"'{name}' has version {str(document['version'])[:20]}, and this Meshwright reads version {VERSION}"
            raise MeshwrightError("MW-BENCH-002", what, fix=f"meshwright bench --json {Path(name).name}")
        try:
            return cls(**document)
        except MeshwrightError as error:
            raise not_a_bench(name, str(error)) from None


def not_a_bench(name: str, why: str) -> MeshwrightError:
    what = f"'{name}' is neither the result of `meshwright bench` nor the output of nccl-tests"
    return MeshwrightError("MW-BENCH-001", what, why=why, fix="meshwright bench --json FILE")


def bus_factor(operation: str, ranks: int) -> float:
    """Bytes that one rank sends for each byte of the buffer; for operations from or to one rank, bytes of its link."""
    if operation in COLLECTIVE_NAMES:
        return float(sent(COLLECTIVE_NAMES[operation], 1.0, ranks))
    return (ranks - 1) / ranks if operation in SHARDED else 1.0
