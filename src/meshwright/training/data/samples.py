"""The samples of a run, and the batches of a rank.

**Batches** depend only on (seed, step, index of the sample), so every layout trains on the same global batch. Sample i of a step is the same
on every rank; data-parallel rank d of D takes the indices [d·B/D, (d+1)·B/D). From each sample a context-parallel rank keeps the tokens at
its positions.

**A sample** is (input, target) or (input, target, documents): the third array numbers the document of each token, and attention does not
cross from one document to another. Every rank keeps the document numbers of the whole sequence, since its tokens attend to tokens of other
ranks.

**Sequences** of S tokens are cut from the documents of a token file, or are windows of the default corpus. Packed: documents follow one
another, and sequence j is tokens [j·S, j·S + S + 1): its targets are its inputs moved by one. Nothing is padding and no token is lost but the
last, incomplete sequence. With document masks, attention stays inside a document, and the last token of a document has no target: its next
token belongs to another document. Not packed: a sequence is one document, cut into pieces of S where it is longer and padded where it is
shorter. Of conversations, only learned tokens are targets; the loss is the mean over all targets of the step, wherever they are.

**Random samples** are for proofs of parity: their padding differs from sample to sample, so that a loss averaged per rank is detected; with
documents, so do the lengths of the documents in them.

**The loader** prepares batches ahead of the step that needs them, in one thread. It reads the memory-mapped tokens of the next steps, stacks
them and, for a GPU, copies them into pinned memory, while the device computes; `waits` counts the steps whose batch was not ready. The order
of samples is a function of the step, so the loader asks for step t + 1, t + 2, … without synchronisation, and a step that was not expected
(the first, or one after a restart) is read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.models.loss import IGNORED
from meshwright.training.data.sources import Corpus, Documents, Order, training_documents, validation_documents


class Samples(Protocol):
    """A source of samples, by step and index in the global batch."""

    def sample(self, step: int, index: int) -> tuple[np.ndarray, ...]: ...


class TokenBatch(NamedTuple):
    inputs: Tensor
    targets: Tensor
    documents_BS: Tensor | None = None  # on the host: masks are built there, tile by tile

    @property
    def valid(self) -> Tensor:
        """The number of targets that are not padding: tokens, or rows of a regression."""
        if self.targets.is_floating_point():
            return (~self.targets[:, 0].isnan()).sum()
        return (self.targets != IGNORED).sum()

    def to(self, device: str) -> TokenBatch:
        """The batch on a device; from pinned memory the copy does not wait."""
        inputs, targets = (side.to(device, non_blocking=side.is_pinned()) for side in self[:2])
        return TokenBatch(inputs, targets, self.documents_BS)


def batch_of(
    samples: Samples,
    step: int,
    indices: Sequence[int],
    device: str,
    dtype: torch.dtype,
    positions: Tensor | None = None,
) -> TokenBatch:
    """The samples of a step with these indices, and the tokens at these positions (None: all tokens)."""
    rows = [samples.sample(step, i) for i in indices]
    inputs, targets, *documents = (torch.from_numpy(np.stack(side)) for side in zip(*rows, strict=True))
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
        # Labels of images stay numbers of classes
        targets = targets.to(dtype) if targets.is_floating_point() else targets
    else:  # a file may store tokens in 16 bits; an embedding lookup needs 64
        inputs, targets = inputs.long(), targets.long()
    if positions is not None:
        inputs, targets = inputs[:, positions], targets[:, positions]
    return TokenBatch(inputs, targets, documents[0] if documents else None).to(device)


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


class Sequences:
    """The sequences of one source: `count` of them, each (inputs, targets) or, with document masks, also document numbers."""

    def __init__(self, documents: Documents, seq: int, pack: bool, masked: bool, vocabulary: int) -> None:
        self.documents, self.seq, self.masked, self.vocabulary = documents, seq, masked, vocabulary
        self.pieces = None if pack else documents.pieces(seq)
        self.count = documents.sequences(seq, pack)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        tokens, numbers, learned = self.documents.window(*self._bounds(index))
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
        if learned is not None:
            targets[:known][learned[1:] == 0] = IGNORED
        if not self.masked:
            return inputs, targets
        targets[:known][numbers[1:] != numbers[:-1]] = IGNORED
        documents = np.full(self.seq, numbers[-1] + 1, np.int32)  # padding attends to padding only
        documents[:known] = numbers[:-1]
        return inputs, targets, documents

    def _bounds(self, index: int) -> tuple[int, int]:
        """Where a sequence begins in the stream, and where the token after it ends: all tokens, or a piece of one document."""
        if self.pieces is None:
            return index * self.seq, (index + 1) * self.seq + 1
        document = int(np.searchsorted(self.pieces, index, "right")) - 1
        start = int(self.documents.ends[document]) + (index - int(self.pieces[document])) * self.seq
        return start, min(start + self.seq + 1, int(self.documents.ends[document + 1]))


class TokenSamples:
    """Samples drawn from a mixture of sources. Sample i of step t is draw t · batch + i."""

    def __init__(self, sources: Sequence[Sequences], weights: Sequence[float], batch: int, seed: int) -> None:
        self.sources, self.batch = sources, batch
        self.order = Order([s.count for s in sources], weights or [s.documents.tokens for s in sources], seed)

    def sample(self, step: int, index: int) -> tuple[np.ndarray, ...]:
        source, sequence = self.order.draw(step * self.batch + index)
        return self.sources[source][sequence]


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
    """Return the training samples of a configuration."""
    data = config.data
    if not data.path:
        return Corpus(config.model, config.workload.seq, seed)
    seed = seed if data.seed is None else data.seed
    return TokenSamples(sequences(config, training_documents(data)), data.weights, config.workload.batch, seed)


def validation_samples(config: Config) -> ValidationSamples | None:
    """Return the validation samples of a run; None if it is not evaluated."""
    data = config.data
    if not data.eval_every:
        return None
    return ValidationSamples(sequences(config, validation_documents(data)), config.workload.batch, data.eval_batches)


def sequences(config: Config, documents: Sequence[Documents]) -> list[Sequences]:
    data, seq, vocabulary = config.data, config.workload.seq, config.model.padded_vocab
    return [Sequences(part, seq, data.pack, data.document_mask, vocabulary) for part in documents]


class Loader:
    """This rank's batches by step. `ahead` is the number of steps that are prepared in advance; 0: none, no thread."""

    def __init__(
        self, samples: Samples, device: str, dtype: torch.dtype, positions: Tensor | None, ahead: int = 0
    ) -> None:
        self.samples, self.positions = samples, positions
        self.device, self.dtype, self.ahead = device, dtype, ahead
        self.indices: Sequence[int] = ()
        self.steps = self.waits = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader") if ahead else None
        self._ready: dict[int, Future[TokenBatch]] = {}

    def batch(self, step: int, indices: Sequence[int]) -> TokenBatch:
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

    def _read(self, step: int, indices: Sequence[int]) -> TokenBatch:
        batch = batch_of(self.samples, step, indices, "cpu", self.dtype, self.positions)
        if not self.device.startswith("cuda"):
            return batch
        return TokenBatch(batch.inputs.pin_memory(), batch.targets.pin_memory(), batch.documents_BS)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
