"""The output folder of a preparation, while it is being written.

    OUT/partial/job.json          what is being prepared: sources, tokenizer, options
    OUT/partial/000012.tokens     a finished chunk, with 000012.ends; deleted once it is appended
    OUT/partial/tokens.bin        chunks 0 … k − 1, appended in order; documents.bin likewise
    OUT/partial/progress.json     k, and how long both files are: what lies beyond is dropped on a restart

At the end both files are moved to OUT, and header.json is written last. An interruption at any moment loses at most the chunks in
work; nothing that was there before is overwritten.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from meshwright.errors import MeshwrightError, cannot_write
from meshwright.training.data.token_file import DOCUMENTS, HEADER, TOKENIZER, TOKENS, Header, file_hash, read_header
from meshwright.training.data.tokenizer import BYTES

PARTIAL = "partial"


@dataclass(frozen=True)
class Progress:
    """Counts of what was appended: chunks, tokens and documents, and the largest token."""

    chunks: int = 0
    tokens: int = 0
    documents: int = 0
    largest_token: int = 0


class OutputFolder:
    """Use as a context manager: it holds the folder against a second process, and creates nothing if the job is refused."""

    def __init__(self, path: Path, job: dict[str, Any], dtype: np.dtype) -> None:
        self.path, self.job, self.dtype = path, job, dtype
        self.partial = path / PARTIAL
        self.progress = Progress()
        self.files: dict[str, BinaryIO] = {}
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
            self._continue()
        except OSError as error:
            self.__exit__()
            raise cannot_write(self.path, error) from error
        except MeshwrightError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        for file in (*self.files.values(), *([self.lock] if self.lock else [])):
            file.close()

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
        replace_text(file, digest)

    def _continue(self) -> None:
        """Open both arrays at the state of the last progress file."""
        file = self.partial / "progress.json"
        if file.is_file():
            self.progress = Progress(**json.loads(file.read_text("utf-8")))
        sizes = {TOKENS: self.progress.tokens * self.dtype.itemsize, DOCUMENTS: 8 * (self.progress.documents + 1)}
        for name, size in sizes.items():
            if (self.path / name).exists():  # moved by a run that was interrupted before it wrote the header
                os.replace(self.path / name, self.partial / name)
            self.files[name] = (self.partial / name).open("r+b" if (self.partial / name).exists() else "w+b")
            self.files[name].truncate(size)
            self.files[name].seek(size)
        if not self.progress.documents:
            self.files[DOCUMENTS].seek(0)
            self.files[DOCUMENTS].write(np.zeros(1, "<i8").tobytes())

    def stem(self, chunk: int) -> Path:
        return self.partial / f"{chunk:06d}"

    def is_finished(self, chunk: int) -> bool:
        """Whether a chunk was tokenized, now or before an interruption."""
        if chunk < self.progress.chunks:
            return True
        tokens, ends = (self.stem(chunk).with_suffix(suffix) for suffix in (".tokens", ".ends"))
        if not (tokens.exists() and ends.exists()):
            return False
        counted = np.fromfile(ends, "<i8", count=1)
        return len(counted) == 1 and tokens.stat().st_size == counted[0] * self.dtype.itemsize

    def append(self, chunk: int) -> None:
        """Append the next chunk to the arrays, record the progress and delete the files of the chunk."""
        p, stem = self.progress, self.stem(chunk)
        tokens = np.fromfile(stem.with_suffix(".tokens"), self.dtype)
        ends = p.tokens + np.fromfile(stem.with_suffix(".ends"), "<i8")[1:]
        self.files[TOKENS].write(tokens.tobytes())
        self.files[DOCUMENTS].write(ends.astype("<i8").tobytes())
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        largest = max(p.largest_token, int(tokens.max(initial=0)))
        self.progress = Progress(chunk + 1, p.tokens + len(tokens), p.documents + len(ends), largest)
        replace_text(self.partial / "progress.json", json.dumps(asdict(self.progress)))
        for suffix in (".tokens", ".ends"):
            stem.with_suffix(suffix).unlink()

    def finish(self, tokenizer: str, header: dict[str, Any]) -> Header:
        """Move the arrays into the folder and write the header."""
        if not self.progress.tokens:
            raise MeshwrightError("MW-DATA-017", "the sources contain no text", why="No token was written")
        for file in self.files.values():
            file.close()
        hashes = {name: file_hash(self.partial / name) for name in (TOKENS, DOCUMENTS)}
        p = self.progress
        made = Header(
            dtype=self.dtype.name,
            tokens=p.tokens,
            documents=p.documents,
            largest_token=p.largest_token,
            hashes=hashes,
            **header,
        )
        for name in (TOKENS, DOCUMENTS):
            os.replace(self.partial / name, self.path / name)
        if tokenizer != BYTES:
            shutil.copyfile(tokenizer, self.path / TOKENIZER)
        replace_text(self.path / HEADER, json.dumps(made.as_dict(), indent=1))
        shutil.rmtree(self.partial)
        return made


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new text, never a part."""
    temporary = path.with_suffix(".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def finished_header(path: Path, header: dict[str, Any]) -> Header | None:
    """The header of a folder that was already prepared from the same sources in the same way; None if there is none. Raises if
    the folder holds other tokens."""
    if not (path / HEADER).is_file():
        return None
    found = read_header(path)
    same = all(getattr(found, name) == value for name, value in header.items())
    if same and not (path / PARTIAL).exists():
        return found
    if same:
        shutil.rmtree(path / PARTIAL)
        return found
    raise MeshwrightError(
        "MW-DATA-015",
        f"'{path}' already contains tokens of other sources, or made with other options",
        why="A preparation overwrites nothing",
        fix="--out another folder",
    )
