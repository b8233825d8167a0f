"""Chunks: parts of source files that are tokenized independently, and the documents in them.

How files are cut depends only on the files, not on the number of workers, so neither does the result. A chunk of a text file or of
JSON lines is a range of bytes; where a range begins or ends inside a document, both neighbours move the cut to the same place:
the next start of a document. A chunk of Parquet is a run of row groups, of Arrow a run of record batches.

A text file that is one document is cut at line ends that are followed by a character that is not white space. Tokenizers split text there
before they merge, so the tokens are those of the whole text; those that mark the start of a text (Metaspace) add one such mark.

The source files of a preparation: which files a path names, and the format of each.

A folder is searched for the formats of Hugging Face datasets: Parquet, Arrow (`save_to_disk`) and JSON lines, and for plain text.
Files of several splits (train, validation, test) are not mixed: with more than one, `--split` chooses.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, kind_of
from meshwright.training.data.tokenizer import package

TEXT, JSONL, PARQUET, ARROW = "text", "jsonl", "parquet", "arrow"
FORMATS = (TEXT, JSONL, PARQUET, ARROW)
SUFFIXES = {
    ".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL, ".parquet": PARQUET, ".arrow": ARROW, ".txt": TEXT, ".text": TEXT, ".md": TEXT,
}  # fmt: skip
IN_FOLDERS = {suffix for suffix in SUFFIXES if suffix not in (".json", ".md")}  # these often describe data
COMPRESSED = {".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz"}
SPLIT = re.compile(r"^(train|validation|valid|val|dev|test)(?:[-_.]|$)")


@dataclass(frozen=True)
class SourceFile:
    path: str
    format: str
    size: int
    changed: int  # the time of its last change: another preparation if it differs


def source_files(paths: Sequence[str | Path], format: str = "auto", split: str = "") -> list[SourceFile]:
    """All files that the paths name, folders searched in the order of their names. Raises if there is none."""
    found: list[SourceFile] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += _in_folder(path, format, split)
        else:
            found.append(_source(path, format))
    if not found:
        raise MeshwrightError("MW-DATA-010", "no source files", fix="meshwright data prepare FILES --out DIR")
    return found


def _in_folder(folder: Path, format: str, split: str) -> list[SourceFile]:
    suffixes = IN_FOLDERS if format == "auto" else {s for s, name in SUFFIXES.items() if name == format}
    files = sorted(
        p for p in folder.rglob("*") if p.suffix in suffixes and p.is_file() and not p.name.startswith(("cache-", "."))
    )
    if not files:
        raise MeshwrightError(
            "MW-DATA-010",
            f"the folder '{folder}' has no source files",
            valid=[f"*{suffix}" for suffix in sorted(suffixes)],
        )
    splits = {p: split_of(p.relative_to(folder)) for p in files}
    names = sorted({name for name in splits.values() if name})
    if split:
        files = [p for p in files if splits[p] == split]
        if not files:
            raise MeshwrightError("MW-DATA-016", f"'{folder}' has no files of the split '{split}'", valid=names)
    elif len(names) > 1:
        raise MeshwrightError(
            "MW-DATA-016",
            f"'{folder}' has the splits {', '.join(names)}",
            why="Validation and test data must not be trained on",
            fix=f"--split {'train' if 'train' in names else names[0]}",
        )
    return [_source(p, format) for p in files]


def split_of(path: Path) -> str:
    """The split that the name of a file or of one of its folders begins with: data/train-00000.parquet, train/data.arrow."""
    for part in (path.name, *reversed(path.parent.parts)):
        if match := SPLIT.match(part):
            return match[1]
    return ""


def _source(path: Path, format: str) -> SourceFile:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise MeshwrightError("MW-DATA-010", f"'{path}' is not a file", why="It is a pipe or a device")
        with path.open("rb"):
            pass
    except (OSError, ValueError) as error:
        if isinstance(error, MeshwrightError):
            raise
        why = getattr(error, "strerror", "") or str(error)
        raise MeshwrightError("MW-DATA-010", f"cannot read the source '{path}'", why=why) from None
    if path.suffix in COMPRESSED and format == "auto":
        raise MeshwrightError("MW-DATA-010", f"'{path}' is compressed", fix="decompress it first", valid=[*FORMATS])
    kind = SUFFIXES.get(path.suffix, TEXT) if format == "auto" else format
    return SourceFile(str(path), kind, status.st_size, status.st_mtime_ns)


CHUNK = 8 << 20  # bytes of source text
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# What is before the first byte of a chunk, by the kind of documents.
CUTS = {
    "line": re.compile(rb"\n"),
    "blank-line": re.compile(rb"\n\r?\n(?:\r?\n)*"),
    "file": re.compile(rb"\n(?=[^\s])"),
}
DOCUMENTS = tuple(CUTS)


@dataclass(frozen=True)
class Chunk:
    """Bytes, row groups or record batches `start` … `stop` − 1 of a file. `last`: the file ends with this chunk."""

    path: str
    format: str
    start: int
    stop: int
    size: int  # bytes, for the progress bar
    last: bool


@dataclass(frozen=True)
class Reading:
    """Options of reading documents: the field of JSON lines and tables, and what a document of a text file is."""

    field: str = "text"
    document: str = "file"


def chunks_of(file: SourceFile, reading: Reading, limit: int = CHUNK) -> list[Chunk]:
    """The chunks of a file, in order."""
    if file.format in (PARQUET, ARROW):
        sizes = table_sizes(file)
        edges, filled = [0], 0
        for i, size in enumerate(sizes):
            filled += size
            if filled >= limit or i == len(sizes) - 1:
                edges.append(i + 1)
                filled = 0
    else:
        edges = [*range(0, file.size, limit), file.size] if file.size else [0]
    pairs = list(pairwise(edges))
    return [
        Chunk(file.path, file.format, a, b, file.size * (b - a) // max(edges[-1], 1), i == len(pairs) - 1)
        for i, (a, b) in enumerate(pairs)
    ]


def texts_in(chunk: Chunk, reading: Reading) -> Iterator[tuple[str, bool]]:
    """The texts of a chunk, and whether a document ends with each; a text that does not end one continues in the next chunk."""
    if chunk.format in (PARQUET, ARROW):
        yield from ((text, True) for text in table_texts(chunk, reading.field))
        return
    kind = "line" if chunk.format == JSONL else reading.document
    start, data = bytes_of(chunk, kind)
    if kind == "file":
        yield decoded(data, chunk, start), chunk.last
        return
    for offset, part in parts_of(data, kind):
        if part.strip():
            at = start + offset
            yield (
                (json_text(part, chunk, at, reading.field) if chunk.format == JSONL else text_of(part, chunk, at)),
                True,
            )


def parts_of(data: bytes, kind: str) -> Iterator[tuple[int, bytes]]:
    """The parts between the cuts, with their first byte."""
    start = 0
    for match in CUTS[kind].finditer(data):
        yield start, data[start : match.start()]
        start = match.end()
    yield start, data[start:]


def bytes_of(chunk: Chunk, kind: str) -> tuple[int, bytes]:
    """The bytes of a chunk, from the first start of a document at or after `start` to the first at or after `stop`."""
    try:
        with open(chunk.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start, stop = (next_cut(content, at, kind) for at in (chunk.start, chunk.stop))
            start = max(start, len(BYTE_ORDER_MARK)) if content[:3] == BYTE_ORDER_MARK else start
            return start, content[start:stop]
    except (OSError, ValueError) as error:
        raise unreadable(chunk.path, error) from None


def next_cut(content: Any, at: int, kind: str) -> int:
    """The first place at or after `at` where a chunk may begin."""
    if at == 0 or at >= len(content):
        return min(at, len(content))
    for match in CUTS[kind].finditer(content, max(0, at - (4 if kind == "blank-line" else 1))):
        if match.end() >= at:
            return match.end()
    return len(content)


def decoded(data: bytes, chunk: Chunk, start: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MeshwrightError(
            "MW-DATA-011",
            f"{where(chunk.path, start + error.start)} is not UTF-8 text",
            why=f"Byte {start + error.start} is 0x{data[error.start]:02x}",
            fix=f"iconv -f LATIN1 -t UTF-8 {Path(chunk.path).name}",
        ) from None


def text_of(part: bytes, chunk: Chunk, at: int) -> str:
    return decoded(part, chunk, at).strip("\r\n")


def json_text(line: bytes, chunk: Chunk, at: int, field: str) -> str:
    """The text in one line of JSON."""
    text = decoded(line, chunk, at)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MeshwrightError(
            "MW-DATA-012", f"{where(chunk.path, at)} is not JSON", why=f"One object on each line: {error}"[:200]
        ) from None
    if not isinstance(row, dict) or field not in row:
        names = [str(name)[:40] for name in row][:20] if isinstance(row, dict) else []
        raise MeshwrightError(
            "MW-DATA-012",
            f"{where(chunk.path, at)} has no field '{field}'",
            valid=names,
            fix=f"--field {next((n for n in names if isinstance(row[n], str)), 'NAME')}" if names else "",
        )
    if not isinstance(row[field], str):
        raise MeshwrightError(
            "MW-DATA-012", f"{where(chunk.path, at)}: the field '{field}' is {kind_of(row[field])}, not text"
        )
    return row[field]


def where(path: str, offset: int) -> str:
    """File and line of a byte."""
    line = 1
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            line += block.count(b"\n")
            offset -= len(block)
    return f"{path}:{line}"


def unreadable(path: str, error: Exception) -> MeshwrightError:
    why = getattr(error, "strerror", "") or str(error)
    return MeshwrightError("MW-DATA-010", f"cannot read the source '{path}'", why=why[:200])


# Tables: Parquet and Arrow


def table_sizes(file: SourceFile) -> list[int]:
    """Bytes of each row group or record batch."""
    try:
        if file.format == PARQUET:
            metadata = package("pyarrow.parquet", "A Parquet file").ParquetFile(file.path).metadata
            return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        return [batch.nbytes for batch in record_batches(file.path)]
    except MeshwrightError:
        raise
    except Exception as error:  # pyarrow raises many kinds
        raise unreadable(file.path, error) from None


def record_batches(path: str) -> Iterator[Any]:
    """The record batches of an Arrow file, or of the stream that `datasets` writes."""
    ipc, arrow = package("pyarrow.ipc", "An Arrow file"), package("pyarrow", "An Arrow file")
    source = arrow.memory_map(path)
    try:
        reader = ipc.open_file(source)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    except arrow.ArrowInvalid:
        source.seek(0)
        yield from ipc.open_stream(source)


def table_texts(chunk: Chunk, field: str) -> Iterator[str]:
    """The texts in one column of the rows of a chunk; empty rows are left out."""
    try:
        for column in table_columns(chunk, field):
            yield from (text for text in column.to_pylist() if text)
    except MeshwrightError:
        raise
    except Exception as error:
        raise unreadable(chunk.path, error) from None


def table_columns(chunk: Chunk, field: str) -> Iterator[Any]:
    if chunk.format == PARQUET:
        file = package("pyarrow.parquet", "A Parquet file").ParquetFile(chunk.path)
        check_column(file.schema_arrow, chunk.path, field)
        for group in range(chunk.start, chunk.stop):
            yield file.read_row_group(group, columns=[field]).column(0)
        return
    for i, batch in enumerate(record_batches(chunk.path)):
        if i >= chunk.stop:
            return
        if i >= chunk.start:
            check_column(batch.schema, chunk.path, field)
            yield batch.column(batch.schema.get_field_index(field))


def check_column(schema: Any, path: str, field: str) -> None:
    """Raise if a table has no column of this name, or one that is not text."""
    types = package("pyarrow", "A table").types
    text = [c.name for c in schema if types.is_string(c.type) or types.is_large_string(c.type)]
    if field in text:
        return
    known = field in schema.names
    what = f"is {schema.field(field).type}, not text" if known else "is missing"
    raise MeshwrightError(
        "MW-DATA-012",
        f"{path}: the column '{field}' {what}",
        valid=text,
        fix=f"--field {text[0]}" if text else "",
    )
