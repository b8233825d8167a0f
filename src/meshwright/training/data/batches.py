"""Batches that depend only on (seed, step, index of the sample), so that every layout trains on the same global batch.

Sample i of a step is the same on every rank; data-parallel rank d of D takes the indices [d·B/D, (d+1)·B/D). From each
sample a context-parallel rank keeps the tokens at its positions.

A sample is (input, target) or (input, target, documents): the third array numbers the document of each token, and
attention does not cross from one document to another. Every rank keeps the document numbers of the whole sequence, since
its tokens attend to tokens of other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from meshwright.models.loss import IGNORED


class Samples(Protocol):
    """A source of samples, by step and index in the global batch."""

    def sample(self, step: int, index: int) -> tuple[np.ndarray, ...]: ...


class Batch(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor
    documents_BS: torch.Tensor | None = None  # on the host: masks are built there, tile by tile

    @property
    def valid(self) -> torch.Tensor:
        """The number of targets that are not padding: tokens, or rows of a regression."""
        if self.targets.is_floating_point():
            return (~self.targets[:, 0].isnan()).sum()
        return (self.targets != IGNORED).sum()

    def to(self, device: str) -> Batch:
        """The batch on a device; from pinned memory the copy does not wait."""
        inputs, targets = (side.to(device, non_blocking=side.is_pinned()) for side in self[:2])
        return Batch(inputs, targets, self.documents_BS)


def batch_of(
    samples: Samples,
    step: int,
    indices: Sequence[int],
    device: str,
    dtype: torch.dtype,
    positions: torch.Tensor | None = None,
) -> Batch:
    """The samples of a step with these indices, and the tokens at these positions (None: all tokens)."""
    rows = [samples.sample(step, i) for i in indices]
    inputs, targets, *documents = (torch.from_numpy(np.stack(side)) for side in zip(*rows, strict=True))
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
        targets = (
            targets.to(dtype) if targets.is_floating_point() else targets
        )  # labels of images stay numbers of classes
    else:  # a file may store tokens in 16 bits; an embedding lookup needs 64
        inputs, targets = inputs.long(), targets.long()
    if positions is not None:
        inputs, targets = inputs[:, positions], targets[:, positions]
    return Batch(inputs, targets, documents[0] if documents else None).to(device)
