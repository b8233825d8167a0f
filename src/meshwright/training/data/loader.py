"""Batches prepared ahead of the step that needs them, by one thread.

The thread reads the memory-mapped tokens of the next steps, stacks them and, for a GPU, copies them into pinned memory,
while the device computes. The step then finds its batch ready; `waits` counts the steps that did not. The order of samples
is a function of the step, so steps need no synchronisation with the thread: the loader asks for step t + 1, t + 2, …, and a
step that was not expected (the first, or one after a restart) is read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from meshwright.training.data.batches import Batch, Samples, batch_of


class Loader:
    """This rank's batches by step. `ahead` is the number of steps that are prepared in advance; 0: none, no thread."""

    def __init__(
        self,
        samples: Samples,
        device: str,
        dtype: torch.dtype,
        positions: torch.Tensor | None,
        ahead: int = 0,
    ) -> None:
        self.samples, self.positions = samples, positions
        self.device, self.dtype, self.ahead = device, dtype, ahead
        self.indices: Sequence[int] = ()
        self.steps = self.waits = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader") if ahead else None
        self._ready: dict[int, Future[Batch]] = {}

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        """The samples of a step with these indices, on the device; the following steps are prepared from now on. What the
        thread raised is raised here."""
        if self._thread is None:
            return self._read(step, indices).to(self.device)
        expected = range(step, step + self.ahead + 1) if indices == self.indices else range(0)
        self._ready = {s: future for s, future in self._ready.items() if s in expected}
        self.indices = indices
        for s in range(step, step + self.ahead + 1):
            if s not in self._ready:
                self._ready[s] = self._thread.submit(self._read, s, indices)
        future = self._ready.pop(step)
        self.steps += 1
        self.waits += not future.done()
        return future.result().to(self.device)

    def _read(self, step: int, indices: Sequence[int]) -> Batch:
        batch = batch_of(self.samples, step, indices, "cpu", self.dtype, self.positions)
        if not self.device.startswith("cuda"):
            return batch
        return Batch(batch.inputs.pin_memory(), batch.targets.pin_memory(), batch.documents_BS)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
