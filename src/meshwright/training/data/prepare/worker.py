"""One worker process: tokenizes chunks and writes each as two files, tokens and document ends, renamed when they are complete."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError, cannot_write
from meshwright.host import end_with_parent
from meshwright.training.data.prepare.chunks import Chunk, Reading, texts_in
from meshwright.training.data.token_file import smallest_dtype
from meshwright.training.data.tokenizer import Tokenizer, open_tokenizer

TEXTS = 1 << 20  # characters that are handed to the tokenizer at once
_tokenizer: Tokenizer | None = None  # opened once in each worker process


class Encoded(NamedTuple):
    """The tokens of a chunk, and where documents end in it; the last document may end in a later chunk."""

    tokens: np.ndarray
    ends: np.ndarray


def begin(tokenizer: str, end: str) -> None:
    """Called once in a new worker process: it ends with its parent, Ctrl-C is the parent's, and one process uses one core."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    open_once(tokenizer, end)


def open_once(tokenizer: str, end: str) -> None:
    global _tokenizer
    _tokenizer = open_tokenizer(tokenizer, end)


def encode_to_files(chunk: Chunk, reading: Reading, stem: str) -> dict[str, Any] | None:
    """Tokenize a chunk into STEM.tokens and STEM.ends. Returns the fields of an error, since an exception of ours cannot be sent
    between processes."""
    assert _tokenizer is not None
    try:
        encoded = encode(texts_in(chunk, reading), _tokenizer)
        write(Path(stem), encoded)
    except MeshwrightError as error:
        return {**error.as_dict(), "exit_code": error.exit_code}
    except OSError as error:
        return {**cannot_write(stem, error).as_dict(), "exit_code": 2}
    return None


def encode(texts: Iterable[tuple[str, bool]], tokenizer: Tokenizer) -> Encoded:
    """The tokens of texts, each with the end token where a document ends."""
    parts: list[np.ndarray] = []
    ends: list[int] = []
    length, dtype = 0, smallest_dtype(tokenizer.vocabulary)
    closing = np.array([] if tokenizer.end is None else [tokenizer.end], dtype)
    for batch in batches(texts):
        for tokens, (_, ended) in zip(tokenizer.encode([text for text, _ in batch]), batch, strict=True):
            parts.append(tokens.astype(dtype, copy=False))
            length += len(tokens)
            if ended:
                parts.append(closing)
                length += len(closing)
                ends.append(length)
    return Encoded(np.concatenate(parts) if parts else np.empty(0, dtype), np.array(ends, "<i8"))


def batches(texts: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Lists of texts with at most about `TEXTS` characters together."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text, ended in texts:
        batch.append((text, ended))
        size += len(text)
        if size >= TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write(stem: Path, encoded: Encoded) -> None:
    """Write both files under temporary names and rename them. The ends begin with the number of tokens, so that a tokens file
    that a crash of the machine cut short is found."""
    counted = np.append(len(encoded.tokens), encoded.ends).astype("<i8")
    for suffix, array in ((".ends", counted), (".tokens", encoded.tokens)):
        temporary = stem.with_suffix(f"{suffix}.{os.getpid()}")
        with temporary.open("wb") as file:
            array.tofile(file)
        os.replace(temporary, stem.with_suffix(suffix))
