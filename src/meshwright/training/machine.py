"""What a training needs of this machine, compared with what the machine has, before any process starts.

    devices  one GPU per rank, CPU processes, or for tests ranks that share the GPUs ("cuda-shared", `--share-device`)
    memory   on CPU, the sum over all ranks of (predicted tensors + one process) must fit in the available memory;
             on GPUs, the predicted peak of the fullest rank must fit in the memory of one GPU
    disk     the files of the run folder must fit on its disk

Without this check a plan for 32 GPUs of 80 GB starts 32 processes that allocate until the kernel ends one of them.
"""

import os
import shutil
import sys
from pathlib import Path

from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.result import GIB, Prediction
from meshwright.errors import MeshwrightError, unknown
from meshwright.units import format_bytes

# Ranks share the GPUs of the machine: the backend meshwright moves their tensors through the host
SHARED = "cuda-shared"
DEVICES = ("auto", "cpu", "cuda", SHARED)
BACKENDS = ("auto", "gloo", "meshwright", "nccl")
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, Windows subsystem for Linux
PROCESS_BYTES = 64 * 2**20  # private memory of one rank besides its tensors; the libraries are shared by all ranks
LOG_BYTES, STEP_BYTES = 2**16, 256  # per rank; per step
NOT_FIT = 3  # exit code


def resolve_device(device: str, ranks: int) -> str:
    """ "cpu", "cuda" or "cuda-shared". `auto` uses GPUs if there is one for each rank."""
    if device not in DEVICES:
        raise unknown("MW-RANK-002", "device", device, DEVICES, "--device {}")
    if device == "cpu":
        return device
    found = gpu_count()
    if device == "auto":
        return "cuda" if found >= ranks else "cpu"
    needed, why = "one rank needs one GPU" if ranks == 1 else f"{ranks} ranks need {ranks} GPUs", ""
    if found:
        why = "--share-device puts several ranks on one GPU, for tests: tensors move through the host"
    if device == SHARED:
        needed, why = "ranks that share a GPU need one", ""
    if found < (1 if device == SHARED else ranks):
        fix = "--share-device, or --device cpu" if found else "--device cpu"
        raise MeshwrightError("MW-RANK-002", f"{needed}, and this machine has {found}", why=why, fix=fix)
    return device


def with_precision(config: Config, on_cpu: bool) -> tuple[Config, str]:
    """On CPUs the configuration in fp32, and a note, if the user chose no precision: many have no instructions for bf16 and take far longer."""
    own = config.in_precision("fp32") if on_cpu else config
    return own, own.precision_note


def shared_device(device: str, share: bool) -> str:
    """The device for `--device` and `--share-device`."""
    if share and device == "cpu":
        raise MeshwrightError(
            "MW-RANK-002", "--share-device and --device cpu contradict each other", fix="--share-device"
        )
    return SHARED if share else device


def resolve_backend(backend: str, device: str) -> str:
    """The torch.distributed backend of the ranks. `auto`: NCCL on GPUs, gloo on the CPU, ours where ranks share a GPU."""
    if backend not in BACKENDS:
        raise unknown("MW-RANK-005", "backend", backend, BACKENDS, "--backend {}")
    if backend == "auto":
        return {"cuda": "nccl", SHARED: "meshwright"}.get(device, "gloo")
    valid = {"cuda": ["nccl"], SHARED: ["meshwright"]}.get(device, ["gloo", "meshwright"])
    if backend not in valid:
        raise MeshwrightError(
            "MW-RANK-005", f"the backend {backend} does not run on {device}", valid=valid, fix="--backend auto"
        )
    return backend


def gpu_count() -> int:
    """GPUs that torch can use. torch takes seconds to import: it is only asked if a driver is installed."""
    if not any(Path(driver).exists() for driver in DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def check_machine(
    plan: Plan, prediction: Prediction, device: str, folder: Path | None, steps: int, ranks: int = 0
) -> None:
    """Raise if this machine lacks the memory or the disk space for a run. `ranks` are those on this machine; 0: all."""
    if device in ("cuda", SHARED):
        check_gpu_memory(prediction, -(-(ranks or plan.world) // gpu_count()) if device == SHARED else 1)
    else:
        check_cpu_memory(plan, prediction, ranks)
    if folder is not None:
        check_disk(plan, folder, steps)


def check_cpu_memory(plan: Plan, prediction: Prediction, ranks: int = 0) -> None:
    per_rank = [gib * GIB + PROCESS_BYTES for gib in prediction.tensors_gib]  # one value per pipeline rank
    ranks = ranks or plan.world
    needed, available = sum(per_rank) * ranks / len(per_rank), available_memory()
    if needed > available:
        arithmetic = f"{ranks} processes of up to {format_bytes(max(per_rank))} need {format_bytes(needed)} of memory"
        raise does_not_fit(plan, f"{arithmetic}, and {format_bytes(available)} are available")


def check_gpu_memory(prediction: Prediction, ranks: int = 1) -> None:
    """Raise if the ranks that share a GPU, usually one, need more memory than it has."""
    import torch

    needed, found = (prediction.memory_gib or 0.0) * GIB, torch.cuda.get_device_properties(0).total_memory
    if needed * ranks > found:
        who = "each rank needs" if ranks == 1 else f"each of {ranks} ranks that share a GPU needs"
        raise does_not_fit(None, f"{who} {format_bytes(needed)} of GPU memory, and a GPU has {format_bytes(found)}")


def check_disk(plan: Plan, folder: Path, steps: int) -> None:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    needed, free = plan.world * LOG_BYTES + steps * STEP_BYTES, shutil.disk_usage(existing).free
    if needed > free:
        raise MeshwrightError(
            "MW-TRAIN-002",
            f"the run folder '{folder}' needs {format_bytes(needed)} of disk, and {format_bytes(free)} are free",
            fix="--out a folder on another disk",
            exit_code=NOT_FIT,
        )


def does_not_fit(plan: Plan | None, what: str) -> MeshwrightError:
    title = f"'{plan.title()}' does not fit on this machine: " if plan else ""
    return MeshwrightError(
        "MW-TRAIN-002",
        title + what,
        why="--shrink trains the small copy of the plan that `verify` uses",
        fix="--shrink",
        exit_code=NOT_FIT,
    )


def available_memory() -> float:
    """Bytes that new processes can allocate: what the kernel reports, or the container's limit if it is lower."""
    limits = [container_memory()]
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        limits.append(next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration):
        limits.append(float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE"))
    return min(limits)


def container_memory() -> float:
    """Return the bytes that the container's control group (cgroup 2 or 1) still allows; infinite without a limit."""
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            return float(Path(folder, limit).read_text("ascii")) - float(Path(folder, used).read_text("ascii"))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return float("inf")


def peak_resident_bytes(ru_maxrss: int) -> int:
    """`getrusage().ru_maxrss` in bytes: Linux reports KiB, macOS bytes."""
    return ru_maxrss if sys.platform == "darwin" else ru_maxrss * 1024
