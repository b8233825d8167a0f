"""Sequences of S tokens cut from the documents of one token file.

Packed: documents follow one another, and sequence j is tokens [j·S, j·S + S + 1): its targets are its inputs moved by
one. Nothing is padding and no token is lost but the last, incomplete sequence. With document masks, attention stays inside a document,
and the last token of a document has no target: its next token belongs to another document.

Not packed: a sequence is one document, cut into pieces of S where it is longer and padded where it is shorter.
"""

from __future__ import annotations

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.models.loss import IGNORED
from meshwright.training.data.documents import Documents


class Sequences:
    """The sequences of one source: `count` of them, each (inputs, targets) or, with document masks, also document numbers."""

    def __init__(self, documents: Documents, seq: int, pack: bool, masked: bool, vocabulary: int) -> None:
        self.documents, self.seq, self.masked, self.vocabulary = documents, seq, masked, vocabulary
        self.pieces = None if pack else documents.pieces(seq)
        self.count = documents.sequences(seq, pack)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        tokens, numbers = self._packed(index) if self.pieces is None else self._piece(index)
        if tokens.max() >= self.vocabulary or tokens.min() < 0:
            raise MeshwrightError(
                "MW-DATA-006",
                f"'{self.documents.file.name}' contains the token {tokens.max() if tokens.min() >= 0 else tokens.min()}",
                why=f"The vocabulary of the model has {self.vocabulary} tokens",
                fix="--set model.vocab=N, or prepare the tokens with the tokenizer of the model",
            )
        inputs, targets = (np.zeros(self.seq, np.int64), np.full(self.seq, IGNORED, np.int64))
        known = len(tokens) - 1
        inputs[:known], targets[:known] = tokens[:-1], tokens[1:]
        if not self.masked:
            return inputs, targets
        targets[:known][numbers[1:] != numbers[:-1]] = IGNORED
        documents = np.full(self.seq, numbers[-1] + 1, np.int32)  # padding attends to padding only
        documents[:known] = numbers[:-1]
        return inputs, targets, documents

    def _packed(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.documents.window(index * self.seq, (index + 1) * self.seq + 1)

    def _piece(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """One piece of one document, with the token that follows it."""
        assert self.pieces is not None
        document = int(np.searchsorted(self.pieces, index, "right")) - 1
        start = int(self.documents.ends[document]) + (index - int(self.pieces[document])) * self.seq
        return self.documents.window(start, min(start + self.seq + 1, int(self.documents.ends[document + 1])))
