"""Hosts, devices, links and interfaces as the system reports them: `nvidia-smi topo -m`, sysfs, network interfaces, NUMA nodes.

A report is plain data, for the result of a bench and for the causes that `calibrate` names: which link joins two GPUs (NV18, PIX, SYS),
which interface is fastest and which one gloo would use, whether an RDMA device is there at all.
Nothing here fails: what a system does not report is left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

SYS = Path("/sys")
COMMAND_S = 10.0  # a driver that does not answer must not stop a bench
MARKER = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")


def detect(root: Path = SYS) -> dict[str, Any]:
    """What one host reports."""
    found = {
        "interfaces": interfaces(root),
        "rdma": rdma_devices(root),
        "numa": numa_nodes(root),
        "cpu": cpu_model(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0,
        "gpu_links": gpu_links(command_output("nvidia-smi", "topo", "-m")),
    }
    return {name: value for name, value in found.items() if value}


def interfaces(root: Path = SYS) -> dict[str, dict[str, Any]]:
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
    """What a command prints; empty where it is missing, fails or takes too long."""
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
