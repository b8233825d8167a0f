"""Batches that depend only on (seed, step, index of the sample), so that every layout trains on the same global batch.

Sample i of a step is the same on every rank; data-parallel rank d of D takes the indices [d·B/D, (d+1)·B/D). From each
sample a context-parallel rank keeps the tokens at its positions.

The default corpus exists on every machine that can run this: the source of Python's standard library, as bytes, so a
vocabulary of 256 is enough. Random tokens are for proofs of parity: their padding differs from sample to sample, so that
a loss averaged per rank is detected.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.models.transformer import IGNORED
from meshwright.training.records import BYTE_VALUES

CORPUS_BYTES = 8_000_000
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


class Samples(Protocol):
    """A source of samples: (input, target) by step and index in the global batch."""

    def sample(self, step: int, index: int) -> tuple[np.ndarray, np.ndarray]: ...


class Batch(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def valid(self) -> torch.Tensor:
        """The number of targets that are not padding: tokens, or rows of a regression."""
        if self.targets.is_floating_point():
            return (~self.targets[:, 0].isnan()).sum()
        return (self.targets != IGNORED).sum()


def batch_of(
    samples: Samples,
    step: int,
    indices: Sequence[int],
    device: str,
    dtype: torch.dtype,
    positions: torch.Tensor | None = None,
) -> Batch:
    """The samples of a step with these indices, and the tokens at these positions (None: all tokens)."""
    pairs = [samples.sample(step, i) for i in indices]
    inputs, targets = (torch.from_numpy(np.stack(side)) for side in zip(*pairs, strict=True))
    if inputs.is_floating_point():
        inputs, targets = inputs.to(dtype), targets.to(dtype)
    else:  # a file may store tokens in 16 bits; an embedding lookup needs 64
        inputs, targets = inputs.long(), targets.long()
    if positions is not None:
        inputs, targets = inputs[:, positions], targets[:, positions]
    return Batch(inputs.to(device), targets.to(device))


@cache
def standard_library(limit: int = CORPUS_BYTES) -> np.ndarray:
    """The bytes of the standard library's source files, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not SKIPPED & set(p.relative_to(root).parts))
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return np.frombuffer(bytes(text[:limit]), dtype=np.uint8)


class Corpus:
    """Windows of a byte text: the target is the next byte (for the MLP, the next `hidden` bytes scaled to ±1)."""

    def __init__(self, model: Model, seq: int, seed: int, text: np.ndarray | None = None) -> None:
        self.text = standard_library() if text is None else text
        self.mlp, self.seed = model.kind == "mlp", seed
        self.length = model.hidden if self.mlp else seq
        if not self.mlp and model.padded_vocab < BYTE_VALUES:
            raise MeshwrightError(
                "MW-DATA-001",
                f"a vocabulary of {model.vocab} is smaller than the {BYTE_VALUES} byte values of the corpus",
                fix=f"--set model.vocab={BYTE_VALUES}",
            )
        if len(self.text) < 2 * self.length + 1:
            raise MeshwrightError(
                "MW-DATA-002", f"a corpus of {len(self.text)} bytes is shorter than one sample of {self.length}"
            )

    def sample(self, step: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        span = 2 * self.length if self.mlp else self.length + 1
        start = int(np.random.default_rng((self.seed, step, index)).integers(0, len(self.text) - span))
        window = self.text[start : start + span]
        if self.mlp:
            scaled = window.astype(np.float32) / 127.5 - 1
            return scaled[: self.length], scaled[self.length :]
        tokens = window.astype(np.int64)
        return tokens[:-1], tokens[1:]


class RandomSamples:
    """Random tokens. The last targets of a sample are padding, a different number in each, none in some."""

    def __init__(self, model: Model, seq: int, seed: int) -> None:
        self.model, self.seq, self.seed = model, seq, seed

    def sample(self, step: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng((self.seed, step, index))
        if self.model.kind == "mlp":
            inputs, targets = random.standard_normal((2, self.model.hidden))
            return inputs, targets if index % 3 else np.full_like(targets, np.nan)
        tokens = random.integers(0, self.model.vocab, self.seq + 1)
        targets = tokens[1:].copy()
        padding = index * 3 % (self.seq // 2 + 1)
        if padding:
            targets[-padding:] = IGNORED
        return tokens[:-1], targets
