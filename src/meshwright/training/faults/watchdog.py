"""The watchdog: a thread in every rank that writes heartbeats, and names the rank and the collective when nothing moves.

A hang is silent: every rank waits in a collective until the timeout of its group, minutes later, and then all of them report each other.
The watchdog learns the time of a step (the median of the last ones) and acts when a rank made no progress for

    2 × step + 10 s         including the time to confirm it; [run] hang_s sets another limit

Progress is a finished collective or step. Between steps (checkpoint, evaluation) and before the first steps no time is known: there a rank
that still writes heartbeats has `UNKNOWN_S`. A silent rank (stopped, host lost) is found in every phase.

All ranks read the same heartbeats and come to the same verdict (`heartbeat.diagnose`). Then the lowest rank that responds reports the cause, ends
a silent process on its own host, and every rank exits, so that the launcher can restart them from the last checkpoint.
Rank 0 also compares the speed of the ranks (`slow_ranks`).

The flight recorder of NCCL: torch's own record of the last collectives of this rank, written to the run folder when a rank hangs.

torch keeps the last collectives of every process group with their states (scheduled, started, completed), sizes and Python stacks, if its buffer
has a size when the group is made. `meshwright` names the rank and the collective itself; this file has the details.

Private names of torch: `torch._C._distributed_c10d._dump_fr_trace_json`, before torch 2.9 `._dump_nccl_trace_json`. JSON, no pickle.

Slow ranks: one whose own work takes much longer than that of the ranks which do the same work.

All ranks of a run take the same time per step, since they wait for each other. The difference is in where they spend it: a slow rank computes
while the others are blocked in communication. So compare, between ranks of the same pipeline stage (stages may differ by design),

    own work = seconds of a step − seconds blocked in communication        (medians of the last steps)

A rank is slow if its own work exceeds the median of its peers by half, and the excess is a tenth of the step or more. A rank that is
alone in its stage is compared with its earlier steps.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from meshwright.errors import MeshwrightError
from meshwright.explain.intervals import length, of_spans
from meshwright.host import process_start
from meshwright.training.faults.heartbeat import (
    FAST_BEAT_S,
    SLOW_BEAT_S,
    HangVerdict,
    Heartbeat,
    HeartbeatFolder,
    Operation,
    diagnose,
)
from meshwright.training.hooks import Hook, RecordedStep, StepRecord
from meshwright.units import Json, format_seconds

DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def recorded() -> Json:
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


FACTOR = 1.5
LEAST_SHARE = 0.1  # of a step


@dataclass(frozen=True)
class SlowRank:
    """A rank that makes the others wait in every step."""

    rank: int
    host: str
    own_s: float
    peers_s: float
    alone: bool = False  # compared with its earlier steps

    @property
    def text(self) -> str:
        return (
            f"rank {self.rank} on {self.host} is slow: it works {format_seconds(self.own_s)} per step, "
            f"{'before' if self.alone else 'ranks with the same work'} {format_seconds(self.peers_s)}; every step waits for it"
        )


def slow_ranks(heartbeats: Iterable[Heartbeat]) -> list[SlowRank]:
    """The slow ranks among these heartbeats."""
    measured = [beat for beat in heartbeats if beat.own_s > 0]
    found = []
    for beat in measured:
        peers = [other.own_s for other in measured if other.stage == beat.stage and other.rank != beat.rank]
        usual = median(peers) if peers else beat.usual_s
        if usual and beat.own_s > FACTOR * usual and beat.own_s - usual > LEAST_SHARE * beat.step_s:
            found.append(SlowRank(beat.rank, beat.host, beat.own_s, usual, not peers))
    return found


TICK_S = 0.25
FAST_AFTER_S = 2.0  # without progress, from which on heartbeats are frequent
CONFIRM_S = 2.5  # between the two readings that show which ranks are silent: several frequent heartbeats
MARGIN_S = 10.0  # a hang is named within 2 × step + MARGIN_S
REACT_S = 2.0  # of MARGIN_S, for the ticks and the reading
UNKNOWN_S = 600.0  # limit where no duration is known
SILENT_S = 60.0  # limit for silence where no duration is known: a long call may keep the interpreter from beating
GRACE_S = 2.0  # for the rank that reports, before the others exit
SIGNAL_S = 3.0  # without progress after a signal, from which on the rank exits
LEARNED = 3  # steps after which their time is known
KEPT = 64
ENOUGH = 5  # steps whose work is measured before it is compared
HUNG_EXIT = 70


class Activity(Protocol):
    """The state of the communication recorder while a step runs."""

    completed: int  # operations that have ended
    issued: dict[str, int]
    steps: deque[RecordedStep]

    def open_operation(self) -> Operation | None: ...


class Watchdog(Hook):
    """Watch the ranks of one attempt of a run. `report(error, rank)` publishes the root cause; `note(kind, text)` writes an event."""

    def __init__(
        self,
        rank: int,
        world: int,
        folder: HeartbeatFolder,
        activity: Activity,
        *,
        stage: int = 0,
        hang_s: float = 0.0,
        report: Callable[[MeshwrightError, int], None],
        note: Callable[[str, str], None] = lambda kind, text: None,
        signalled: Callable[[], bool] = lambda: False,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self.rank, self.world, self.folder, self.activity = rank, world, folder, activity
        self.stage, self.hang_s = stage, hang_s
        self.report, self.note, self.leave = report, note, leave
        self.signalled, self.signal_at = signalled, float("inf")
        self.identity: Json = {"host": socket.gethostname(), "pid": os.getpid(), "started": process_start(os.getpid())}
        self.phase, self.step, self.beats = "start", 0, 0
        self.seconds: deque[float] = deque(maxlen=KEPT)
        self.own: deque[float] = deque(maxlen=9)
        self.earlier: deque[float] = deque(maxlen=16 * 9)
        self.last_measured = -1
        self.seen: tuple[Any, ...] = ()
        self.moved = time.monotonic()
        self.next_beat = 0.0
        self.named_slow: set[int] = set()
        self.slow_before: set[int] = set()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)

    # Hook: two assignments per call, no lock; the thread reads them

    def start(self, trainer: Any) -> None:
        self.step = trainer.step
        if not self.thread.is_alive():
            self.thread.start()

    def before_step(self, trainer: Any) -> None:
        self.step, self.phase = trainer.step, "step"

    def after_step(self, trainer: Any, record: StepRecord) -> None:
        self.seconds.append(record.seconds)
        self.phase = "hooks"

    def finish(self, trainer: Any) -> None:
        self.phase = "end"

    def stop(self) -> None:
        """End the thread; the rank is no longer watched."""
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join(timeout=10 * TICK_S)

    # The thread

    def watch(self) -> None:
        while not self.ended.wait(TICK_S):
            with contextlib.suppress(OSError):  # a full disk must not end the watch
                self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        state = (self.phase, self.step, self.activity.completed)
        if state != self.seen:
            self.seen, self.moved = state, now
        stalled = now - self.moved
        if now >= self.next_beat or (stalled > FAST_AFTER_S and self.next_beat - now > FAST_BEAT_S):
            self.beat(now)
            if self.rank == 0 and self.phase == "step":
                self.name_slow_ranks()
        if self.signalled():
            self.signal_at = now
        if min(stalled, now - self.signal_at) > self.signal_limit:
            self.leave(128 + signal.SIGTERM)
        if stalled > self.silence_limit:
            self.inspect(now)

    @property
    def signal_limit(self) -> float:
        """How long this rank may stand still after a signal. If it waits for others for longer than their steps take, the launcher ends it because
        another one has failed. Otherwise the job is to end, and this rank computes or saves: it is left alone."""
        waits = self.phase == "step" and self.activity.open_operation() is not None
        return max(SIGNAL_S, 2 * max(self.seconds, default=0.0)) if waits else float("inf")

    def beat(self, now: float) -> Heartbeat:
        self.next_beat = now + (FAST_BEAT_S if now - self.moved > FAST_AFTER_S else SLOW_BEAT_S)
        self.measure_own_work()
        self.beats += 1
        heartbeat = Heartbeat(
            rank=self.rank,
            attempt=self.folder.attempt,
            beat=self.beats,
            stage=self.stage,
            step=self.step,
            phase=self.phase,
            stalled_s=now - self.moved,
            operation=self.activity.open_operation(),
            issued=dict(self.activity.issued),
            own_s=median(self.own) if len(self.own) >= ENOUGH else 0.0,
            usual_s=median(self.earlier) if len(self.earlier) >= ENOUGH else 0.0,
            step_s=median(self.seconds) if self.seconds else 0.0,
            **self.identity,
        )
        self.folder.write(heartbeat)
        return heartbeat

    def measure_own_work(self) -> None:
        """Add the own work of the newest recorded steps: their time without that in which the rank was blocked."""
        for recorded in list(self.activity.steps)[-3:]:
            if recorded.step <= self.last_measured:
                continue
            self.last_measured = recorded.step
            blocked = of_spans(
                span for e in recorded.events for span in ((e.issued, e.returned), (e.waited, e.resumed))
            )
            if len(self.own) == self.own.maxlen:
                self.earlier.append(self.own[0])
            self.own.append(recorded.ended - recorded.began - length(blocked))

    @property
    def learned_s(self) -> float | None:
        """The stall after which a hang is confirmed and named; None as long as the time of a step is unknown."""
        if self.hang_s:
            return max(self.hang_s - CONFIRM_S - REACT_S, TICK_S)
        if len(self.seconds) < LEARNED:
            return None
        return 2 * median(list(self.seconds)) + MARGIN_S - CONFIRM_S - REACT_S

    @property
    def hang_limit(self) -> float:
        """Seconds without progress after which this rank hangs."""
        limit = self.learned_s
        if self.phase == "step" and limit is not None:
            return limit
        return max(UNKNOWN_S, limit or 0.0)

    @property
    def silence_limit(self) -> float:
        """Seconds without progress after which this rank looks for silent ranks."""
        return min(self.learned_s or SILENT_S, self.hang_limit)

    def inspect(self, now: float) -> None:
        """Read all heartbeats twice; act if some rank is silent, or if every rank has stood still for its limit."""
        before, seen, limit = self.folder.read_all(self.world), self.seen, self.hang_limit
        until = now + CONFIRM_S
        while (now := time.monotonic()) < until:
            self.beat(now)
            if self.ended.wait(FAST_BEAT_S) or seen != (self.phase, self.step, self.activity.completed):
                return
        mine = self.beat(time.monotonic())
        after = {**self.folder.read_all(self.world), self.rank: mine}
        silent = {
            rank
            for rank in range(self.world)
            if rank != self.rank and (rank not in after or (rank in before and before[rank].beat == after[rank].beat))
        }
        finished = {rank for rank in silent if rank in after and after[rank].phase == "end"}
        silent -= finished
        if not silent and mine.stalled_s < limit:
            return
        verdict = diagnose(after, silent)
        moving = verdict.kind == "computing" and after[verdict.ranks[0]].stalled_s < mine.stalled_s - 2 * CONFIRM_S
        if not moving:  # a slow rank between two collectives is no hang
            self.conclude(verdict, after, silent)

    def conclude(self, verdict: HangVerdict, heartbeats: dict[int, Heartbeat], silent: set[int]) -> None:
        """Report the verdict once, and end this process."""
        hung = set(verdict.ranks) if verdict.kind in ("silent", "computing", "device") else set()
        judges = [rank for rank in range(self.world) if rank not in hung and rank not in silent] or [self.rank]
        if self.rank in verdict.ranks:
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        with contextlib.suppress(OSError):
            write_flight_record(self.folder.run_folder, self.rank)
        if self.rank == judges[0]:
            self.report(hang_error(verdict, heartbeats), verdict.ranks[0])
            for rank in silent:
                self.kill_on_this_host(heartbeats.get(rank))
        else:
            time.sleep(GRACE_S)
        self.ended.set()
        self.leave(HUNG_EXIT)

    def kill_on_this_host(self, heartbeat: Heartbeat | None) -> None:
        """End a stopped process, so that its launcher does not wait for it to react to a gentler signal."""
        if heartbeat is None or heartbeat.host != self.identity["host"] or not heartbeat.started:
            return
        if heartbeat.pid != os.getpid() and process_start(heartbeat.pid) == heartbeat.started:
            with contextlib.suppress(OSError):
                os.kill(heartbeat.pid, signal.SIGKILL)

    def name_slow_ranks(self) -> None:
        """Write an event for each rank that was slow twice in a row, and for each that is no longer."""
        found = {slow.rank: slow for slow in slow_ranks(self.folder.read_all(self.world).values())}
        self.slow_before, before = set(found), self.slow_before
        found = {rank: slow for rank, slow in found.items() if rank in before | self.named_slow}
        for rank in found.keys() - self.named_slow:
            self.note("slow", found[rank].text)
        for rank in self.named_slow - found.keys():
            self.note("slow", f"rank {rank} is as fast as the other ranks again")
        self.named_slow = set(found)


def hang_error(verdict: HangVerdict, heartbeats: dict[int, Heartbeat]) -> MeshwrightError:
    hosts = sorted({heartbeats[rank].host for rank in verdict.ranks if rank in heartbeats})
    where = f" (host {', '.join(hosts)})" if hosts else ""
    return MeshwrightError("MW-FAULT-001", verdict.what + where, why=verdict.why, exit_code=HUNG_EXIT)
