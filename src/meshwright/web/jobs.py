"""Worker processes: a bounded number, each with one request at a time, killed when a request takes too long or its client leaves.

    async for line in pool.lines("estimate", body): …

Requests beyond the workers wait; beyond the longest queue they are refused (429). A cheap request whose client has left is
finished and its answer dropped, since that takes milliseconds. A search whose client has left is stopped: its worker is killed, and a
new one is forked in its place.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from meshwright.describe import plugins
from meshwright.errors import MeshwrightError
from meshwright.units import Json
from meshwright.web.worker import FAILED, LINE, serve, to_line

PRELOAD = ["meshwright.web.preload"]


class Refused(Exception):
    """An answer with an error: the status of HTTP, and the error in the one shape."""

    def __init__(self, status: int, error: Json) -> None:
        super().__init__(status, error)
        self.status, self.error = status, error

    @classmethod
    def of(cls, status: int, error: MeshwrightError) -> Refused:
        return cls(status, error.as_dict())


@dataclass(eq=False)
class Worker:
    """One process and the pipe to it; `key` names what it computed last."""

    process: Any
    pipe: Connection
    key: str = ""
    killed: bool = False

    def end(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


@dataclass(eq=False)
class WorkerJob:
    """One request. Its messages wait in a queue until the client's task takes them."""

    request: bytes
    key: str
    messages: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    worker: Worker | None = None
    abandoned: bool = False  # the client has left
    expired: bool = False  # the time limit has passed

    def stop(self) -> None:
        """End the work now: the pipe of a killed worker closes, which the reader of its messages sees."""
        if self.worker is not None:
            self.worker.killed = True
            self.worker.process.kill()

    def expire(self) -> None:
        self.expired = True
        self.stop()


class WorkerPool:
    """A number of worker processes of one kind."""

    def __init__(self, kind: str, size: int, waiting: int, limit_s: float, finish: bool) -> None:
        self.kind, self.size, self.most_waiting, self.limit_s = kind, size, waiting, limit_s
        self.finish = finish  # whether a request whose client has left is computed to its end
        self.idle: list[Worker] = []
        self.waiting = 0
        self.closed = False
        self.free = asyncio.Semaphore(size)
        self.threads = ThreadPoolExecutor(size + 2, f"meshwright-{kind}")
        self.running: dict[asyncio.Task[None], WorkerJob] = {}
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    async def start(self) -> None:
        """Start all workers, so that the first requests find them ready."""
        self.idle += await asyncio.gather(*(self._call(self._new_worker) for _ in range(self.size)))

    async def close(self) -> None:
        """End every worker and the requests that wait."""
        self.closed = True
        for job in self.running.values():
            job.stop()
        if self.running:
            await asyncio.wait(list(self.running), timeout=5)
        for worker in self.idle:
            await self._call(worker.end)
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def lines(self, task: str, body: Any, key: str = "") -> AsyncGenerator[bytes, None]:
        """The lines of an answer as they arrive; raises `Refused` for an error. Close the iterator to stop the work."""
        if self.closed:
            raise Refused.of(503, STOPPING)
        if self.waiting >= self.most_waiting:
            raise Refused.of(429, too_busy(self.waiting))
        job = WorkerJob(json.dumps({"task": task, "body": body}).encode("utf-8"), key)
        runner = asyncio.get_running_loop().create_task(self._run(job))
        self.running[runner] = job
        runner.add_done_callback(self.running.pop)
        try:
            while (message := await job.messages.get())[:1] == LINE:
                yield message[1:]
            if message[:1] == FAILED:
                raise Refused(**json.loads(message[1:]))
        finally:
            job.abandoned = True
            if not self.finish:
                job.stop()

    async def _run(self, job: WorkerJob) -> None:
        """Wait for a worker, compute one request with it, and return it to the idle ones or replace it."""
        self.waiting += 1
        try:
            await self.free.acquire()
        finally:
            self.waiting -= 1
        try:
            if self.closed:
                job.messages.put_nowait(refusal(503, STOPPING))
            elif not job.abandoned:
                worker = job.worker = await self._take(job.key)
                alive = job.abandoned or await self._compute(job, worker)
                job.worker = None
                await self._put_back(worker, alive)
        finally:
            self.free.release()

    async def _compute(self, job: WorkerJob, worker: Worker) -> bool:
        """Pass the messages of a worker on. Returns whether the worker can be used again."""
        timer = asyncio.get_running_loop().call_later(self.limit_s, job.expire)
        try:
            await self._call(worker.pipe.send_bytes, job.request)
            message = LINE
            while message[:1] == LINE:
                message = await self._call(worker.pipe.recv_bytes)
                if message[:1] != LINE:
                    job.worker = None  # the worker is free: a client that leaves now must not kill it
                job.messages.put_nowait(message)
            return True
        except (EOFError, OSError):
            job.messages.put_nowait(refusal(504, too_long(self.limit_s)) if job.expired else refusal(503, ENDED))
            return False
        finally:
            timer.cancel()

    async def _take(self, key: str) -> Worker:
        """An idle worker, if possible the one that computed the same key last; a new one where none is idle."""
        same = next((worker for worker in self.idle if key and worker.key == key), None)
        if same is not None:
            self.idle.remove(same)
        worker: Worker = same or (self.idle.pop() if self.idle else await self._call(self._new_worker))
        worker.key = key
        return worker

    async def _put_back(self, worker: Worker, alive: bool) -> None:
        if alive and not worker.killed and not self.closed:  # its last message may have been read after it was killed
            self.idle.append(worker)
            return
        await self._call(worker.end)
        if not self.closed:
            self.idle.append(await self._call(self._new_worker))

    def _new_worker(self) -> Worker:
        here, there = self.context.Pipe()
        process = self.context.Process(target=serve, args=(there, self.kind, self.limit_s, plugins.LOADED), daemon=True)
        process.start()
        there.close()
        return Worker(process, here)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that blocks, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)


def refusal(status: int, error: MeshwrightError) -> bytes:
    """The message of a request that failed in the server, not in a worker."""
    return FAILED + to_line({"status": status, "error": error.as_dict()})


STOPPING = MeshwrightError("MW-WEB-003", "the server is stopping")
ENDED = MeshwrightError(
    "MW-WEB-003",
    "the process that computed the answer ended",
    why="It was killed, or it needed more memory than the machine has",
    fix="send the request again",
)


def too_busy(waiting: int) -> MeshwrightError:
    what, fix = f"{waiting} requests wait already", "try again in a second"
    return MeshwrightError("MW-WEB-002", what, why="The queue is full", fix=fix)


def too_long(limit_s: float) -> MeshwrightError:
    what, why = f"the answer takes longer than {limit_s:g} s", "The time of a request is limited"
    fix = "constrain the search, or run the command in a terminal, which has no time limit"
    return MeshwrightError("MW-WEB-001", what, why=why, fix=fix)
