"""The source files of a preparation, and the texts in them, in order.

A folder is searched for the formats of Hugging Face datasets: Parquet, Arrow (`save_to_disk`) and JSON lines, and for plain text.
Files of several splits (train, validation, test) are not mixed: with more than one, `--split` chooses.

A text file that is one document is cut at line ends that are followed by a character that is not white space. Tokenizers split text there
before they merge, so the tokens are those of the whole text; those that mark the start of a text (Metaspace) add one such mark.
"""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from meshwright.errors import MeshwrightError, kind_of
from meshwright.training.data.prepare.chat import FORMS, Spans, chat_text, form_of
from meshwright.training.data.prepare.own_template import OwnTemplate
from meshwright.training.data.tokenizer import package
from meshwright.units import Json

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


PIECE = 1 << 16  # bytes of a text file that is one document
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DOCUMENTS = ("line", "blank-line", "file")  # what a document of a text file is


@dataclass(frozen=True)
class Reading:
    """Options of reading documents: the field of JSON lines and tables, and what a document of a text file is. With a template, the rows
    are conversations: one of ours, or that of the tokenizer, `own`."""

    field: str = "text"
    document: str = "file"
    template: str = ""
    learn: str = "assistant"
    own: OwnTemplate | None = None

    def conversation(self, row: Any, where: str) -> tuple[str, Spans]:
        """The text of a row's conversation, and its learned parts."""
        return self.own.text(row, where) if self.own else chat_text(row, where, self.template, self.learn)

    def options(self) -> Json:
        """What the header of a token file stores."""
        if self.own:
            return self.own.options
        names = ("template", "learn") if self.template else ("field", "document")
        return {name: getattr(self, name) for name in names}


class SourceText(NamedTuple):
    """A text of a source file: whether a document ends with it, the bytes of the file that were read until its end, and the learned parts of
    a conversation."""

    text: str
    ended: bool
    read: int
    learned: Spans = ()


def texts_of(file: SourceFile, reading: Reading, piece: int = PIECE) -> Iterator[SourceText]:
    """The texts of a file. One that does not end its document continues in the next."""
    if reading.template and file.format == TEXT:
        why = "Conversations are rows of JSON lines, Parquet or Arrow"
        raise MeshwrightError(
            "MW-DATA-010", f"'{file.path}' is text", why=why, fix="--format jsonl, if it is JSON lines"
        )
    try:
        if file.format in (PARQUET, ARROW):
            yield from table_texts(file, reading)
        else:
            with open(file.path, "rb") as stream:
                yield from line_texts(stream, file, reading, piece)
    except OSError as error:
        raise unreadable(file.path, error) from None


def line_texts(stream: BinaryIO, file: SourceFile, reading: Reading, piece: int) -> Iterator[SourceText]:
    """The texts of a plain file or of JSON lines; parts of white space alone are no documents."""
    kind = "line" if file.format == JSONL else reading.document
    read = 0
    for line, data, last in line_groups(stream, kind, piece):
        mark = len(BYTE_ORDER_MARK) if line == 1 and data.startswith(BYTE_ORDER_MARK) else 0
        text = decoded(data[mark:], file.path, line, read + mark)
        read += len(data)
        if kind == "file":
            yield SourceText(text, last, read)
        elif text.strip():
            text = text.strip("\r\n")
            where, learned = f"{file.path}:{line}", Spans()
            if reading.template:
                text, learned = reading.conversation(json_row(text, where), where)
            elif file.format == JSONL:
                text = json_text(text, where, reading.field)
            yield SourceText(encodable(text, where), True, read, learned)


def encodable(text: str, where: str) -> str:
    """The text, unless JSON has put half of a pair of UTF-16 into it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        why = f"It has half of a surrogate pair, \\u{ord(text[error.start]):04x}"
        raise MeshwrightError("MW-DATA-011", f"{where} is not text of Unicode", why=why) from None
    return text


def line_groups(stream: BinaryIO, kind: str, piece: int) -> Iterator[tuple[int, bytes, bool]]:
    """The lines that belong together: number of the first, all of them, and whether the file ends with them. A group ends before every line,
    before an empty line, or (of a file that is one document) before a line from which a tokenizer can begin, after `piece` bytes."""
    lines: list[bytes] = []
    size = first = 0
    for number, line in enumerate(stream, 1):
        ends = kind == "line" or not line.strip(b"\r\n") if kind != "file" else size >= piece and not line[:1].isspace()
        if lines and ends:
            yield first, b"".join(lines), False
            lines, size = [], 0
        first = number if not lines else first
        lines.append(line)
        size += len(line)
    if lines:
        yield first, b"".join(lines), True


def decoded(data: bytes, path: str, line: int, start: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data[: error.start].count(b"\n")
        raise MeshwrightError(
            "MW-DATA-011",
            f"{path}:{line} is not UTF-8 text",
            why=f"Byte {start + error.start} is 0x{data[error.start]:02x}",
            fix=f"iconv -f LATIN1 -t UTF-8 {Path(path).name}",
        ) from None


def json_row(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"One object on each line: {error}"[:200]
        raise MeshwrightError("MW-DATA-012", f"{where} is not JSON", why=why) from None


def json_text(text: str, where: str, field: str) -> str:
    """The text in one line of JSON."""
    row = json_row(text, where)
    if not isinstance(row, dict) or field not in row:
        names = [str(name)[:40] for name in row][:20] if isinstance(row, dict) else []
        raise MeshwrightError(
            "MW-DATA-012",
            f"{where} has no field '{field}'",
            valid=names,
            fix=chat_fix(names)
            or (f"--field {next((n for n in names if isinstance(row[n], str)), 'NAME')}" if names else ""),
        )
    if not isinstance(row[field], str):
        raise MeshwrightError("MW-DATA-012", f"{where}: the field '{field}' is {kind_of(row[field])}, not text")
    return row[field]


def chat_fix(names: Iterable[str]) -> str:
    """The fix for rows that have a conversation and no text."""
    return "--template plain, or the template of your model" if form_of(names) else ""


def unreadable(path: str, error: Exception) -> MeshwrightError:
    why = getattr(error, "strerror", "") or str(error)
    return MeshwrightError("MW-DATA-010", f"cannot read the source '{path}'", why=why[:200])


# Tables: Parquet and Arrow


def table_texts(file: SourceFile, reading: Reading) -> Iterator[SourceText]:
    """The texts in one column of a table, where empty rows are left out; or its conversations."""
    read = number = 0
    try:
        for batch in record_batches(file, reading):
            read = min(read + batch.nbytes, file.size)
            for row in batch.to_pylist():
                number += 1
                if reading.template:
                    text, learned = reading.conversation(without_nulls(row), f"{file.path}, row {number}")
                    yield SourceText(text, True, read, learned)
                elif row[reading.field]:
                    yield SourceText(row[reading.field], True, read)
    except MeshwrightError:
        raise
    except Exception as error:  # pyarrow raises many kinds
        raise unreadable(file.path, error) from None


def without_nulls(value: Any) -> Any:
    """A value without the fields that are null: all rows of a table have the fields of every row. `content` may be null beside calls of tools."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None or k == "content"}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def record_batches(file: SourceFile, reading: Reading) -> Iterator[Any]:
    """The record batches of a Parquet file, of an Arrow file, or of the stream that `datasets` writes: the columns that are read."""
    if file.format == PARQUET:
        table = package("pyarrow.parquet", "A Parquet file").ParquetFile(file.path)
        yield from table.iter_batches(columns=columns_of(table.schema_arrow, file.path, reading))
        return
    ipc, arrow = package("pyarrow.ipc", "An Arrow file"), package("pyarrow", "An Arrow file")
    source = arrow.memory_map(file.path)
    try:
        reader = ipc.open_file(source)
        batches: Any = (reader.get_batch(i) for i in range(reader.num_record_batches))
    except arrow.ArrowInvalid:
        source.seek(0)
        batches = reader = ipc.open_stream(source)
    columns = columns_of(reader.schema, file.path, reading)
    yield from (batch.select(columns) for batch in batches)


def columns_of(schema: Any, path: str, reading: Reading) -> list[str]:
    """The columns of a table that are read. Raises if there are none, or one that is not text."""
    field, form = reading.field, form_of(schema.names)
    if reading.template:
        if form:
            return [*form]
        raise MeshwrightError(
            "MW-DATA-019",
            f"{path} has no columns of conversations",
            why=f"Its columns: {', '.join(schema.names)[:100]}",
            valid=[" and ".join(names) for names in FORMS],
        )
    types = package("pyarrow", "A table").types
    text = [c.name for c in schema if types.is_string(c.type) or types.is_large_string(c.type)]
    if field in text:
        return [field]
    known = field in schema.names
    what = f"is {schema.field(field).type}, not text" if known else "is missing"
    raise MeshwrightError(
        "MW-DATA-012",
        f"{path}: the column '{field}' {what}",
        valid=text,
        fix=chat_fix(schema.names) or (f"--field {text[0]}" if text else ""),
    )
