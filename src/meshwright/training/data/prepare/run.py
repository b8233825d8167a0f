"""Run a preparation: read the sources in order, tokenize their texts batch by batch, and append the tokens to the token file.

    OUT/partial/job.json                      what is being prepared: sources, tokenizer, options
    OUT/partial/tokens.bin, documents.bin     the arrays so far; of conversations also learned.bin
    OUT/partial/done.json                     how much of them is complete: batches, tokens, documents

A tokenizer file encodes the texts of a batch on all cores. An interrupted run continues after the last complete batch when the same command
is given again. At the end the arrays are moved to OUT and header.json is written last; nothing that was there before is overwritten.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError, cannot_write, unknown
from meshwright.host import replace_file
from meshwright.training.data.prepare import texts
from meshwright.training.data.prepare.chat import PARTS, Spans, check_learn, check_template, learned_tokens
from meshwright.training.data.prepare.own_template import OwnTemplate, is_own
from meshwright.training.data.prepare.texts import Reading, SourceFile, source_files, texts_of
from meshwright.training.data.token_file import (
    DOCUMENTS,
    HEADER,
    LEARNED,
    TOKENIZER,
    TOKENS,
    Header,
    file_hash,
    read_header,
    smallest_dtype,
)
from meshwright.training.data.tokenizer import BYTES, Tokenizer, open_tokenizer, tokenizer_hash
from meshwright.units import Json

BATCH = 1 << 21  # characters that are handed to the tokenizer at once
PARTIAL = "partial"
Listen = Callable[[int, int], None]  # bytes done, bytes in all


class TextBatch(NamedTuple):
    """Some texts, whether a document ends with each, the learned parts of each, and the bytes of all sources that were read until the end
    of the last."""

    texts: list[str]
    ended: list[bool]
    learned: list[Spans]
    read: int


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
    template: str = "",
    learn: str = "assistant",
    date: str = "",
    workers: int = 0,
    batch: int = BATCH,
    listen: Listen | None = None,
) -> Header:
    """Tokenize sources into a token file and return its header. Raises before it writes anything if a source, the tokenizer or the
    output folder cannot be used. With a `template` the rows are conversations, which end as it ends them: an end token follows only if
    `end_token` names one. `date`: of a tokenizer's template that asks for it; default: today. `workers`: threads of the tokenizer; 0: as
    many as there are cores."""
    check_choices(document, format)
    check_needed(template, learn=learn != PARTS[0], date=bool(date))
    if workers:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # read when a tokenizer first encodes
    out, files = Path(out), source_files(sources, format, split)
    opened = open_tokenizer(tokenizer, end_token or ("none" if template else ""))
    with ExitStack() as stack:
        own = None
        if template:
            check_learn(learn)
            if is_own(template):
                own = stack.enter_context(OwnTemplate(template, tokenizer, opened, learn, date))
            else:
                check_template(template, opened)
        reading = Reading(field, document, template, learn, own)
        return write_tokens(out, files, reading, tokenizer, opened, batch, listen)


def write_tokens(
    out: Path,
    files: list[SourceFile],
    reading: Reading,
    tokenizer: str,
    opened: Tokenizer,
    batch: int,
    listen: Listen | None,
) -> Header:
    """Tokenize the files into the folder; a folder with the same tokens is left as it is."""
    header = {
        "vocabulary": opened.vocabulary,
        "end_token": opened.end,
        "tokenizer": opened.name,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "options": reading.options(),
        "sources": [[Path(file.path).name, file.size] for file in files],
    }
    if (found := finished_header(out, header)) is not None:
        return found
    job = {**header, "files": [asdict(file) for file in files], "batch": batch}
    total = sum(file.size for file in files)
    with OutputFolder(out, job, smallest_dtype(opened.vocabulary)) as folder:
        try:
            for part in islice(batches(files, reading, batch), folder.done["batches"], None):
                folder.append(*encode(part, opened))
                if listen is not None:
                    listen(part.read, total)
            return folder.finish(tokenizer, header)
        except OSError as error:
            raise cannot_write(error.filename or out, error) from error


def check_needed(template: str, **options: bool) -> None:
    """Raise for options that have no effect without a template, or without that of the tokenizer."""
    for name, is_set in options.items():
        needed = "--template" if name == "learn" else "--template tokenizer"
        if is_set and not (template if name == "learn" else is_own(template)):
            why = (
                "All tokens of a text are learned"
                if name == "learn"
                else "Only the template of a tokenizer can ask for it"
            )
            what = f"--{name} has no effect without {needed}"
            raise MeshwrightError("MW-DATA-018", what, why=why, fix=f"remove --{name}")


def check_choices(document: str, format: str) -> None:
    if document not in texts.DOCUMENTS:
        raise unknown("MW-DATA-010", "the kind of document", document, texts.DOCUMENTS, "--document {}")
    if format not in ("auto", *texts.FORMATS):
        raise unknown("MW-DATA-010", "the format", format, ("auto", *texts.FORMATS), "--format {}")


def batches(files: Iterable[SourceFile], reading: Reading, size: int) -> Iterator[TextBatch]:
    """The texts of all files, in batches of at least `size` characters. They depend on nothing but the files and the options."""
    batch, length, before = TextBatch([], [], [], 0), 0, 0
    for file in files:
        for text, ended, read, learned in texts_of(file, reading, min(size, texts.PIECE)):
            batch.texts.append(text)
            batch.ended.append(ended)
            batch.learned.append(learned)
            length += len(text)
            if length >= size:
                yield batch._replace(read=before + read)
                batch, length = TextBatch([], [], [], 0), 0
        before += file.size
    if batch.texts:
        yield batch._replace(read=before)


def encode(batch: TextBatch, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of a batch, each document with the end token; where documents end, of which the last may end in a later batch; and which
    tokens of conversations are learned: the end token is."""
    dtype = smallest_dtype(tokenizer.vocabulary)
    closing = np.array([] if tokenizer.end is None else [tokenizer.end], dtype)
    parts: list[np.ndarray] = []
    masks = [np.empty(0, np.uint8)]
    if any(batch.learned):
        pairs = tokenizer.encode_with_offsets(batch.texts)
        encoded = [tokens for tokens, _ in pairs]
        for (_, offsets), spans in zip(pairs, batch.learned, strict=True):
            masks += [learned_tokens(offsets, spans), np.ones(len(closing), np.uint8)]
    else:
        encoded = tokenizer.encode(batch.texts)
    ends, length = [], 0
    for tokens, ended in zip(encoded, batch.ended, strict=True):
        parts += [tokens.astype(dtype, copy=False), closing[: len(closing) * ended]]
        length += len(tokens) + len(closing) * ended
        ends += [length] * ended
    return np.concatenate(parts), np.array(ends, "<i8"), np.concatenate(masks)


class OutputFolder:
    """Use as a context manager: it holds the folder against a second process, and leaves nothing if no batch was completed."""

    def __init__(self, path: Path, job: Json, dtype: np.dtype) -> None:
        self.path, self.job, self.dtype = path, job, dtype
        self.partial = path / PARTIAL
        self.arrays = (TOKENS, DOCUMENTS, LEARNED) if "template" in job["options"] else (TOKENS, DOCUMENTS)
        self.lock: BinaryIO | None = None
        self.done = {"batches": 0, "tokens": 0, "documents": 0, "largest_token": 0}

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
            self._open()
        except (OSError, MeshwrightError) as error:
            if self.lock is not None:
                self.lock.close()
            if isinstance(error, MeshwrightError):
                raise
            raise cannot_write(self.path, error) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, MeshwrightError) and not self.done["batches"]:
            shutil.rmtree(self.partial, ignore_errors=True)
            with suppress(OSError):  # a folder of the user's
                self.path.rmdir()
        for file in (*self.files.values(), self.lock):
            assert file is not None
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
        replace_file(file, digest)

    def _open(self) -> None:
        """Open the arrays without what an interrupted batch wrote. Those that an interrupted `finish` has moved come back."""
        if (self.partial / "done.json").is_file():
            self.done = json.loads((self.partial / "done.json").read_text("utf-8"))
        for name in self.arrays:
            if (self.path / name).is_file():
                os.replace(self.path / name, self.partial / name)
        self.files = {name: (self.partial / name).open("ab") for name in self.arrays}
        self.files[TOKENS].truncate(self.done["tokens"] * self.dtype.itemsize)
        self.files[DOCUMENTS].truncate(8 * (self.done["documents"] + 1))  # a new file gets its first offset, 0
        if LEARNED in self.files:
            self.files[LEARNED].truncate(self.done["tokens"])

    def append(self, tokens: np.ndarray, ends: np.ndarray, learned: np.ndarray) -> None:
        """Add the tokens of a batch, where documents end in it, and which are learned; once it is on the disk, count it as done."""
        done = self.done
        arrays = (tokens, (done["tokens"] + ends).astype("<i8"), learned)
        for file, array in zip(self.files.values(), arrays, strict=False):
            file.write(array.tobytes())
            file.flush()
            os.fsync(file.fileno())
        self.done = {
            "batches": done["batches"] + 1,
            "tokens": done["tokens"] + len(tokens),
            "documents": done["documents"] + len(ends),
            "largest_token": max(done["largest_token"], int(tokens.max(initial=0))),
        }
        replace_file(self.partial / "done.json", json.dumps(self.done))

    def finish(self, tokenizer: str, header: Json) -> Header:
        """Move the arrays into the folder and write the header."""
        counts: Json = {name: count for name, count in self.done.items() if name != "batches"}
        if not counts["tokens"]:
            raise MeshwrightError("MW-DATA-017", "the sources contain no text", why="No token was written")
        hashes = {name: file_hash(self.partial / name) for name in self.arrays}
        made = Header(dtype=self.dtype.name, hashes=hashes, **counts, **header)
        for name in self.arrays:
            os.replace(self.partial / name, self.path / name)
        if tokenizer != BYTES:
            shutil.copyfile(tokenizer, self.path / TOKENIZER)
        replace_file(self.path / HEADER, json.dumps(made.as_dict(), indent=1))
        shutil.rmtree(self.partial)
        return made


def finished_header(path: Path, header: Json) -> Header | None:
    """The header of a folder that was already prepared from the same sources in the same way; None if there is none. Raises if
    it was prepared from other sources, or in another way."""
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
