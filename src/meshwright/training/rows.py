"""Shorten the files of rows of a run that goes on: each step is to be in them once, and each line complete."""

from pathlib import Path

from meshwright.describe.run_folder import parsed


def remove_rows(file: Path, first_step: int) -> int:
    """Remove the rows of `first_step` and of all later steps, which will be trained again, and a line that was not finished. Returns the
    number of rows before. A line that cannot be read does not end them: it stays."""
    if not file.is_file():
        return 0
    offset = rows = 0
    with file.open("r+b") as stream:
        for line in stream:
            row = parsed(line)
            if not line.endswith(b"\n") or (row and row[0].get("step", first_step) >= first_step):
                break
            offset += len(line)
            rows += len(row)
        stream.truncate(offset)
    return rows


def remove_unfinished_line(file: Path) -> None:
    """Remove the line that a process was writing when it died."""
    if not file.is_file():
        return
    with file.open("r+b") as stream:
        stream.truncate(sum(len(line) for line in stream if line.endswith(b"\n")))
