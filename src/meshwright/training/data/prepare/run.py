"""Run a preparation: cut the sources into chunks, tokenize them in worker processes, append them in order.

The result does not depend on the number of workers: chunks are cut by their place in the files and appended in their order. At most
a few chunks per worker wait for their turn, on disk. An interrupted run continues where it stopped when the same command is given
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, cannot_write, unknown
from meshwright.host import usable_processes
from meshwright.training.data.prepare import worker
from meshwright.training.data.prepare.chunks import CHUNK, DOCUMENTS, Chunk, Reading, chunks_of
from meshwright.training.data.prepare.files import FORMATS, source_files
from meshwright.training.data.prepare.folder import OutputFolder, finished_header
from meshwright.training.data.token_file import Header, smallest_dtype
from meshwright.training.data.tokenizer import open_tokenizer, tokenizer_hash
from meshwright.training.launch.local import main_hidden

AHEAD = 3  # chunks in work or waiting, per worker
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
            Run(folder, chunks, reading, listen).tokenize(tokenizer, end_token, workers or usable_processes())
            return folder.finish(tokenizer, header)
        except OSError as error:
            raise cannot_write(error.filename or out, error) from error


class Run:
    """The chunks of one preparation on their way into its folder."""

    def __init__(self, folder: OutputFolder, chunks: list[Chunk], reading: Reading, listen: Listen | None) -> None:
        self.folder, self.chunks, self.reading, self.listen = folder, chunks, reading, listen
        self.total = sum(chunk.size for chunk in chunks)
        self.done = 0

    def tokenize(self, tokenizer: str, end_token: str, workers: int) -> None:
        """Tokenize all chunks that are not finished, and append all."""
        left = [i for i in range(len(self.chunks)) if not self.folder.is_finished(i)]
        missing = set(left)
        self.finished(*(i for i in range(len(self.chunks)) if i not in missing))
        self.append_ready()
        if not left:
            return
        if min(workers, len(left)) == 1:  # starting a process would take longer than many a chunk
            worker.open_once(tokenizer, end_token)
            for i in left:
                raise_error(worker.encode_to_files(self.chunks[i], self.reading, str(self.folder.stem(i))))
                self.finished(i)
                self.append_ready()
            return
        pool = ProcessPoolExecutor(
            min(workers, len(left)), get_context("forkserver"), worker.begin, (tokenizer, end_token)
        )
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
                    running[pool.submit(worker.encode_to_files, self.chunks[i], self.reading, stem)] = i
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                raise_error(future.result())
                self.finished(running.pop(future))
            self.append_ready()

    def finished(self, *chunks: int) -> None:
        self.done += sum(self.chunks[i].size for i in chunks)
        if self.listen is not None:
            self.listen(self.done, self.total)

    def append_ready(self) -> None:
        """Append every finished chunk whose predecessors are all appended."""
        while (i := self.folder.progress.chunks) < len(self.chunks) and self.folder.is_finished(i):
            self.folder.append(i)


def raise_error(fields: dict[str, Any] | None) -> None:
    if fields is not None:
        raise MeshwrightError(fields.pop("code"), fields.pop("what"), **fields)


def check_choices(document: str, format: str) -> None:
    if document not in DOCUMENTS:
        raise unknown("MW-DATA-010", "the kind of document", document, DOCUMENTS, "--document {}")
    if format not in ("auto", *FORMATS):
        raise unknown("MW-DATA-010", "the format", format, ("auto", *FORMATS), "--format {}")
