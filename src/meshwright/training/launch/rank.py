"""One rank: where a launcher placed it, its life under the local launcher, and its failure.

**Placement.** Every launcher numbers its ranks by variables of the environment:

    env://      RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: torchrun, a PyTorchJob of Kubernetes, Ray, `emulate run`
    srun        SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST: the first host of the list is the rendezvous address, the
                port follows from the job's number, so that two jobs do not meet
    mpirun      OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK; MASTER_ADDR on several hosts

**A local rank** (`main`) joins the process group, calls the target, sends the result to its parent through a pipe, and exits. What it
prints goes to its log, and so does its Python stack when a signal kills it or when the parent requests it (SIGUSR2).

**Root cause.** When one rank fails, the others lose their connections a moment later and fail too. The root cause is the earliest
failure that is not such a consequence. Only this one is shown; the logs of the ranks have all of them. A local rank sends its failure
to its parent before its connections close. Under another launcher, and for a rank that hangs, it is written to `rank-N.failure.json` in
the run folder, where rank 0 of the next attempt finds it, on one host and on several that share the folder.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.describe import plugins
from meshwright.describe.run import PORT
from meshwright.describe.run_folder import rank_log
from meshwright.errors import MeshwrightError
from meshwright.host import end_with_parent
from meshwright.units import Json, counted

SUFFIX = ".failure.json"
INTERNAL_ERROR = 70  # exit code: the input is not the cause
GROUP_TIMEOUT_S = 600.0  # of the collectives of a training
CONSEQUENCES = (
    "MW-COMM-004",
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Timed out waiting",
    "Socket Timeout",
    "Broken pipe",
)


def lost_connection(text: str) -> bool:
    """Whether a text is what torch.distributed or our backend reports after another rank has gone."""
    return any(words in text for words in CONSEQUENCES)


@dataclass(frozen=True)
class Failure:
    """The failure of one rank: it raised, died (of a signal or by exiting), hung, or ended because another rank hangs."""

    rank: int
    state: str  # raised | died | hung | ended
    text: str  # traceback, or signal and last lines of the log
    at: float  # seconds, of one clock for all ranks of a run
    error: Json | None = None  # the fields of a MeshwrightError, if the rank raised one

    @property
    def is_consequence(self) -> bool:
        """Whether this failure only follows from the failure of another rank."""
        return self.state == "ended" or (self.state == "raised" and lost_connection(self.text))

    @property
    def summary(self) -> str:
        """One line: which rank, and why."""
        if self.error is not None:
            return f"rank {self.rank}: {self.error['code']}: {self.error['what']}"
        lines = [line for line in self.text.splitlines() if line.strip()] or [""]
        return f"rank {self.rank} {self.state}: {lines[-1] if self.state == 'raised' else lines[0]}"


class Attempt(NamedTuple):
    """One start of all ranks. After a failure follows the next one, which knows why."""

    number: int = 0
    cause: str = ""
    failed_at: float = 0.0  # when the failure was noticed


class FailedElsewhere(MeshwrightError):
    """Another rank failed and reports why; this one ends without a message."""

    quiet = True


class RankFailure(MeshwrightError):
    """A rank raised, died or hung; `text` is its traceback, `others` the tracebacks of ranks that failed after it."""

    def __init__(self, rank: int, state: str, text: str, others: dict[int, str], logs: Path | None) -> None:
        self.rank, self.state, self.text, self.others = rank, state, text.rstrip(), others
        more = f"\n{counted(len(others), 'more rank')} failed afterwards" if others else ""
        super().__init__(
            "MW-RANK-001",
            f"rank {rank} {state}:\n{self.text}{more}",
            why=f"Per-rank logs: {logs}" if logs else "",
            exit_code=INTERNAL_ERROR,
        )


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The likeliest root cause: first a rank that died or raised, then one that hung, then one whose failure is a consequence;
    within each class the earliest."""
    return min(failures, key=lambda f: (2 if f.is_consequence else 1 if f.state == "hung" else 0, f.at))


def error_of(failures: Sequence[Failure], logs: Path | None) -> MeshwrightError:
    """The error that is shown for failed ranks: that of the root cause."""
    root = root_cause(failures)
    if root.error is not None:
        return MeshwrightError(**root.error)
    return RankFailure(root.rank, root.state, root.text, {f.rank: f.text for f in failures if f is not root}, logs)


def failure_of(rank: int, error: BaseException) -> Failure:
    """The failure of a rank that raised."""
    fields = {**error.as_dict(), "exit_code": error.exit_code} if isinstance(error, MeshwrightError) else None
    return Failure(rank, "raised", "".join(traceback.format_exception(error)), time.time(), fields)


def write_failure(folder: Path, failure: Failure) -> None:
    """Write the failure of a rank to the run folder. A full or lost disk must not hide the failure itself."""
    with suppress(OSError):
        (folder / f"rank-{failure.rank}{SUFFIX}").write_text(json.dumps(asdict(failure)), "utf-8")


def read_failures(folder: Path) -> list[Failure]:
    """The failures that ranks have written; a file that is not complete is left out."""
    found = []
    for file in sorted(folder.glob(f"rank-*{SUFFIX}")):
        with suppress(OSError, ValueError, TypeError):
            found.append(Failure(**json.loads(file.read_text("utf-8"))))
    return found


def remove_failures(folder: Path) -> None:
    """Remove the failures of an earlier attempt."""
    for file in folder.glob(f"rank-*{SUFFIX}"):
        file.unlink(missing_ok=True)


class Placement(NamedTuple):
    """Rank, sizes and addresses of one rank, from the launcher's environment."""

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


AGENT_POLL_S = 0.5


@dataclass(frozen=True)
class RankContext:
    """The rank that a target runs on. `send` sends one plain message to the parent."""

    rank: int
    world: int
    device: str
    send: Callable[[Any], None]


def function_of(name: str) -> Any:
    """The function at "module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


@dataclass(frozen=True)
class Start:
    """What the ranks of one start have in common: the target "module:function" and its arguments, and how they meet."""

    target: str
    args: tuple
    world: int
    folder: Path  # temporary: the store of the rendezvous
    logs: Path
    append: bool  # to the logs, those of an earlier start
    group_timeout: float
    device: str
    backend: str
    plugin_names: list[str]


def main(start: Start, rank: int, pipe: Connection) -> None:
    """Run the target on this rank, and send its result or its failure to the parent."""
    parent = _prepare_process(start, rank, pipe)
    try:
        plugins.load(start.plugin_names)
        device = _join(start, rank)
        context = RankContext(rank, start.world, device, lambda message: pipe.send(("message", message)))
        pipe.send(("done", function_of(start.target)(context, *start.args)))
    except BaseException as error:  # the parent must learn of every failure
        pipe.send(("failed", failure_of(rank, error)))
        with contextlib.suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    parent.join()  # stay until the parent closes the pipe: other ranks may still be connecting to this one


def _prepare_process(start: Start, rank: int, pipe: Connection) -> threading.Thread:
    """Redirect output to the log, and return the thread that ends this process when the parent closes the pipe."""
    gc.freeze()  # what was imported before the fork stays: a full collection over it would take 0.3 s, and copy its memory
    try:
        stream = redirect_output(start.logs / rank_log(rank), start.append)
    except FileNotFoundError:  # the parent ended before this rank began, and removed the folder
        os._exit(1)
    faulthandler.register(signal.SIGUSR2, file=stream, all_threads=True)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the forkserver ignores them
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends its ranks
    compute_as_batch()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")

    def parent_ended() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()

    return end_with_parent(start.folder, parent_ended)


def redirect_output(log: Path, append: bool) -> int:
    """Send what this process prints to its log, and its Python stack if a signal kills it; returns the file's descriptor."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC), 0o644)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    faulthandler.enable(file=stream)
    return stream


@contextlib.contextmanager
def redirected(target: int, numbers: Sequence[int]) -> Iterator[int]:
    """Inside the `with` block these descriptors write to the file `target`. Yields the last of them as it was."""
    before = {number: os.dup(number) for number in numbers}
    for number in numbers:
        os.dup2(target, number)
    try:
        yield before[numbers[-1]]
    finally:
        for number, stream in before.items():
            os.dup2(stream, number)
            os.close(stream)


def compute_as_batch() -> None:
    """Let the system schedule this process as batch work: gloo is faster where ranks share cores."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def make_group(backend: str, store: Any, rank: int, world: int, timeout_s: float) -> None:
    """Make the default process group."""
    from torch import distributed

    if backend == "meshwright":
        import meshwright.comm.backend  # noqa: F401  registers it
    timeout = timedelta(seconds=timeout_s)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def end_with_agent(rank: int, folder: Path) -> threading.Thread:
    """Start a thread that ends this rank, with a failure in the run folder, soon after the agent of torchrun that started it was killed.

    An agent ends its ranks in every other case. Without this, its ranks would compute on, or wait for each other until their timeouts, and
    keep their GPUs and their lock on the run folder. The kernel gives a process whose parent has ended another parent."""
    agent = os.getppid()

    def wait() -> None:
        while os.getppid() == agent:
            time.sleep(AGENT_POLL_S)
        what = f"the agent of torchrun (process {agent}) that started rank {rank} was killed"
        error = MeshwrightError("MW-RANK-011", what, fix="start torchrun again with --resume", exit_code=INTERNAL_ERROR)
        write_failure(folder, failure_of(rank, error))
        with contextlib.suppress(OSError):  # what the agent read is closed
            os.write(2, f"{error}\n".encode())
        os._exit(INTERNAL_ERROR)

    thread = threading.Thread(target=wait, name="meshwright-agent", daemon=True)
    thread.start()
    return thread


def _join(start: Start, rank: int) -> str:
    """Join the process group and return this rank's device."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    device = start.device
    if device.startswith("cuda"):
        device = f"cuda:{rank % torch.cuda.device_count()}"  # several ranks on one GPU only with --share-device
        torch.cuda.set_device(device)
    store = distributed.FileStore(str(start.folder / "store"), start.world)
    make_group(start.backend, store, rank, start.world, start.group_timeout)
    return device
