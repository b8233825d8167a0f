"""The handle of an asynchronous collective, with the methods that torch.distributed and its C++ callers use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work as TorchWork

from meshwright.errors import MeshwrightError


class Work(TorchWork):
    """`wait` returns True when the collective is complete on this rank, and raises its error if it failed."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self.value = result
        self.error: BaseException | None = None
        self.finished_at = float("nan")  # of time.perf_counter
        self.event, self.lock = threading.Event(), threading.Lock()
        self.future: torch.futures.Future | None = None

    def finish(self, error: BaseException | None = None) -> Work:
        """Mark the collective as complete or failed."""
        with self.lock:
            self.error, self.finished_at = error, time.perf_counter()
            self.event.set()
            future = self.future
        if future is not None:
            self.resolve(future)
        return self

    def resolve(self, future: torch.futures.Future) -> None:
        if self.error is None:
            future.set_result(self.value)
        else:
            future.set_exception(self.error if isinstance(self.error, Exception) else RuntimeError(str(self.error)))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = timeout.total_seconds() or None
        if not self.event.wait(limit):
            what = f"the collective did not complete within {limit:g} s (Timed out waiting)"
            raise MeshwrightError("MW-COMM-004", what)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.event.is_set()

    def is_success(self) -> bool:
        return self.event.is_set() and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        self.wait()
        return self.value

    def get_future(self) -> torch.futures.Future:
        with self.lock:
            new, self.future = self.future is None, self.future or torch.futures.Future()
            complete = self.event.is_set()
        if new and complete:
            self.resolve(self.future)
        return self.future


class Deferred(Work):
    """A handle whose `wait` does the work: for operations that torch.distributed itself completes in the background."""

    def __init__(self, complete: Callable[[], Any], result: Any = None) -> None:
        super().__init__(result)
        self.complete = complete
        self.source = -1  # the sender, of a receive from any rank

    def _source_rank(self) -> int:
        return self.source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.event.is_set():
            try:
                self.complete()
            except BaseException as error:
                self.finish(error)
            else:
                self.finish()
        return super().wait()

    def get_future(self) -> torch.futures.Future:
        self.wait()
        return super().get_future()
