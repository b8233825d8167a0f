"""Damage on purpose: flip a bit of the newest checkpoint, truncate it, or make the disk look full."""

from __future__ import annotations

import random
import resource
from pathlib import Path

FULL_DISK_BYTES = 4096  # a file may still grow to this size: a full disk has a few free blocks too


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The complete checkpoint of the latest step."""
    found = sorted(path for path in checkpoints.glob("step-*") if path.is_dir())
    return found[-1] if found else None


def damage(checkpoint: Path, how: str, seed: int) -> Path:
    """Flip one bit of a file of a checkpoint ("bit-flip"), or cut off its end ("truncate"). Returns the file."""
    draw = random.Random(seed)
    file = draw.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size))
    size = file.stat().st_size
    with file.open("r+b") as stream:
        if how == "truncate":
            stream.truncate(draw.randrange(size))
        else:
            position = draw.randrange(size)
            stream.seek(position)
            byte = stream.read(1)[0]
            stream.seek(position)
            stream.write(bytes([byte ^ (1 << draw.randrange(8))]))
    return file


def set_disk_full(full: bool) -> None:
    """Let every write of this process that makes a file larger than a block fail, or end that. Needs no rights."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES if full else most, most))
