"""What works on this machine, and why not: versions, devices, network interfaces, rights, and each command that needs one of them.

Every check is a function that returns a `Check`: whether it works, what was found, and what to do. Nothing is changed, nothing is sent, and no GPU
memory is allocated. torch is imported only if it is installed, since the import alone can fail: a driver that is too old, a broken wheel.
"""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.describe.shown import Shown
from meshwright.errors import MeshwrightError
from meshwright.host import usable_cores
from meshwright.units import format_bytes
from meshwright.version import EXTRAS, NEEDED, VERSION, install_command, installed_versions

NETWORK = Path("/sys/class/net")
SHARED_MEMORY = Path("/dev/shm")
FEW_FILES, LITTLE_SHARED = 4096, 2**30  # below these a large run may fail
OK, LIMITED, FAILS = "works", "limited", "does not work"


@dataclass(frozen=True)
class Check:
    """One line of the report: `state` is works, limited or does not work."""

    what: str
    state: str
    found: str
    fix: str = ""


def check(what: str, good: bool, found: str, fix: str, otherwise: str = LIMITED) -> Check:
    """A check that works, or has a fix."""
    return Check(what, OK if good else otherwise, found, "" if good else fix)


@dataclass(frozen=True)
class Checkup(Shown):
    """All checks, by section."""

    sections: dict[str, list[Check]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "checks": {name: [asdict(check) for check in checks] for name, checks in self.sections.items()},
        }


def examine() -> Checkup:
    """Run all checks. A check that raises is reported as one that does not work."""
    torch, gpus = torch_checks()
    return Checkup(
        {
            "versions": [*guard("versions", versions), torch],
            "devices": [*guard("processor", processor), gpus],
            "network": guard("interfaces", interfaces),
            "rights": guard("limits", limits),
            "commands": commands(torch, gpus),
        }
    )


def guard(what: str, check: Callable[[], list[Check]]) -> list[Check]:
    try:
        return check()
    except Exception as error:  # a report about a strange machine must not end at its first oddity
        return [Check(what, FAILS, f"{type(error).__name__}: {error}"[:200])]


def versions() -> list[Check]:
    """Python and the packages that planning needs."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    found = installed_versions(NEEDED)
    missing = [name for name in NEEDED if name not in found]
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    return [
        check("Python", sys.version_info >= (3, 11), python, "install Python 3.11 or later", FAILS),
        check("packages", not missing, listed, f"pip install {' '.join(missing)}", FAILS),
    ]


def torch_checks() -> tuple[Check, Check]:
    """torch, and the GPUs that it can use."""
    fix = install_command("train")
    if "torch" not in installed_versions(["torch"]):
        none = Check("GPUs", LIMITED, "not looked for: torch is not installed", fix)
        return Check("torch", LIMITED, "not installed; planning does not need it", fix), none
    try:
        import torch
        from torch import distributed
    except Exception as error:
        broken = f"the import fails: {type(error).__name__}: {error}"[:200]
        return Check("torch", FAILS, broken, fix), Check("GPUs", FAILS, "torch cannot be imported")
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(distributed, f"is_{name}_available")()]
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    words = f"{torch.__version__}, backends {', '.join(backends) or 'none'}"
    return check("torch", release >= (2, 11), words, 'pip install "torch>=2.11"'), gpu_check(torch)


def gpu_check(torch: Any) -> Check:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "no driver or no GPU found" if built else "this torch is built for the CPU"
        return Check("GPUs", LIMITED, f"none: {why}", "ranks run on CPU processes with gloo")
    names: dict[str, int] = {}
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        name = f"{properties.name} ({format_bytes(properties.total_memory)})"
        names[name] = names.get(name, 0) + 1
    return Check("GPUs", OK, ", ".join(f"{count} × {name}" for name, count in names.items()))


def processor() -> list[Check]:
    pages = {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(getattr(os, "sysconf_names", ()))
    memory = format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if pages else "unknown"
    out = [Check("processor", OK, f"{usable_cores():g} usable cores, {memory} memory")]
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        words = f"{format_bytes(free)} free in {SHARED_MEMORY}"
        out.append(check("shared memory", free >= LITTLE_SHARED, words, "docker run --shm-size=8g …"))
    return out


def interfaces() -> list[Check]:
    """Network interfaces with their state and speed. No name is looked up: that could ask a server."""
    out = []
    for _, name in socket.if_nameindex():
        state, speed = (read_line(NETWORK / name / file) for file in ("operstate", "speed"))
        rate = f", {int(speed):,} Mb/s" if speed.isdigit() else ""
        out.append(Check(name, OK, f"{state or 'state unknown'}{rate}"))
    several = sum(check.found.startswith("up") for check in out if check.what != "lo") > 1
    if several:
        fix = "several machines: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the one that reaches the others"
        out.append(Check("which one", LIMITED, "several interfaces are up", fix))
    return out or [Check("interfaces", LIMITED, "none found", "several machines need one")]


def read_line(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace").strip()
    except (OSError, ValueError):
        return ""


def limits() -> list[Check]:
    """Open files and locked memory: NCCL and gloo need many of both."""
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if hasattr(resource, "RLIMIT_MEMLOCK") else -1
    words = f"{files:,}" if files >= 0 else "any", format_bytes(locked) if locked >= 0 else "any"
    return [
        check("open files", not 0 <= files < FEW_FILES, words[0], "ulimit -n 65536"),
        check("locked memory", not 0 <= locked < 2**26, words[1], "InfiniBand needs ulimit -l unlimited"),
    ]


def commands(torch: Check, gpus: Check) -> list[Check]:
    """Each group of commands with what it needs."""
    trains = torch.state != FAILS and "not installed" not in torch.found
    backend, fix = "gloo" if trains else torch.found, install_command("train")
    return [
        Check("plan, estimate, simulate, show, lint, validate, launch", OK, "need no torch and no GPU"),
        check("verify, train, bench on CPU processes", trains, backend, fix, FAILS),
        Check("train, bench on GPUs", gpus.state if gpus.state == OK else FAILS, gpus.found, gpus.fix),
        emulation(),
        extra("web", "web"),
        extra("settings of other frameworks in YAML", "interop"),
        extra("data prepare, checkpoint convert, Hugging Face", "train", ("safetensors", "tokenizers", "pyarrow")),
    ]


def emulation() -> Check:
    """Whether `meshwright emulate` may make namespaces here; one predicate decides for both."""
    try:
        from meshwright.comm.emulate.system import check_rights

        check_rights()
    except MeshwrightError as error:
        return Check("emulate", FAILS, f"{error.what}. {error.why}", error.fix)
    except ImportError as error:
        return Check("emulate", FAILS, str(error), install_command("train"))
    return Check("emulate", OK, "network namespaces may be made")


def extra(what: str, name: str, packages: tuple[str, ...] = ()) -> Check:
    needed = packages or tuple(EXTRAS[name])
    missing = [package for package in needed if package not in installed_versions(needed)]
    found = f"{', '.join(missing)} not installed" if missing else ", ".join(needed)
    return check(what, not missing, found, install_command(name), FAILS)


def page(checkup: Checkup) -> Any:
    """The report for the terminal."""
    from rich.console import Group
    from rich.text import Text

    from meshwright.view.tables import filled

    marks = {OK: ("✓", "green"), LIMITED: ("·", "yellow"), FAILS: ("✗", "red")}
    tables = [
        filled(("", name, "", "~fix"), [(Text(*marks[c.state]), c.what, c.found, c.fix) for c in checks])
        for name, checks in checkup.sections.items()
    ]
    return Group(
        Text(f"meshwright {VERSION}", "bold"), *tables, Text("✓ works   · limited   ✗ does not work here", "dim")
    )
