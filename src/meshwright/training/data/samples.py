"""The samples of a run: the sequences of its token files in the order of `order`, or windows of the default corpus."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.describe.config import Config
from meshwright.models.loss import IGNORED
from meshwright.training.data.batches import Samples
from meshwright.training.data.corpus import Corpus
from meshwright.training.data.documents import Documents
from meshwright.training.data.order import Order
from meshwright.training.data.sequences import Sequences
from meshwright.training.data.sources import training_documents, validation_documents


class TokenSamples:
    """Samples drawn from a mixture of sources. Sample i of step t is draw t · batch + i."""

    def __init__(self, sources: Sequence[Sequences], weights: Sequence[float], batch: int, seed: int) -> None:
        self.sources, self.batch = sources, batch
        self.order = Order([s.count for s in sources], weights or [s.documents.tokens for s in sources], seed)

    def sample(self, step: int, index: int) -> tuple[np.ndarray, ...]:
        source, sequence = self.order.draw(step * self.batch + index)
        return self.sources[source][sequence]

    def epochs(self, step: int) -> list[float]:
        """How often each source was read when this many steps are done."""
        return self.order.epochs(step * self.batch)


class ValidationSamples:
    """The same sequences in every evaluation: in the order of the sources, mixed by their sizes, each at most once. Where the
    last batch is larger than what is left, its samples are padding."""

    def __init__(self, sources: Sequence[Sequences], batch: int, batches: int) -> None:
        self.sources, self.batch = sources, batch
        sizes = [s.count for s in sources]
        self.order = Order(sizes, sizes, seed=0, shuffle=False)
        self.count = min(batches * batch, sum(sizes))
        self.batches = -(-self.count // batch)

    def sample(self, step: int, index: int) -> tuple[np.ndarray, ...]:
        number = step * self.batch + index
        source, sequence = self.order.draw(min(number, self.count - 1))
        found = self.sources[source][sequence]
        if number < self.count:
            return found
        return found[0], np.full_like(found[1], IGNORED), *found[2:]


def training_samples(config: Config, seed: int) -> Samples:
    """What a run with this configuration trains on."""
    data = config.data
    if not data.path:
        return Corpus(config.model, config.workload.seq, seed)
    seed = seed if data.seed is None else data.seed
    return TokenSamples(sequences(config, training_documents(data)), data.weights, config.workload.batch, seed)


def validation_samples(config: Config) -> ValidationSamples | None:
    """What a run is evaluated on; None if it is not evaluated."""
    data = config.data
    if not data.eval_every:
        return None
    return ValidationSamples(sequences(config, validation_documents(data)), config.workload.batch, data.eval_batches)


def sequences(config: Config, documents: Sequence[Documents]) -> list[Sequences]:
    data, seq, vocabulary = config.data, config.workload.seq, config.model.padded_vocab
    return [Sequences(part, seq, data.pack, data.document_mask, vocabulary) for part in documents]
