"""Where a launcher placed this process: its rank among all ranks, its number on this host, and the address where the ranks meet.

env://      RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: torchrun, a PyTorchJob of Kubernetes, Ray, `emulate run`
srun        SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST: the first host of the list is the rendezvous address, the
            port follows from the job's number, so that two jobs do not meet
mpirun      OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK; MASTER_ADDR on several hosts
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from meshwright.describe.run import PORT
from meshwright.errors import MeshwrightError


class Placement(NamedTuple):
    """What a launcher's environment says about one rank."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    store_is_running: bool = False  # torchrun's agent already serves the store
    restarts: int = 0  # of torchrun's agent on this host
    restarts_left: int = 0
    elastic: bool = False  # an agent of torchrun started this process


class Launcher(NamedTuple):
    """The variables by which a launcher numbers its ranks."""

    command: str
    rank: str
    world: str
    local_rank: str


ENVIRONMENT = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
OPEN_MPI = Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")


def placement(environment: Mapping[str, str]) -> Placement | None:
    """The placement that a launcher set; None where no launcher did, or Slurm or Open MPI started one task."""
    if ENVIRONMENT.rank in environment or ENVIRONMENT.world in environment:
        return _placed(environment, ENVIRONMENT, environment.get("MASTER_ADDR", ""))
    step = "SLURM_STEP_NODELIST" in environment or "SLURM_STEP_ID" in environment  # not in a batch script itself
    if step and _several(environment, SLURM):
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        return _placed(environment, SLURM, environment.get("MASTER_ADDR") or first_host(hosts))
    if _several(environment, OPEN_MPI):
        one_host = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environment[OPEN_MPI.world]
        return _placed(environment, OPEN_MPI, environment.get("MASTER_ADDR", "127.0.0.1" if one_host else ""))
    return None


def _several(environment: Mapping[str, str], launcher: Launcher) -> bool:
    """Whether this process is one of several tasks of a launcher."""
    return launcher.rank in environment and environment.get(launcher.world, "1") not in ("", "1")


def _placed(environment: Mapping[str, str], launcher: Launcher, address: str) -> Placement:
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        default_port = PORT + int(environment.get("SLURM_JOB_ID", "0") or 0) % 10_000
        found = Placement(
            int(environment[launcher.rank]),
            int(environment[launcher.world]),
            int(environment.get(launcher.local_rank, "0")),
            address or ("127.0.0.1" if environment[launcher.world] == "1" else ""),
            int(environment.get("MASTER_PORT", default_port)),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            int(restarts),
            int(environment.get("TORCHELASTIC_MAX_RESTARTS", restarts)) - int(restarts),
            "TORCHELASTIC_RUN_ID" in environment,
        )
    except (KeyError, ValueError) as error:
        why = f"{launcher.rank} and {launcher.world} are needed and must be numbers: {error}"
        raise _bad_environment(why, launcher) from None
    if not 0 <= found.rank < found.world:
        why = f"{launcher.rank} = {found.rank} is not from 0 to {launcher.world} − 1 = {found.world - 1}"
        raise _bad_environment(why, launcher)
    if not found.address:
        raise _bad_environment("MASTER_ADDR, the host of rank 0, is not set", launcher)
    return found


def _bad_environment(why: str, launcher: Launcher) -> MeshwrightError:
    fix = f"start the ranks with {launcher.command}"
    if launcher is OPEN_MPI:
        fix = "mpirun -x MASTER_ADDR=HOST ..."
    elif launcher is ENVIRONMENT:
        fix += ", or unset RANK and WORLD_SIZE to start them on this machine"
    return MeshwrightError("MW-RANK-006", "the variables of the launcher do not place this rank", why=why, fix=fix)


def first_host(nodes: str) -> str:
    """The first host of a Slurm list of nodes: `gpu[003-007,12],login1` → gpu003."""
    found = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    return (found[1] + (found[2] or "")) if found else ""
