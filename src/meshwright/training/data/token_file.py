"""Token files: what `meshwright data prepare` writes and `[data]` in a run file names.

    tokens.bin       all tokens, one document after the other: a flat array of the smallest unsigned type that holds the
                     vocabulary (8, 16 or 32 bits, little-endian)
    documents.bin    document d is tokens[offsets[d] : offsets[d + 1]]: documents + 1 offsets of 64 bits
    learned.bin      of conversations: one byte per token, 1 if it is learned; without this file all are
    header.json      version, types, counts, vocabulary, tokenizer with its hash, and the hashes of the arrays
    tokenizer.json   a copy of the tokenizer, so that samples can be decoded; absent for bytes

The arrays are memory-mapped: opening a file of any size takes milliseconds, ranks on one host share its pages, and only pages that
batches need are read. The header is written last, so a folder with a header is complete.

Megatron's `.bin` and `.idx` files are opened through the same function.

Megatron's indexed datasets: PREFIX.bin has the tokens, PREFIX.idx says where sequences and documents begin.

The index, little-endian:

    bytes 0–8     "MMIDIDX\0\0"
    8 bytes       version, 1
    1 byte        type of the tokens: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16 (6 and 7 are floats)
    8 bytes       number of sequences, S
    8 bytes       number of document boundaries, documents + 1
    S × int32     length of each sequence, in tokens
    S × int64     first byte of each sequence in PREFIX.bin
    … × int64     number of the first sequence of each document, and S at the end

A document is usually one sequence. We need documents that follow each other without gaps, as Megatron's own tools write them.
"""

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.units import Json

MAGIC = b"MMIDIDX\x00\x00"
PREAMBLE = struct.Struct("<QBQQ")  # version, type, sequences, document boundaries
TYPES = {1: "uint8", 2: "int8", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_pair(prefix: Path) -> tuple[np.ndarray, np.ndarray]:
    """The tokens as a memory map, and the document offsets."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        raw = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.empty(0, np.uint8)
        size = data.stat().st_size
    except OSError as error:
        name = error.filename or str(prefix)
        raise MeshwrightError("MW-DATA-003", f"cannot read '{name}'", why=error.strerror or str(error)) from None
    dtype, lengths, pointers, first = read_index(index, raw)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    if not len(ends) or not ends[-1]:
        raise damaged_pair(index, "It contains no tokens")
    if (pointers != starts * dtype.itemsize).any():
        raise damaged_pair(index, "Its sequences do not follow each other without gaps")
    if size != ends[-1] * dtype.itemsize:
        raise damaged_pair(data, f"It has {size:,} bytes; the index describes {ends[-1] * dtype.itemsize:,}")
    if first[0] != 0 or first[-1] != len(lengths) or (first[1:] < first[:-1]).any():
        raise damaged_pair(index, "Its documents do not cover its sequences in order")
    offsets = np.append(starts, ends[-1])[first]
    return np.memmap(data, dtype, "r"), offsets


def read_index(index: Path, raw: np.ndarray) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Type of the tokens, lengths and first bytes of the sequences, and the first sequence of each document."""
    start = len(MAGIC) + PREAMBLE.size
    if len(raw) < start or raw[: len(MAGIC)].tobytes() != MAGIC:
        raise MeshwrightError(
            "MW-DATA-003", f"'{index}' is not an index of Megatron", why="It does not begin with MMIDIDX"
        )
    version, code, sequences, boundaries = PREAMBLE.unpack(raw[len(MAGIC) : start].tobytes())
    if version != 1 or code not in TYPES:
        raise MeshwrightError(
            "MW-DATA-005",
            f"'{index}' has version {version} and type {code}",
            why=f"Version 1 and the integer types {', '.join(map(str, TYPES))} are supported",
        )
    sizes = (4 * sequences, 8 * sequences, 8 * boundaries)
    if boundaries < 2 or len(raw) < start + sum(sizes):
        raise damaged_pair(index, f"It has {len(raw):,} bytes and describes {sequences:,} sequences")
    parts = []
    for size, dtype in zip(sizes, ("<i4", "<i8", "<i8"), strict=True):
        parts.append(np.frombuffer(raw[start : start + size].tobytes(), dtype))
        start += size
    lengths, pointers, first = parts
    if (lengths < 0).any():
        raise damaged_pair(index, "A sequence has a negative length")
    return np.dtype(TYPES[code]), lengths, pointers, first


def damaged_pair(path: Path, why: str) -> MeshwrightError:
    return MeshwrightError("MW-DATA-004", f"Megatron's file '{path}' is damaged", why=why)


FORMAT, VERSION = "meshwright tokens", 1
HEADER, TOKENS, DOCUMENTS, TOKENIZER = "header.json", "tokens.bin", "documents.bin", "tokenizer.json"
LEARNED = "learned.bin"
DTYPES = ("uint8", "uint16", "uint32")
BLOCK = 1 << 24  # bytes, or offsets, read at a time
HEADER_LIMIT = 50_000_000  # bytes


@dataclass(frozen=True)
class Header:
    """The contents of a token file. `sources` are the names and sizes of the files it was made from."""

    dtype: str
    tokens: int
    documents: int
    vocabulary: int
    largest_token: int
    end_token: int | None
    tokenizer: str
    tokenizer_hash: str
    hashes: dict[str, str]
    options: Json = field(default_factory=dict)
    sources: list[list[Any]] = field(default_factory=list)

    def as_dict(self) -> Json:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


@dataclass(frozen=True)
class TokenFile:
    """Tokens and document offsets in memory maps. `header` is None for Megatron's files, which do not store a vocabulary."""

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    header: Header | None = None
    learned: np.ndarray | None = None  # 1 for each token that is a target; None: all are

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def vocabulary(self) -> int:
        """The number of token values of the tokenizer; 0 if the file does not store it."""
        return self.header.vocabulary if self.header else 0


def smallest_dtype(vocabulary: int) -> np.dtype:
    """The smallest unsigned type that holds the tokens 0 … vocabulary − 1."""
    return np.dtype(next(name for name in DTYPES if vocabulary <= np.iinfo(name).max + 1)).newbyteorder("<")


def open_tokens(path: str | Path) -> TokenFile:
    """Open a folder of `data prepare`, or Megatron's files PREFIX.bin and PREFIX.idx. Raises if it is missing, incomplete,
    truncated, foreign or newer than this version."""
    folder = Path(path)
    if (folder / HEADER).is_file():
        return _open_folder(folder)
    prefix = folder.with_suffix("") if folder.suffix in (".bin", ".idx") else folder
    if Path(f"{prefix}.idx").is_file():
        return TokenFile(prefix.name, *open_pair(prefix))
    if (folder / "partial").is_dir():
        raise MeshwrightError(
            "MW-DATA-003",
            f"the preparation of '{folder}' is not finished",
            why="It was interrupted, or it is still running",
            fix="run the same `meshwright data prepare` command again: it continues where it stopped",
        )
    why = f"It has no {HEADER}" if folder.is_dir() else "It is neither a folder nor the prefix of .bin and .idx files"
    raise MeshwrightError(
        "MW-DATA-003",
        f"'{folder}' is not a token file",
        why=why,
        fix=f"meshwright data prepare SOURCES --tokenizer bytes --out {folder}",
    )


def _open_folder(folder: Path) -> TokenFile:
    header = read_header(folder)
    tokens = _mapped(folder / TOKENS, np.dtype(header.dtype).newbyteorder("<"), header.tokens)
    offsets = _mapped(folder / DOCUMENTS, np.dtype("<i8"), header.documents + 1)
    if header.tokens == 0 or header.documents == 0:
        raise damaged(folder, "It contains no tokens")
    if offsets[0] != 0 or offsets[-1] != header.tokens:
        raise damaged(folder, f"The offsets in {DOCUMENTS} do not cover the {header.tokens:,} tokens")
    learned = _mapped(folder / LEARNED, np.dtype("uint8"), header.tokens) if LEARNED in header.hashes else None
    return TokenFile(folder.name, tokens, offsets, header, learned)


def read_header(folder: Path) -> Header:
    """The header of a token file, checked field by field."""
    path = folder / HEADER
    try:
        if path.stat().st_size > HEADER_LIMIT:
            raise ValueError(f"it is larger than {HEADER_LIMIT // 10**6} MB")
        document = json.loads(path.read_text("utf-8"))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError("it is not the header of a token file")
    except (OSError, ValueError) as error:
        raise MeshwrightError("MW-DATA-003", f"cannot read '{path}'", why=str(error)[:200]) from None
    version = document.get("version")
    if version != VERSION:
        raise MeshwrightError(
            "MW-DATA-005",
            f"'{folder}' has version {str(version)[:20]} of the format of token files",
            why=f"This Meshwright reads version {VERSION}",
            fix="prepare the tokens again, or update Meshwright",
        )
    try:
        header = Header(**{key: value for key, value in document.items() if key not in ("format", "version")})
        counts = (header.tokens, header.documents, header.vocabulary, header.largest_token)
        if header.dtype not in DTYPES or not all(type(n) is int and 0 <= n < 2**62 for n in counts):
            raise TypeError("a type or a count is not valid")
        if not all(isinstance(text, str) for text in (header.tokenizer, header.tokenizer_hash)):
            raise TypeError("the tokenizer is not named")
        if type(header.end_token) not in (int, type(None)) or not isinstance(header.hashes, dict):
            raise TypeError("end_token or hashes are not valid")
    except TypeError as error:
        raise damaged(folder, f"{HEADER}: {str(error)[:200]}") from None
    return header


def damaged(path: Path, why: str) -> MeshwrightError:
    return MeshwrightError("MW-DATA-004", f"the token file '{path}' is damaged", why=why, fix="prepare it again")


def _mapped(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """A memory map of exactly `count` values."""
    try:
        size = path.stat().st_size
        if size != count * dtype.itemsize:
            raise damaged(
                path, f"It has {size:,} bytes; the header describes {count:,} values, {count * dtype.itemsize:,} bytes"
            )
        return np.memmap(path, dtype, "r") if count else np.empty(0, dtype)
    except OSError as error:
        raise MeshwrightError("MW-DATA-003", f"cannot read '{path}'", why=error.strerror or str(error)) from None


def check_offsets(file: TokenFile) -> None:
    """Raise if the offsets of a token file are not in ascending order; reads the whole index."""
    for start in range(0, file.documents, BLOCK):
        part = np.asarray(file.offsets[start : start + BLOCK + 1])
        if (part[1:] < part[:-1]).any():
            raise damaged(Path(file.name), "The document offsets are not in ascending order")


def verify_hashes(folder: Path) -> None:
    """Raise if the arrays are not those that `prepare` wrote; reads them in full."""
    header = read_header(folder)
    for name in (TOKENS, DOCUMENTS, *(LEARNED,) * (LEARNED in header.hashes)):
        if file_hash(folder / name) != header.hashes.get(name):
            raise damaged(folder / name, "Its content has changed since it was written: the hash differs")


def file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise MeshwrightError("MW-DATA-003", f"cannot read '{path}'", why=error.strerror or str(error)) from None
