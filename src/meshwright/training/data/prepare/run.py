"""Run a preparation: cut the sources into chunks, tokenize them in worker processes, join them in order.

The result does not depend on the number of workers: chunks are cut by their place in the files and joined in their order. A worker process
tokenizes a chunk and writes it as two files, tokens and document ends, renamed when they are complete. An interrupted run continues
where it stopped when the same command is given again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError, cannot_write, unknown
from meshwright.host import end_with_parent, usable_processes
from meshwright.training.data.prepare.chunks import (
    CHUNK,
    DOCUMENTS,
    FORMATS,
    Chunk,
    Reading,
    chunks_of,
    source_files,
    texts_in,
)
from meshwright.training.data.prepare.folder import OutputFolder, finished_header
from meshwright.training.data.token_file import Header, smallest_dtype
from meshwright.training.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_hash
from meshwright.training.launch.local import main_hidden
from meshwright.units import Json

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


def encode_to_files(chunk: Chunk, reading: Reading, stem: str) -> Json | None:
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
    """Write both files under temporary names and rename them. The ends begin with the number of tokens, so that a file that a crash of the
    machine cut short is found."""
    counted = np.append(len(encoded.tokens), encoded.ends).astype("<i8")
    for suffix, array in ((".ends", counted), (".tokens", encoded.tokens)):
        temporary = stem.with_suffix(f"{suffix}.{os.getpid()}")
        with temporary.open("wb") as file:
            array.tofile(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, stem.with_suffix(suffix))


AHEAD = 3  # chunks that are handed to the pool, per worker
Listen = Callable[[int, int], None]  # bytes done, bytes in all


def prepare(
    sources: Sequence[str | Path],
    out: str | Path,
    tokenizer: str = "bytes",
    *,
    field: str = "text",
    document: str = "file",
    format: str = "auto",
    split: str = "",
    end_token: str = "",
    workers: int = 0,
    chunk_bytes: int = CHUNK,
    listen: Listen | None = None,
) -> Header:
    """Tokenize sources into a token file and return its header. Raises before it writes anything if a source, the tokenizer or the
    folder cannot be used; `listen` is called as chunks finish. `workers` 0: one per core."""
    check_choices(document, format)
    out = Path(out)
    files = source_files(sources, format, split)
    opened = open_tokenizer(tokenizer, end_token)
    reading = Reading(field, document)
    header = {
        "vocabulary": opened.vocabulary,
        "end_token": opened.end,
        "tokenizer": opened.name,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "options": asdict(reading),
        "sources": [[Path(file.path).name, file.size] for file in files],
    }
    if (found := finished_header(out, header)) is not None:
        return found
    chunks = [chunk for file in files for chunk in chunks_of(file, reading, chunk_bytes)]
    job = {**header, "files": [asdict(file) for file in files], "chunk_bytes": chunk_bytes}
    with OutputFolder(out, job, smallest_dtype(opened.vocabulary)) as folder:
        try:
            Preparation(folder, chunks, reading, listen).tokenize(tokenizer, end_token, workers or usable_processes())
            return folder.finish(len(chunks), tokenizer, header)
        except OSError as error:
            raise cannot_write(error.filename or out, error) from error


class Preparation:
    """The chunks of one preparation on their way into its folder."""

    def __init__(self, folder: OutputFolder, chunks: list[Chunk], reading: Reading, listen: Listen | None) -> None:
        self.folder, self.chunks, self.reading, self.listen = folder, chunks, reading, listen
        self.total = sum(chunk.size for chunk in chunks)
        self.done = 0

    def tokenize(self, tokenizer: str, end_token: str, workers: int) -> None:
        """Tokenize all chunks that are not finished."""
        left = [i for i in range(len(self.chunks)) if not self.folder.is_finished(i)]
        missing = set(left)
        self.finished(*(i for i in range(len(self.chunks)) if i not in missing))
        if not left:
            return
        if min(workers, len(left)) == 1:  # starting a process would take longer than many a chunk
            open_once(tokenizer, end_token)
            for i in left:
                raise_error(encode_to_files(self.chunks[i], self.reading, str(self.folder.stem(i))))
                self.finished(i)
            return
        pool = ProcessPoolExecutor(min(workers, len(left)), get_context("forkserver"), begin, (tokenizer, end_token))
        try:
            self._tokenize_in(pool, left, workers)
        except BrokenProcessPool:
            raise MeshwrightError(
                "MW-DATA-018",
                "a worker process ended unexpectedly",
                why="The system may have run out of memory",
                fix="run the same command again, with fewer workers (--workers 1); finished chunks are kept",
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _tokenize_in(self, pool: ProcessPoolExecutor, left: list[int], workers: int) -> None:
        running: dict[Future[Any], int] = {}
        waiting = iter(left)
        while True:
            for i in islice(waiting, workers * AHEAD - len(running)):
                stem = str(self.folder.stem(i))
                with main_hidden():  # the pool starts its processes here
                    running[pool.submit(encode_to_files, self.chunks[i], self.reading, stem)] = i
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                raise_error(future.result())
                self.finished(running.pop(future))

    def finished(self, *chunks: int) -> None:
        self.done += sum(self.chunks[i].size for i in chunks)
        if self.listen is not None:
            self.listen(self.done, self.total)


def raise_error(fields: Json | None) -> None:
    if fields is not None:
        raise MeshwrightError(fields.pop("code"), fields.pop("what"), **fields)


def check_choices(document: str, format: str) -> None:
    if document not in DOCUMENTS:
        raise unknown("MW-DATA-010", "the kind of document", document, DOCUMENTS, "--document {}")
    if format not in ("auto", *FORMATS):
        raise unknown("MW-DATA-010", "the format", format, ("auto", *FORMATS), "--format {}")
