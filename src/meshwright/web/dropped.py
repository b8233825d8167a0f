"""Files that were dropped on the page: written to a folder of their own while they arrive, read by a worker process, and removed.

The browser sends them in one body, each as a line of JSON and its bytes:

    {"name": "many/rank-00000/step-000.json", "size": 48213}\n…

A name is never joined to a path. Of a recording of `check` it must be one that a recorder writes, and its path is put together again from
the numbers in it; any other file is the trace of a rank and gets a number. The bytes are bounded, and only one such body is read at a time.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterable
from pathlib import Path
from typing import IO

from meshwright.errors import MeshwrightError
from meshwright.explain.reader import NUMBERED
from meshwright.units import Json
from meshwright.web.jobs import Refused

TYPE = "application/x-meshwright-files"
MOST_BYTES, MOST_FILES, MOST_HEADER = 4 * 2**30, 4096, 4096
CHUNK = 1 << 20  # bytes between two writes
RECORDED = re.compile(
    r"^(?:(?:.*/)?((?!perturbed-\d)[^/]+)/)?(?:perturbed-(\d{1,3})/)?rank-(\d{1,6})/(?:(rank)\.json|step-(\d{1,6})\.(json|safetensors))$"
)
ENDINGS = (".json.gz", ".json")


class DroppedFiles:
    """Writes the files of one body below a folder: `kind` is what they are, `folders` the names of recordings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []
        self.folders: dict[str, Path] = {}  # recordings by the name of their folder
        self.traces: dict[str, str] = {}  # names by path
        self._rest, self._left = b"", 0
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        while data:
            if self._left:
                part, data = data[: self._left], data[self._left :]
                assert self._file is not None
                self._file.write(part)
                self._left -= len(part)
                if not self._left:
                    self._file.close()
                continue
            line, end, data = (self._rest + data).partition(b"\n")
            if len(line) > MOST_HEADER:
                raise refused("the line before a file is too long")
            self._rest = b"" if end else line
            if end:
                self._begin(line)

    def end(self) -> None:
        """The body has ended: raises if a file is not complete, or if there is none."""
        if self._left or self._rest or not self.names:
            raise refused("the files are not complete" if self.names else "no file was sent")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self, line: bytes) -> None:
        try:
            about = json.loads(line)
            name, size = about["name"], about["size"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise refused("a file has no line with its name and size") from None
        if (
            type(name) is not str
            or type(size) is not int
            or not 0 <= size <= MOST_BYTES
            or len(self.names) >= MOST_FILES
        ):
            raise refused(f"the name or the size of a file is not valid, or there are more than {MOST_FILES:,} files")
        name = name.encode("utf-8", "replace").decode()  # a surrogate that stands alone could not be sent back
        self.names.append(name)
        self._file = self._place(name).open("wb")
        self._left = size
        if not size:
            self._file.close()

    def _place(self, name: str) -> Path:
        """Where a file is written."""
        found = RECORDED.match(name)
        if found is None:
            ending = next((e for e in ENDINGS if name.lower().endswith(e)), "")
            if not ending:
                what = f"'{name[-80:]}' is neither a trace nor a part of a recording"
                raise MeshwrightError("MW-WEB-013", what, why="A trace ends with .json or .json.gz")
            numbered = NUMBERED.search(name.rpartition("/")[2])
            path = self.folder / f"{len(self.names)}{f'-rank-{int(numbered[1])}' if numbered else ''}{ending}"
            self.traces[str(path)] = name
            return path
        top, perturbed, rank_number, is_rank, step, ending = found.groups()
        root = self.folders.setdefault(top or "recording", self.folder / f"recording-{len(self.folders)}")
        if perturbed is not None:
            root = root / f"perturbed-{int(perturbed)}"
        folder = root / f"rank-{int(rank_number):05d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / ("rank.json" if is_rank else f"step-{int(step):03d}.{ending}")

    def task(self, reference: str) -> tuple[str, Json]:
        """The task that reads the files, and its body."""
        if not self.folders:
            return "explain", {"files": list(self.traces)}
        return "compare", {"folders": {name: str(path) for name, path in self.folders.items()}, "reference": reference}

    def in_words(self, error: Json) -> Json:
        """An error with the names that were dropped in place of the paths that they were written to."""
        text = json.dumps(error)
        names = self.traces | {str(path): name for name, path in self.folders.items()}
        for path, name in sorted(names.items(), reverse=True):  # recording-10 before recording-1
            text = text.replace(path, json.dumps(name)[1:-1])
        return dict(json.loads(text))


async def receive_files(body: AsyncIterable[bytes], files: DroppedFiles) -> None:
    """Write the files of a body as it arrives, about a megabyte at a time."""
    waiting, total = bytearray(), 0
    try:
        async for part in body:
            waiting += part
            total += len(part)
            if total > MOST_BYTES:
                raise Refused.of(413, too_large())
            if len(waiting) >= CHUNK:
                await asyncio.to_thread(files.write, bytes(waiting))
                waiting.clear()
        await asyncio.to_thread(files.write, bytes(waiting))
        files.end()
    except OSError as error:  # the disk of temporary files is full
        what, why = "the files cannot be kept while they are read", error.strerror or str(error)
        raise MeshwrightError("MW-WEB-013", what, why=why) from None
    finally:
        files.close()


def too_large() -> MeshwrightError:
    what = f"the files have more than {MOST_BYTES // 2**30} GiB"
    return MeshwrightError("MW-WEB-013", what, fix="meshwright explain FILE… or meshwright check compare in a terminal")


def refused(what: str) -> MeshwrightError:
    return MeshwrightError("MW-WEB-013", what, fix="drop the files again")
