"""The output folder of a preparation, while it is being written.

    OUT/partial/job.json          what is being prepared: sources, tokenizer, options
    OUT/partial/000012.tokens     a finished chunk, with 000012.ends

At the end the chunks are joined in their order, the two arrays are moved to OUT, and header.json is written last. An interruption at any
moment loses at most the chunks in work; nothing that was there before is overwritten.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import numpy as np

from meshwright.errors import MeshwrightError, cannot_write
from meshwright.host import replace_file
from meshwright.training.data.token_file import DOCUMENTS, HEADER, TOKENIZER, TOKENS, Header, file_hash, read_header
from meshwright.training.data.tokenizer import BYTES
from meshwright.units import Json

PARTIAL = "partial"


class OutputFolder:
    """Use as a context manager: it holds the folder against a second process, and creates nothing if the job is refused."""

    def __init__(self, path: Path, job: Json, dtype: np.dtype) -> None:
        self.path, self.job, self.dtype = path, job, dtype
        self.partial = path / PARTIAL
        self.lock: BinaryIO | None = None

    def __enter__(self) -> OutputFolder:
        try:
            if self.path.exists() and not self.partial.is_dir() and any(self.path.iterdir()):
                raise MeshwrightError(
                    "MW-DATA-015",
                    f"the folder '{self.path}' is not empty",
                    why="A preparation overwrites nothing",
                    fix="--out another folder",
                )
            self.partial.mkdir(parents=True, exist_ok=True)
            self._lock()
            self._check_job()
        except OSError as error:
            self.__exit__()
            raise cannot_write(self.path, error) from error
        except MeshwrightError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        if self.lock is not None:
            self.lock.close()

    def _lock(self) -> None:
        self.lock = (self.partial / "lock").open("wb")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise MeshwrightError(
                "MW-DATA-015", f"another process is preparing '{self.path}'", fix="wait for it, or --out another folder"
            ) from None

    def _check_job(self) -> None:
        file = self.partial / "job.json"
        digest = hashlib.sha256(json.dumps(self.job, sort_keys=True).encode()).hexdigest()
        if file.is_file() and file.read_text("utf-8") != digest:
            raise MeshwrightError(
                "MW-DATA-015",
                f"'{self.path}' holds an unfinished preparation of other sources, or with other options",
                why="The sources, their sizes or times, the tokenizer or the options differ",
                fix=f"delete '{self.partial}', or --out another folder",
            )
        replace_file(file, digest)

    def stem(self, chunk: int) -> Path:
        return self.partial / f"{chunk:06d}"

    def is_finished(self, chunk: int) -> bool:
        """Whether a chunk was tokenized, now or before an interruption."""
        tokens, ends = (self.stem(chunk).with_suffix(suffix) for suffix in (".tokens", ".ends"))
        if not (tokens.exists() and ends.exists()):
            return False
        counted = np.fromfile(ends, "<i8")  # the number of tokens, then the ends, of which the last is that number
        if not len(counted) or counted[-1] != counted[0]:
            return False
        return tokens.stat().st_size == int(counted[0]) * self.dtype.itemsize

    def finish(self, chunks: int, tokenizer: str, header: Json) -> Header:
        """Join the chunks, move the arrays into the folder and write the header."""
        count = documents = largest = 0
        with (self.partial / TOKENS).open("wb") as all_tokens, (self.partial / DOCUMENTS).open("wb") as all_ends:
            all_ends.write(np.zeros(1, "<i8").tobytes())
            for stem in map(self.stem, range(chunks)):
                tokens = np.fromfile(stem.with_suffix(".tokens"), self.dtype)
                ends = count + np.fromfile(stem.with_suffix(".ends"), "<i8")[1:]
                all_tokens.write(tokens.tobytes())
                all_ends.write(ends.astype("<i8").tobytes())
                count, documents = count + len(tokens), documents + len(ends)
                largest = max(largest, int(tokens.max(initial=0)))
            for file in (all_tokens, all_ends):
                file.flush()
                os.fsync(file.fileno())
        if not count:
            raise MeshwrightError("MW-DATA-017", "the sources contain no text", why="No token was written")
        hashes = {name: file_hash(self.partial / name) for name in (TOKENS, DOCUMENTS)}
        counts: Json = {"tokens": count, "documents": documents, "largest_token": largest}
        made = Header(dtype=self.dtype.name, hashes=hashes, **counts, **header)
        for name in (TOKENS, DOCUMENTS):
            os.replace(self.partial / name, self.path / name)
        if tokenizer != BYTES:
            shutil.copyfile(tokenizer, self.path / TOKENIZER)
        replace_file(self.path / HEADER, json.dumps(made.as_dict(), indent=1))
        shutil.rmtree(self.partial)
        return made


def finished_header(path: Path, header: Json) -> Header | None:
    """The header of a folder that was already prepared from the same sources in the same way; None if there is none. Raises if
    the folder holds other tokens."""
    if not (path / HEADER).is_file():
        return None
    prepared = read_header(path)
    if all(getattr(prepared, name) == value for name, value in header.items()):
        shutil.rmtree(path / PARTIAL, ignore_errors=True)
        return prepared
    raise MeshwrightError(
        "MW-DATA-015",
        f"'{path}' already contains tokens of other sources, or made with other options",
        why="A preparation overwrites nothing",
        fix="--out another folder",
    )
