"""Document masks: in a sequence packed from several documents, a token attends only to tokens of its own document.

Without the mask, attention also reads the documents before it in the sequence. With it, a document trains as if
it stood alone, apart from its positions: rotary attention depends only on distances, so they make no difference there.

Every token has a document number, [B, S] for the whole sequences of the micro-batch. A context-parallel rank has these numbers
for all tokens, not only for its own, so the mask of any block of queries and keys needs no communication:

    visible(q, k) = (document[q] == document[k])   and what causality and the window allow

Like the moment of dropout, the numbers reach attention through a context variable, so the layers between need not pass them on,
and a recomputed layer finds the numbers of its first forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

_documents: ContextVar[torch.Tensor | None] = ContextVar("documents", default=None)


@contextlib.contextmanager
def within_documents(documents_BS: torch.Tensor | None) -> Iterator[None]:
    """Inside this context, attention stays within documents (None: it sees whole sequences)."""
    token = _documents.set(documents_BS)
    try:
        yield
    finally:
        _documents.reset(token)


def current_documents() -> torch.Tensor | None:
    """The document number of each token of the micro-batch, [B, S]; None without document masks."""
    return _documents.get()


def same_document(documents_BS: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[B, 1, R, C]: whether the tokens at two lists of positions belong to the same document, for all heads."""
    return (documents_BS[:, rows, None] == documents_BS[:, None, columns]).unsqueeze(1)
