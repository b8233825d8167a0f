"""The parts of a JSON document that is too large for memory, one after another.

    {"schemaVersion": 1, …, "traceEvents": [{…}, {…}, …], "traceName": "…"}

Text is read in chunks; the standard library parses the whole values of a buffer, and a value that the buffer ends in is parsed again when the
next chunk is there. Memory is that of a chunk and the largest value, whatever the size of the file.
"""

import codecs
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecoder
from pathlib import Path
from typing import IO, Any, BinaryIO

CHUNK = 1 << 22  # characters
LARGEST = 1 << 25  # characters of one value
SPACE = re.compile(r"[ \n\r\t]*").match
SEPARATOR = re.compile(r"[ \n\r\t]*,?[ \n\r\t]*").match
BETWEEN_OBJECTS = re.compile(r"\}[ \n\r\t]*,[ \n\r\t]*(?=\{)").finditer
TAIL = 1 << 16  # characters at the end of a buffer in which the last whole element is looked for
GOES_ON = "eE.+-"  # after a number: the buffer ends inside it
GZIP = b"\x1f\x8b"
GZIP_FORMAT = zlib.MAX_WBITS | 16
PACKED = 1 << 16  # bytes of a piece of a compressed file
# Torch writes no value where a group has no description
EMPTY_VALUE = re.compile(r'("Process Group Description"\s*:\s*)(?=[,}])')


class EndOfText(Exception):
    """The document ends inside a value, or is not JSON from here on. The text says which."""


class GzipText:
    """The text of a gzip file, in pieces. What was compressed before a damaged or missing end is still given: `gzip` would drop a whole piece."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.inflate = file, zlib.decompressobj(GZIP_FORMAT)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, size: int) -> str:
        """At most `size` bytes as text; empty at the end."""
        while True:
            packed = self.inflate.unconsumed_tail
            if not packed and self.inflate.eof:  # files may be several that were joined
                packed = self.inflate.unused_data or self.file.read(PACKED)
                self.inflate = zlib.decompressobj(GZIP_FORMAT) if packed else self.inflate
            packed = packed or self.file.read(PACKED)
            if not packed and not self.inflate.eof:
                raise EOFError
            if not packed:
                return ""
            if text := self.decoder.decode(self.inflate.decompress(packed, size)):
                return text


@contextmanager
def open_text(path: Path) -> Iterator[IO[str] | GzipText]:
    """The text of a file, decompressed if it is gzip whatever its name."""
    with path.open("rb") as file:
        packed = file.read(2) == GZIP
        file.seek(0)
        yield GzipText(file) if packed else io.TextIOWrapper(file, "utf-8", errors="replace")


class JsonStream:
    """Reads a document from its start to its end; `at` is the position in the buffered text."""

    def __init__(self, file: IO[str] | GzipText) -> None:
        self.file, self.text, self.at, self.read = file, "", 0, 0
        decoder = JSONDecoder(strict=False)
        self.decode, self.scan = decoder.decode, decoder.scan_once  # type: ignore[attr-defined]

    def more(self) -> bool:
        """Append a chunk to what is left of the buffer; False at the end of the file."""
        try:
            chunk = self.file.read(CHUNK)
        except (EOFError, zlib.error):
            raise EndOfText("the compressed data ends early or is damaged") from None
        self.text, self.at, self.read = self.text[self.at :] + chunk, 0, self.read + len(chunk)
        return bool(chunk)

    def next_character(self) -> str:
        """The next character that is not white space, which is not consumed; empty at the end."""
        while True:
            self.at = SPACE(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def skip(self, character: str) -> bool:
        """Consume a character if it is the next one."""
        if self.next_character() != character:
            return False
        self.at += 1
        return True

    def value(self) -> Any:
        """Parse the next value."""
        self.next_character()
        while True:
            try:
                value, end = self.scan(self.text, self.at)
            except (StopIteration, ValueError):  # not JSON, or a number of more digits than Python reads
                end = -1
            except RecursionError:
                raise EndOfText("values are nested too deep") from None
            if 0 <= end < len(self.text) and self.text[end] not in GOES_ON:
                self.at = end
                return value
            if end < 0 and self._repaired():
                continue
            if len(self.text) - self.at > LARGEST:
                raise EndOfText(f"not JSON from character {self.read - len(self.text) + self.at:,} on")
            if not self.more():
                if end >= 0:
                    self.at = end
                    return value
                raise EndOfText("the file ends early")

    def _repaired(self) -> bool:
        """Whether the rest of the buffer had empty values, which now are empty texts."""
        text, count = EMPTY_VALUE.subn(r'\1""', self.text[self.at :])
        if count:
            self.text, self.at = text, 0
        return count > 0

    def batches(self) -> Iterator[list[Any]]:
        """The elements of the list that begins here, as lists of those that one chunk completes."""
        if not self.skip("["):
            raise EndOfText("a list was expected")
        while True:
            character = self.next_character()
            if character == "]":
                self.at += 1
                return
            if not character:
                raise EndOfText("the file ends early")
            yield self._buffered()
            self.skip(",")  # if the buffer ended before it
            if self.next_character() != "]":
                yield [self.value()]
                self.skip(",")

    def _buffered(self) -> list[Any]:
        """Elements that the buffer has completely. Text up to a comma that parses as whole elements is exactly these elements, wherever the comma is:
        parsing them at once takes half the time of one after another, because they share the texts of their keys."""
        separators = list(BETWEEN_OBJECTS(self.text, max(self.at, len(self.text) - TAIL)))
        if separators:
            try:
                values: list[Any] = self.decode(f"[{self.text[self.at : separators[-1].start() + 1]}]")
            except (ValueError, RecursionError):
                pass
            else:
                self.at = separators[-1].end()
                return values
        return self._one_by_one()

    def _one_by_one(self) -> list[Any]:
        """Objects up to the end of the list, of the buffer, or of what is JSON."""
        scan, text, at, separator, values = self.scan, self.text, self.at, SEPARATOR, list[Any]()
        try:
            while text[at] == "{":
                value, at = scan(text, at)
                at = separator(text, at).end()  # type: ignore[union-attr]
                values.append(value)
        except (StopIteration, ValueError, RecursionError, IndexError):
            pass
        self.at = at
        return values

    def members(self) -> Iterator[str]:
        """The keys of the object that begins here; the caller consumes each value before it asks for the next key."""
        if not self.skip("{"):
            raise EndOfText("an object was expected")
        while not self.skip("}"):
            key = self.value()
            if not isinstance(key, str) or not self.skip(":"):
                raise EndOfText(f"not JSON from character {self.read - len(self.text) + self.at:,} on")
            yield key
            self.skip(",")
