"""The source files of a preparation: which files a path names, and the format of each.

A folder is searched for the formats of Hugging Face datasets: Parquet, Arrow (`save_to_disk`) and JSON lines, and for plain text.
Files of several splits (train, validation, test) are not mixed: with more than one, `--split` chooses.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import MeshwrightError

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
