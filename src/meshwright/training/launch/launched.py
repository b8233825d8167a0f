"""A rank that torchrun, Slurm, Open MPI, Kubernetes or Ray started: meet the others, check together, train.

Every rank runs the same command, so every rank finds the same errors. They agree before anything starts: only the first rank that fails
prints its error (`Meeting.succeed`). Later, a rank whose failure only follows from that of another one stays silent too: each writes its
failure to the run folder, waits a second, and reads those of the others.

torchrun restarts all ranks when a rank fails, and also when a node joins an elastic job (`--nnodes 1:4`), which it does not count as a
restart. Such a start continues the run in the folder. It is recognised by the agents: the run folder lists the agent processes that
started its ranks, and one of these is among those of the new start. Agents of another job never are, so a new job in a used folder is
still refused.

Rank 0 prints and writes the run folder. What the others print goes to `rank-N.log` of the same folder, which should be on a disk that
all hosts share; where it is not, each host gets the logs of its ranks.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import distributed

from meshwright.describe.run_folder import rank_log, read_about
from meshwright.errors import MeshwrightError
from meshwright.host import process_start
from meshwright.training.job import TrainingJob
from meshwright.training.launch.join import Meeting, join
from meshwright.training.launch.rank import (
    GROUP_TIMEOUT_S,
    INTERNAL_ERROR,
    Attempt,
    FailedElsewhere,
    Failure,
    Placement,
    end_with_agent,
    error_of,
    failure_of,
    read_failures,
    redirected,
    remove_failures,
    root_cause,
    write_failure,
)
from meshwright.training.measure.measurement import Training, conclude_interrupted
from meshwright.training.worker import Listen, train

GRACE_S = 1.0  # for other ranks to write their failures


def train_launched(
    place: Placement, prepare: Callable[[Path, int, bool], TrainingJob], folder: Path, listen: Listen | None = None
) -> Training | None:
    """Train as one rank of a launcher; rank 0 returns the result. `prepare` makes the job from the run folder, the number of ranks
    on this host, and whether this is a restart of the run."""
    exists = distributed.is_initialized()  # Ray has made the group of its workers
    meeting = Meeting(place._replace(store_is_running=place.store_is_running or exists))
    ranks = meeting.exchange([str(folder), meeting.host, place.restarts, agent_of(place, meeting.host)])
    folder, here = Path(ranks[0][0]), sum(host == meeting.host for _, host, *_ in ranks)
    agents = sorted({agent for *_, agent in ranks if agent})
    restarts = max(count for _, _, count, _ in ranks)  # an agent counts only the failures of its own ranks
    if agents and not restarts:
        restarts = int(meeting.exchange(place.rank == 0 and is_continued(folder, agents))[0])
    attempt = Attempt(restarts, *(last_cause(folder) if place.rank == 0 else ()))
    job = meeting.succeed(lambda: prepare(folder, here, restarts > 0))
    job = replace(job, agents=tuple(agents), rejoins=place.elastic and place.restarts_left > 0)
    with logged_output(folder, place.rank):
        if place.elastic:
            end_with_agent(place.rank, folder)
        try:
            context = join(place, job.device, job.backend, GROUP_TIMEOUT_S, None if exists else meeting)
            return train(context, attempt, job, listen)
        except (FailedElsewhere, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            traceback.print_exc()
            shown = reported(folder, failure_of(place.rank, error))
            if place.rank == 0:
                conclude_interrupted(folder, job.config, job.steps, job.device, job.watch, root_of(folder))
            raise shown from error
        finally:
            if not exists and distributed.is_initialized():
                distributed.destroy_process_group()


def agent_of(place: Placement, host: str) -> str:
    """The agent of torchrun that started this process; empty under other launchers, whose processes may start several jobs."""
    parent = os.getppid()
    return f"{host}/{parent}/{process_start(parent)}" if place.elastic else ""


def is_continued(folder: Path, agents: Sequence[str]) -> bool:
    """Whether one of these agents has started ranks of the run in the folder before."""
    try:
        return not set(agents).isdisjoint(read_about(folder).get("agents", ()))
    except MeshwrightError:  # a damaged file: the folder is then checked as that of a new run
        return False


def last_cause(folder: Path) -> tuple[str, float]:
    """Return the cause and time of the last attempt's end, as its ranks wrote them; remove their failure files."""
    failures = read_failures(folder)
    remove_failures(folder)
    return (root_cause(failures).summary, root_cause(failures).at) if failures else ("", 0.0)


def root_of(folder: Path) -> str:
    """The root cause of the failures that ranks have written."""
    failures = read_failures(folder)
    return root_cause(failures).summary if failures else ""


def reported(folder: Path, failure: Failure) -> MeshwrightError:
    """The error that this rank shows for its failure: its own, or none if another rank shows the root cause."""
    write_failure(folder, failure)
    if not failure.is_consequence:
        return error_of([failure], folder)
    time.sleep(GRACE_S)
    failures = read_failures(folder) or [failure]
    root = root_cause(failures)
    if not root.is_consequence or min(f.rank for f in failures) != failure.rank:
        return FailedElsewhere("MW-RANK-009", f"rank {root.rank} failed and reports why", exit_code=INTERNAL_ERROR)
    return MeshwrightError(
        "MW-RANK-010",
        f"rank {failure.rank} lost the connection to another rank",
        why=f"No rank has reported another failure: a process was killed, or a host or the network is gone. Per-rank logs: {folder}",
        exit_code=INTERNAL_ERROR,
    )


@contextlib.contextmanager
def logged_output(folder: Path, rank: int) -> Iterator[None]:
    """Send what this process prints to its log; not on rank 0, which shows the run."""
    if rank == 0:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / rank_log(rank)).open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with redirected(log.fileno(), (1, 2)):
            try:
                yield
            finally:
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
