"""The default corpus, which exists on every machine that can run this: the source of Python's standard library, as bytes.

A vocabulary of 256 is enough for it, and it needs no network and no preparation. A run file with `[data]` names token
files instead.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.training.records import BYTE_VALUES

CORPUS_BYTES = 8_000_000
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@cache
def standard_library(limit: int = CORPUS_BYTES) -> np.ndarray:
    """The bytes of the standard library's source files, in the order of their paths."""
    text = bytearray()
    for path in sorted(source_files(Path(sysconfig.get_paths()["stdlib"]))):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return np.frombuffer(bytes(text[:limit]), dtype=np.uint8)


def source_files(root: Path) -> Iterator[Path]:
    """The Python files under a folder. Skipped folders are not listed at all: installed packages have many more files than the
    library, and every rank looks for them."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


class Corpus:
    """Windows of a byte text: the target is the next byte (for the MLP, the next `hidden` bytes scaled to ±1). For a residual network the bytes
    of a window are the colours of an image, and the next byte its class."""

    def __init__(self, model: Model, seq: int, seed: int, text: np.ndarray | None = None) -> None:
        self.text = standard_library() if text is None else text
        self.mlp, self.seed, self.resnet = model.kind == "mlp", seed, model.resnet
        self.length = model.hidden if self.mlp else 3 * self.resnet.image**2 if self.resnet.stages else seq
        if model.unit == "tokens" and model.padded_vocab < BYTE_VALUES:
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
        if self.resnet.stages:
            image = (window[:-1].astype(np.float32) / 127.5 - 1).reshape(3, self.resnet.image, self.resnet.image)
            return image, np.asarray(window[-1] % self.resnet.classes, np.int64)
        if self.mlp:
            scaled = window.astype(np.float32) / 127.5 - 1
            return scaled[: self.length], scaled[self.length :]
        tokens = window.astype(np.int64)
        return tokens[:-1], tokens[1:]
