"""The token files that [data] names, opened and checked against the model: before any rank starts, and again in each rank.

Checks that read only headers and indices are made here; a token outside the vocabulary in a file without a header (Megatron's)
is found when its batch is read (`sequences`).

The order of samples: a pure function of the seed and the number of the sample in the whole training.

Sample g = step · batch + index is drawn from a mixture of sources. Both questions, which source and which of its sequences, are
answered by arithmetic on g, without a shuffle buffer, a list of indices or any state. So the order is the same for every number
of ranks, every layout and every restart, and a resumed training needs only its step.

**Which source.** With weights w₁, w₂, … and W = Σ w, the first g samples contain ⌊g·w₁/W⌋ of source 1. Sample g belongs to
source 1 if this number grows from g to g + 1; else it is sample g − ⌊g·w₁/W⌋ of the mixture of the other sources, and the rule
repeats. Any run of consecutive samples is mixed by the weights to within one sample per source.

**Which sequence.** The n-th draw from a source of size N is in epoch ⌊n/N⌋, and its sequence is a permutation of n mod N with a
key from (seed, source, epoch). The permutation is a Feistel network on the smallest power of four that is at least N: a number
is cut into halves, and in each round one half is changed by a hash of the other, which can be undone whatever the hash is. A
result outside 0 … N − 1 is permuted again until it is inside (fewer than four times on average). It needs no memory,
where a shuffled list of indices takes 8 bytes for each sequence on every rank.

The default corpus, which exists on every machine that can run this: the source of Python's standard library, as bytes.

A vocabulary of 256 is enough for it, and it needs no network and no preparation. A run file with `[data]` names token
files instead.

The documents of a token file as one stream of tokens, divided into a training and a validation part.

A share of the documents, chosen by a hash of the document's number, is the validation set: the choice depends neither on the seed nor
on the other documents, so it stays the same when documents are appended.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.run import Data
from meshwright.errors import MeshwrightError
from meshwright.training.data.token_file import TokenFile, check_offsets, open_tokens
from meshwright.training.data.tokenizer import tokenizer_hash
from meshwright.training.hooks import BYTE_VALUES

ROUNDS = 6
MASK = 2**64 - 1
PRECISION = 2**40  # weights are compared as whole numbers of this precision, so that sums are exact


def mix(x: Any) -> Any:
    """Mix the 64 bits of a number, or of each of an array (the finaliser of SplitMix64)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


@lru_cache(64)
def round_keys(*key: int) -> tuple[int, ...]:
    """The keys of the rounds of one permutation."""
    words = hashlib.blake2b(":".join(map(str, key)).encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(words[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


def permuted(index: int, size: int, *key: int) -> int:
    """The image of `index` under a permutation of 0 … size − 1."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, keys = (1 << half) - 1, round_keys(*key)
    while True:
        left, right = index >> half, index & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        index = left << half | right
        if index < size:
            return index


class Order:
    """Draws from sources of these sizes, mixed by weights. Without `shuffle` the sequences of a source are drawn in file order."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool = True) -> None:
        self.sizes, self.seed, self.shuffle = list(sizes), seed, shuffle
        total = sum(weights)
        exact = [weight for weight in weights if isinstance(weight, int)]
        scaled = [max(1, round(weight / total * PRECISION)) for weight in weights]
        self.weights = exact if len(exact) == len(weights) else scaled

    def locate(self, sample: int) -> tuple[int, int]:
        """The source of a sample of the training, and how many samples of this source come before it."""
        total = sum(self.weights)
        for source, weight in enumerate(self.weights[:-1]):
            before = sample * weight // total
            if (sample + 1) * weight // total > before:
                return source, before
            sample, total = sample - before, total - weight
        return len(self.weights) - 1, sample

    def draw(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and the number of its sequence in it."""
        source, drawn = self.locate(sample)
        epoch, index = divmod(drawn, self.sizes[source])
        if self.shuffle:
            index = permuted(index, self.sizes[source], self.seed, source, epoch)
        return source, index


CORPUS_BYTES = 8_000_000
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@cache
def standard_library() -> np.ndarray:
    """The bytes of the standard library's source files, in the order of their paths."""
    text = bytearray()
    for path in sorted(source_files(Path(sysconfig.get_paths()["stdlib"]))):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return np.frombuffer(bytes(text[:CORPUS_BYTES]), dtype=np.uint8)


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


HASH_BLOCK = 1 << 22  # documents hashed at a time


def is_validation(documents: np.ndarray, share: float) -> np.ndarray:
    """For each document number, whether it belongs to the validation set: its hash is below `share`."""
    x = mix((documents.astype(np.uint64) + 1) * 0x9E3779B97F4A7C15)
    return (x >> 11).astype(np.float64) * 2.0**-53 < share


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

    def window(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Tokens start … stop − 1 of the stream, the number of the document of each, from 0 on, and which are learned (None: all)."""
        first = int(np.searchsorted(self.ends, start, "right")) - 1
        last = int(np.searchsorted(self.ends, stop, "left"))
        edges = np.clip(np.asarray(self.ends[first : last + 1], dtype=np.int64), start, stop)
        lengths = np.diff(edges)
        numbers = np.repeat(np.arange(last - first, dtype=np.int32), lengths)
        parts = [(start, stop - start)]
        if not self.whole:
            begins = np.asarray(self.starts[first:last]) + edges[:-1] - np.asarray(self.ends[first:last])
            parts = [(b, n) for b, n in zip(begins.tolist(), lengths.tolist(), strict=True) if n]
        tokens, learned = (
            None if array is None else np.concatenate([array[b : b + n] for b, n in parts])
            for array in (self.file.tokens, self.file.learned)
        )
        assert tokens is not None
        return tokens.astype(np.int64), numbers, learned

    def pieces(self, seq: int) -> np.ndarray:
        """The number of sequences before each document, if a sequence never contains parts of two documents."""
        targets = np.maximum(self.lengths() - 1, 0)
        return np.concatenate(([0], np.cumsum(-(-targets // seq))))

    def sequences(self, seq: int, pack: bool) -> int:
        """The number of sequences of `seq` tokens, each with a next token, in the packed stream or document by document."""
        return max(0, (self.tokens - 1) // seq) if pack else int(self.pieces(seq)[-1])


def training_documents(data: Data) -> list[Documents]:
    """The documents of each path, without those kept for validation."""
    return [Documents(open_tokens(path), data.validation) for path in data.path]


def validation_documents(data: Data) -> list[Documents]:
    """The validation documents: the files of `validation_path`, or the validation share of each path."""
    if data.validation_path:
        return [Documents(open_tokens(path)) for path in data.validation_path]
    return [Documents(open_tokens(path), data.validation, validation=True) for path in data.path]


def check_data(config: Config) -> None:
    """Raise if a run cannot train on its data: a missing, damaged or foreign file, another tokenizer, a vocabulary that is too
    small for it, or too few tokens for one sequence."""
    data, model = config.data, config.model
    if not data.path:
        return
    if model.unit != "tokens":
        raise MeshwrightError(
            "MW-DATA-008",
            f"{model.name or 'the model'} has no sequence and does not train on tokens",
            fix="remove [data], or train a transformer",
        )
    files = [open_tokens(path) for path in (*data.path, *data.validation_path)]
    for file in files:
        check_offsets(file)
        check_vocabulary(file, model.padded_vocab)
    check_tokenizers(files, data.tokenizer)
    seq = config.workload.seq
    check_lengths(training_documents(data), seq, data.pack, "")
    if data.validation or data.validation_path:
        check_lengths(validation_documents(data), seq, data.pack, "validation ")


def check_vocabulary(file: TokenFile, vocabulary: int) -> None:
    """Raise if the model has fewer token values than the tokenizer of a file."""
    if file.vocabulary > vocabulary:
        raise MeshwrightError(
            "MW-DATA-006",
            f"the tokenizer of '{file.name}' has {file.vocabulary:,} tokens, the model {vocabulary:,}",
            why="A token above the vocabulary has no row in the embedding",
            fix=f"--set model.vocab={file.vocabulary}",
        )


def check_tokenizers(files: Sequence[TokenFile], tokenizer: str) -> None:
    """Raise if the files were made with different tokenizers, or not with the one that [data] names."""
    hashes = {file.header.tokenizer_hash: file for file in files if file.header}
    if len(hashes) > 1:
        one, other = list(hashes.values())[:2]
        raise MeshwrightError(
            "MW-DATA-007",
            f"'{one.name}' and '{other.name}' were made with different tokenizers",
            why="The same token would mean different text",
            fix="prepare all sources with one tokenizer",
        )
    if tokenizer and hashes and tokenizer_hash(tokenizer) not in hashes:
        (file,) = hashes.values()
        name = file.header.tokenizer if file.header else ""
        raise MeshwrightError(
            "MW-DATA-007",
            f"'{file.name}' was not made with '{Path(tokenizer).name}'",
            why=f"Its header names the tokenizer '{name}' with another hash",
            fix="prepare the sources with this tokenizer, or correct data.tokenizer",
        )


def check_lengths(documents: Sequence[Documents], seq: int, pack: bool, kind: str) -> None:
    """Raise if a source has no sequence of `seq` tokens."""
    for part in documents:
        if not part.sequences(seq, pack):
            raise MeshwrightError(
                "MW-DATA-002",
                f"the {kind}documents of '{part.file.name}' have {part.tokens:,} tokens: too few for one sequence of {seq:,}",
                fix="use more text, a shorter sequence (--set workload.seq=N) or another data.validation",
            )
