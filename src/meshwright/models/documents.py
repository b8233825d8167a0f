"""Document masks: in a sequence packed from several documents, a token attends only to tokens of its own document.

Without the mask, attention also reads the documents before it in the sequence. With it, a document trains as if
it stood alone, apart from its positions: rotary attention depends only on distances, so they make no difference there.

Every token has a document number, [B, S] for the whole sequences of the micro-batch. A context-parallel rank has these numbers
for all tokens, not only for its own, so the mask of any block of queries and keys needs no communication:

    visible(q, k) = (document[q] == document[k])   and what causality and the window allow

The numbers reach attention through the `step_context`.
"""

from torch import Tensor


def same_document(documents_BS: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """[B, 1, R, C]: whether the tokens at two lists of positions belong to the same document, for all heads."""
    return (documents_BS[:, rows, None] == documents_BS[:, None, columns]).unsqueeze(1)
