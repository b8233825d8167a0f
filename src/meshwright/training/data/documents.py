"""The documents of a token file as one stream of tokens, divided into a training and a validation part.

A share of the documents, chosen by a hash of the document's number, is the validation set: the choice depends neither on the seed nor
on the other documents, so it stays the same when documents are appended.
"""

from __future__ import annotations

import numpy as np

from meshwright.training.data.token_file import TokenFile

HASH_BLOCK = 1 << 22  # documents hashed at a time


def is_validation(documents: np.ndarray, share: float) -> np.ndarray:
    """For each document number, whether it belongs to the validation set: its hash is below `share` (SplitMix64)."""
    with np.errstate(over="ignore"):
        x = (documents.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53 < share


class Documents:
    """The documents of a token file, or of its training or validation part, as one stream of tokens."""

    def __init__(self, file: TokenFile, share: float = 0.0, validation: bool = False) -> None:
        self.file, self.whole = file, not share
        if self.whole:
            self.starts, self.ends = file.offsets[:-1], file.offsets  # no copy: the memory map
            return
        chosen = np.concatenate(
            [
                is_validation(np.arange(start, min(start + HASH_BLOCK, file.documents)), share) == validation
                for start in range(0, file.documents, HASH_BLOCK)
            ]
        )
        numbers = np.flatnonzero(chosen)
        self.starts = np.asarray(file.offsets)[numbers]
        lengths = np.asarray(file.offsets)[numbers + 1] - self.starts
        self.ends = np.concatenate(([0], np.cumsum(lengths)))  # document d is [ends[d], ends[d + 1]) of the stream

    @property
    def tokens(self) -> int:
        return int(self.ends[-1])

    def lengths(self) -> np.ndarray:
        return np.diff(self.ends)

    def window(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens start … stop − 1 of the stream, and the number of the document of each, from 0 on."""
        first = int(np.searchsorted(self.ends, start, "right")) - 1
        last = int(np.searchsorted(self.ends, stop, "left"))
        edges = np.clip(np.asarray(self.ends[first : last + 1], dtype=np.int64), start, stop)
        numbers = np.repeat(np.arange(last - first, dtype=np.int32), np.diff(edges))
        if self.whole:
            return np.asarray(self.file.tokens[start:stop]).astype(np.int64), numbers
        begins = np.asarray(self.starts[first:last]) + edges[:-1] - np.asarray(self.ends[first:last])
        parts = [
            self.file.tokens[b : b + n] for b, n in zip(begins.tolist(), np.diff(edges).tolist(), strict=True) if n
        ]
        return np.concatenate(parts).astype(np.int64), numbers

    def pieces(self, seq: int) -> np.ndarray:
        """The number of sequences before each document, if a sequence never contains parts of two documents."""
        targets = np.maximum(self.lengths() - 1, 0)
        return np.concatenate(([0], np.cumsum(-(-targets // seq))))

    def sequences(self, seq: int, pack: bool) -> int:
        """The number of sequences of `seq` tokens, each with a next token, in the packed stream or document by document."""
        return max(0, (self.tokens - 1) // seq) if pack else int(self.pieces(seq)[-1])
