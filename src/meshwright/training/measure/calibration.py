"""The calibration of this machine: measured in seconds, kept in the user's cache folder, used by every prediction of `train`.

A calibration holds for a processor, a number of usable cores, the versions of Python and torch, a number of ranks at once, the dtype in
which they compute (many CPUs multiply bf16 more slowly than fp32), the dtype that their collectives add up (gloo adds bf16 more slowly than
fp32), and the backend of the collectives: they are its key. A change of any
of them starts a new measurement, and so do `--recalibrate` and an hour: the speed of a virtual or a warm machine drifts by tens of percent. One that
was measured on a busy machine is used once and measured again by the next run.
"""

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from meshwright.calibrate.machine import ACCELERATOR, VERSION, MachineMeasurement, calibrated
from meshwright.calibrate.points import IDLE_SHARE
from meshwright.describe import catalog
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.host import replace_file, usable_cores
from meshwright.training.launch import local
from meshwright.units import format_seconds

TARGET = "meshwright.comm.bench.contention:calibrate_rank"
LARGEST_FILE = 2**20
SILENCE_S = 60.0
LONGEST_S = 3600.0  # that a calibration is used


def cache_folder() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME/meshwright, or ~/.cache/meshwright."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "meshwright"


def machine_key(ranks: int, dtype: str = "fp32", reduced_dtype: str = "fp32", backend: str = "gloo") -> dict[str, str]:
    """Return the key of a calibration: the machine, versions and ranks for which it is valid."""
    return {
        "version": str(VERSION),
        "processor": processor(),
        "machine": platform.machine(),
        "cores": f"{usable_cores():g}",
        "device": "cpu",
        "ranks": str(ranks),
        "dtype": dtype,
        "reduced_dtype": reduced_dtype,
        "backend": backend,
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "threads": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def processor() -> str:
    """The processor's model as the kernel names it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
        names = ("model name", "CPU part", "CPU implementer", "cpu model")
        found = dict.fromkeys(line.strip() for line in lines if line.split(":")[0].strip() in names)
        if found:
            return "; ".join(found)
    return platform.processor() or platform.machine()


def cache_file(key: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"machine-{digest[:16]}.json"


def read_cached(key: dict[str, str]) -> MachineMeasurement | None:
    """The cached calibration with this key; None if there is none, or it is old or damaged, or the machine was busy."""
    path = cache_file(key)
    try:
        file = path.stat()
        if file.st_size > LARGEST_FILE or time.time() - file.st_mtime > LONGEST_S:
            return None
        found = MachineMeasurement(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, MeshwrightError):
        return None
    return found if found.key == key and found.is_idle else None


def write_cached(measured: MachineMeasurement) -> None:
    """Keep a calibration, readable by the user only. A file appears whole or not at all; a full disk or a folder without write access
    loses the cache, not the run."""
    path = cache_file(measured.key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, measured.model_dump_json(exclude_defaults=True), mode=0o600)


def machine_measurement(
    ranks: int,
    dtype: str = "fp32",
    reduced_dtype: str = "fp32",
    backend: str = "gloo",
    recalibrate: bool = False,
    listen: Callable[[str], None] | None = None,
) -> MachineMeasurement:
    """The calibration of this machine for `ranks` processes that compute in `dtype` at once and reduce `reduced_dtype` by `backend`: cached, or
    measured now."""
    kind = {"ranks": ranks, "dtype": dtype, "reduced_dtype": reduced_dtype, "backend": backend}
    key = machine_key(ranks, dtype, reduced_dtype, backend)
    if not recalibrate and (found := read_cached(key)) is not None:
        return found
    if listen is not None:
        listen("calibrating this machine")

    def heard(rank: int, text: str) -> None:
        if listen is not None:
            listen(f"calibrating this machine: {text}")

    results = local.run(TARGET, ranks, dtype, reduced_dtype, silence=SILENCE_S, listen=heard, backend=backend)
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    measured = MachineMeasurement(made=made, key=key, cores=usable_cores(), **kind, **results[0])
    write_cached(measured)
    return measured


def measured_or_reason(
    plan: Plan, backend: str, recalibrate: bool = False, listen: Callable[[str], None] | None = None
) -> tuple[MachineMeasurement | None, str]:
    """The calibration of this machine for the ranks and dtypes of a plan, or why there is none: a training does not depend on it, so a rank
    that hangs on a busy machine costs the calibration and not the run."""
    try:
        return machine_measurement(plan.world, plan.param_dtype, reduced_dtype(plan), backend, recalibrate, listen), ""
    except (MeshwrightError, OSError) as error:
        what = error.what if isinstance(error, MeshwrightError) else str(error)
        reason = f"This machine could not be calibrated ({what.splitlines()[0].rstrip(':')})"
        return None, f"{reason}: the prediction has the constants of the catalog's CPU"


def reduced_dtype(plan: Plan) -> str:
    """The dtype that most reductions of a step add up: that of activations with tensor parallelism, which reduces them several times in
    every layer, else that of gradients. Gradients sent in fp8 are added up in fp32."""
    dtype = plan.param_dtype if plan.tp > 1 else plan.reduce_dtype
    return "fp32" if dtype == "fp8" else dtype


def is_for_this_machine(config: Config) -> bool:
    """Whether a configuration is for CPU processes whose rates are those of the catalog, which are not measured."""
    device, plain = config.cluster.accelerator, catalog.load("accelerators", ACCELERATOR)
    return device.but(memory=plain.memory) == plain


def has_given_links(cluster: Cluster) -> bool:
    """Whether the links come from a file or from the user: they differ from those of the catalog's cluster of that name."""
    if cluster.name not in catalog.names("clusters"):
        return True
    plain = catalog.load("clusters", cluster.name)
    return (cluster.levels, cluster.collectives) != (plain.levels, plain.collectives)


def with_this_machine(config: Config, measured: MachineMeasurement, busy: float = 0.0) -> Config:
    """The configuration with the constants of this machine, while other processes keep `busy` cores busy. Links that were given, such as
    those of a file that `meshwright calibrate` wrote, stay: the measured collectives are not used."""
    if has_given_links(config.cluster):
        measured = measured.but(collectives=())
    cluster, stack = calibrated(config.cluster, config.stack, measured, busy)
    return replace(config, cluster=cluster, stack=stack)


@dataclass(frozen=True)
class Interference:
    """Load of other processes on the machine, and the predictions without and with it.

    `before`: in the half second before the run, `during`: while its steps ran, in cores. Predicted step times in seconds:
    `idle_s` on an idle machine, `loaded_s` with the load during the run.
    """

    cores: float
    before: float
    during: float | None
    idle_s: float
    loaded_s: float | None

    @property
    def busy(self) -> bool:
        """Whether other processes disturbed the prediction or the run."""
        return max(self.before, self.during or 0.0) > IDLE_SHARE * self.cores

    def sentences(self) -> list[str]:
        """Return how busy the machine was, and what was predicted for which load."""
        if not self.busy:
            return []
        text = f"The machine was busy: other processes used {self.before:.1f} of {self.cores:g} cores before the run"
        text += f" and {self.during:.1f} during it." if self.during is not None else "."
        text += f" Predicted for an idle machine: {format_seconds(self.idle_s)}"
        if self.loaded_s is not None:
            text += f"; with the load during the run: {format_seconds(self.loaded_s)}"
        return [text + "."]
