"""How busy other processes keep this machine: before a run, and during it.

    busy cores of others = busy cores of the machine (/proc/stat) − those of our own processes (getrusage)

The kernel counts the seconds that its cores ran anything in `/proc/stat`. Machines without it (macOS) report the load average instead.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
LOOK_S = 0.5
LOOKS = 4


def busy_seconds(text: str) -> float:
    """Seconds that the cores of the machine have run anything, from the first line of /proc/stat."""
    fields = [float(x) for x in text.splitlines()[0].split()[1:9]]
    user, nice, system, _, _, irq, soft, steal = [*fields, *[0.0] * (8 - len(fields))]
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Moment:
    """The clocks at one moment: wall, and busy seconds of all cores (None where the system does not count them)."""

    wall: float
    busy: float | None

    @classmethod
    def read(cls) -> Moment:
        try:
            return cls(time.monotonic(), busy_seconds(STAT.read_text("ascii")))
        except (OSError, ValueError, IndexError):
            return cls(time.monotonic(), None)

    def busy_cores_since(self, start: Moment, own_seconds: float) -> float:
        """Cores that other processes used since `start`, where ours computed for `own_seconds`."""
        wall = self.wall - start.wall
        if self.busy is None or start.busy is None:
            return max(os.getloadavg()[0] - own_seconds / max(wall, 1e-9), 0.0)
        return max(self.busy - start.busy - own_seconds, 0.0) / max(wall, 1e-9)


def busy_cores(idle: float, seconds: float = LOOK_S, looks: int = LOOKS) -> float:
    """Cores that other processes keep busy. A process that is just ending disturbs no run: while more than `idle` cores are busy this looks
    again, and the least of all looks counts."""
    least = look(seconds)
    for _ in range(looks - 1):
        if least <= idle:
            break
        least = min(least, look(seconds))
    return least


def look(seconds: float) -> float:
    """Cores that other processes use during these seconds."""
    start, own = Moment.read(), time.process_time()
    time.sleep(seconds)
    return Moment.read().busy_cores_since(start, time.process_time() - own)
