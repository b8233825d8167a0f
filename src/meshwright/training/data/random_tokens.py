"""Random samples for proofs of parity: their padding differs from sample to sample, so that a loss averaged per rank is
detected; with documents, so do the lengths of the documents in them."""

from __future__ import annotations

import numpy as np

from meshwright.describe.model import Model
from meshwright.models.loss import IGNORED


class RandomSamples:
    """Random tokens. The last targets of a sample are padding, a different number in each, none in some. With `documents`
    a sample consists of several documents of random lengths, and some samples of one document."""

    def __init__(self, model: Model, seq: int, seed: int, documents: bool = False) -> None:
        self.model, self.seq, self.seed, self.documents = model, seq, seed, documents

    def sample(self, step: int, index: int) -> tuple[np.ndarray, ...]:
        random = np.random.default_rng((self.seed, step, index))
        if self.model.resnet.stages:
            o = self.model.resnet
            label = random.integers(0, o.classes) if index % 3 else IGNORED
            return random.standard_normal((3, o.image, o.image)), np.asarray(label, np.int64)
        if self.model.kind == "mlp":
            inputs, targets = random.standard_normal((2, self.model.hidden))
            return inputs, targets if index % 3 else np.full_like(targets, np.nan)
        tokens = random.integers(0, self.model.vocab, self.seq + 1)
        targets = tokens[1:].copy()
        padding = index * 3 % (self.seq // 2 + 1)
        if padding:
            targets[-padding:] = IGNORED
        if not self.documents:
            return tokens[:-1], targets
        starts = random.random(self.seq) < (0.1, 0.3, 0.0)[index % 3]
        starts[self.seq // 3] |= index % 3 < 2  # short sequences have two documents too
        return tokens[:-1], targets, np.cumsum(starts, dtype=np.int32)
