"""The flight recorder of NCCL: torch's own record of the last collectives of this rank, written to the run folder when a rank hangs.

torch keeps the last collectives of every process group with their states (scheduled, started, completed), sizes and Python stacks, if its buffer
has a size when the group is made. `meshwright` names the rank and the collective itself (`diagnose`); this file has the details.

Private names of torch: `torch._C._distributed_c10d._dump_fr_trace_json`, before torch 2.9 `._dump_nccl_trace_json`. JSON, no pickle.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # names of newer and older releases
ENTRIES = 2000


def enable() -> None:
    """Give the recorder a buffer, unless the user has set its size; before the first process group is made."""
    for name in SIZES:
        os.environ.setdefault(name, str(ENTRIES))


def recorded() -> dict[str, Any]:
    """The records of this process; empty where torch has no recorder (a build without NCCL)."""
    from torch._C import _distributed_c10d

    for name in DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            try:
                found = json.loads(dump())
            except (RuntimeError, TypeError, ValueError):
                continue
            return found if isinstance(found, dict) else {}
    return {}


def write_flight_record(folder: Path, rank: int) -> Path | None:
    """Write this rank's records to `flight-rank-N.json`; None if there are none."""
    found = recorded()
    if not found.get("entries"):
        return None
    path = folder / f"flight-rank-{rank}.json"
    path.write_text(json.dumps(found, indent=1), "utf-8")
    return path
