"""The manifest of a checkpoint: which boxes of which tensors are in which file, with hashes, as JSON.

    checkpoints/step-00001000/
        manifest.json                           this file
        shard-00001-model-00001-of-00001.safetensors    the boxes that rank 0 wrote; one file per rank that wrote any

A checkpoint contains *full tensors by name*, each cut into boxes. A box is what one rank held: a start and a shape in the full
tensor. The keys are

    weight/NAME                      a parameter of the model: its fp32 master where the plan keeps one
    optimizer.STATE/NAME             a state of the optimizer for it: exp_avg, exp_avg_sq, step, momentum_buffer, …
    ema/NAME                         its exponential moving average
    replica-R/…                      the same of replica R under local SGD, whose replicas differ between averages
    rank-R/…                         tensors that belong to one rank: random states, residuals of compression

A run that trains adapters over a frozen base saves what trains; `base` is the folder of the base, with a hash of its headers, or the seed.

Numbers that are not tensors (loss scale, steps since the last average) are in `ranks`, one table per rank. The order of the data is a
function of the seed and the step, so the step is the whole position in the data.

The manifest is written last and contains the SHA-256 of every file, and of its other bytes (`digest`): a flipped bit, a truncated
or exchanged file is found before a number of it is used. The digest has the same rule in every version of the format, so that a
damaged version number is not taken for a newer version. Nothing here imports torch.
"""

import hashlib
import json
import math
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import IO_ERROR, MeshwrightError
from meshwright.units import Json

FORMAT, VERSION = "meshwright checkpoint", 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 2_000_000_000  # bytes
BLOCK = 1 << 22  # bytes hashed at a time
MOST_RANKS = 2**22
Listen = Callable[[int], None]  # bytes read since the last call


@dataclass(frozen=True)
class SavedBox:
    """A part of a full tensor, and the file that contains it."""

    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A full tensor; its boxes cover it, each element once."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[SavedBox, ...]


@dataclass(frozen=True)
class SavedFile:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, and the run that wrote it."""

    step: int
    model: Json
    plan: Json
    workload: Json
    order: tuple[str, ...]
    tensors: dict[str, SavedTensor]
    files: dict[str, SavedFile]
    ranks: tuple[Json, ...] = ()
    replicas: int = 0  # of local SGD, each with its tensors; 0: one set of tensors
    seed: int = 0
    data: Json = field(default_factory=dict)
    base: Json = field(default_factory=dict)  # of a checkpoint of adapters: the weights that they belong to
    versions: dict[str, str] = field(default_factory=dict)
    created: float = 0.0

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def bytes(self) -> int:
        """Bytes of all tensor files."""
        return sum(file.bytes for file in self.files.values())

    def to_json(self) -> str:
        names = sorted(self.files)
        number = {name: i for i, name in enumerate(names)}
        document = {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self, name) for name in PLAIN},
            **({"base": self.base} if self.base else {}),
            "files": [{"name": name, **asdict(self.files[name])} for name in names],
            "tensors": {
                key: {
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "boxes": [[number[box.file], box.start, box.shape] for box in tensor.boxes],
                }
                for key, tensor in sorted(self.tensors.items())
            },
        }
        return with_digest(document)


PLAIN = (
    "step", "created", "versions", "seed", "model", "workload", "plan", "order", "data", "replicas", "ranks",
)  # fmt: skip


HEAD = b'{"digest":"%s",'


def with_digest(document: Json) -> str:
    """The text of a document that begins with the SHA-256 of all its other bytes."""
    body = json.dumps(document, separators=(",", ":"))[1:]
    return (HEAD % hashlib.sha256(body.encode()).hexdigest().encode()).decode() + body


def digest_fits(text: bytes) -> bool:
    """Whether a text that `with_digest` wrote has not changed in any byte."""
    length = len(HEAD) - 2 + 64
    return text[:length] == HEAD % hashlib.sha256(text[length:]).hexdigest().encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked. Raises MW-CKPT-001 if there is none, 002 if it is damaged, 003 if it is newer, 018 if the
    disk does not let it be read."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MANIFEST_LIMIT:
            raise damaged(folder, f"{MANIFEST} is larger than {MANIFEST_LIMIT // 10**6} MB")
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        fix = f"name a folder with a {MANIFEST}, such as RUN/checkpoints/step-00001000"
        why = f"{MANIFEST} is missing: the save was not completed, or the file was deleted"
        raise MeshwrightError("MW-CKPT-001", f"'{folder}' is not a complete checkpoint", why=why, fix=fix) from None
    except OSError as error:
        raise unreadable(path, error) from None
    return parse_manifest(text, folder)


def has_manifest(folder: Path) -> bool:
    """Whether a folder has a manifest. An error of the disk is not an absent file: it raises MW-CKPT-018."""
    try:
        return stat.S_ISREG((folder / MANIFEST).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(folder / MANIFEST, error) from None


def parse_manifest(text: bytes, folder: Path) -> Manifest:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(folder, f"{MANIFEST} is not JSON: {str(error)[:120]}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise damaged(folder, f"{MANIFEST} is not the manifest of a checkpoint")
    version = document.get("version")
    try:
        if not digest_fits(text):
            raise ValueError("its content has changed since it was written: the hash differs")
        if type(version) is not int or version > VERSION:
            raise MeshwrightError(
                "MW-CKPT-003",
                f"'{folder}' has version {str(version)[:20]} of the checkpoint format",
                why=f"This Meshwright reads versions up to {VERSION}",
                fix="update Meshwright",
            )
        return _manifest_of(document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        if isinstance(error, MeshwrightError):
            raise
        raise damaged(folder, f"{MANIFEST}: {type(error).__name__ if not str(error) else str(error)[:160]}") from None


def _manifest_of(document: Json) -> Manifest:
    names = [str(file["name"]) for file in document["files"]]
    if any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
        raise ValueError("a file name is not valid")
    tensors = {
        key: SavedTensor(
            str(saved["dtype"]),
            _sizes(saved["shape"]),
            tuple(SavedBox(names[at], _sizes(start), _sizes(shape)) for at, start, shape in saved["boxes"]),
        )
        for key, saved in document["tensors"].items()
    }
    for key, tensor in tensors.items():
        check_cover(key, tensor)
    plain = {name: document[name] for name in PLAIN}
    if type(plain["step"]) is not int or plain["step"] < 0 or not 0 <= plain["replicas"] <= MOST_RANKS:
        raise ValueError("step or replicas is not valid")
    return Manifest(
        base=dict(document.get("base", {})),
        **{**plain, "order": tuple(plain["order"]), "ranks": tuple(plain["ranks"])},
        tensors=tensors,
        files={file["name"]: SavedFile(int(file["bytes"]), str(file["sha256"])) for file in document["files"]},
    )


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(n) is int and 0 <= n < 2**62 for n in values):
        raise ValueError("a size is not a whole number")
    return tuple(values)


def check_cover(key: str, tensor: SavedTensor) -> None:
    """Raise unless the boxes lie inside the tensor and have as many elements as it has."""
    count = 0
    for box in tensor.boxes:
        if len(box.start) != len(tensor.shape) or len(box.shape) != len(tensor.shape):
            raise ValueError(f"a box of {key} has another number of dimensions")
        if any(a + n > size for a, n, size in zip(box.start, box.shape, tensor.shape, strict=True)):
            raise ValueError(f"a box of {key} is outside the tensor")
        count += math.prod(box.shape)
    if count != math.prod(tensor.shape):
        raise ValueError(f"the boxes of {key} have {count:,} of its {math.prod(tensor.shape):,} elements")


def check_files(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None, listen: Listen | None = None
) -> None:
    """Raise MW-CKPT-002 if a file is missing, has another size or another content, MW-CKPT-018 if the disk does not let it be read.
    `names`: only these files."""
    for name in manifest.files if names is None else names:
        expected, path = manifest.files[name], folder / name
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                raise damaged(folder, f"{name} has {size:,} bytes; {expected.bytes:,} were written")
            if file_hash(path, listen) != expected.sha256:
                raise damaged(folder, f"{name} has changed since it was written: the hash differs")
        except FileNotFoundError as error:
            if not has_manifest(
                folder
            ):  # it was there a moment ago: the whole folder has gone, with its mount for example
                raise unreadable(path, error) from None
            raise damaged(folder, f"{name} is missing") from None
        except OSError as error:
            raise unreadable(path, error) from None


def file_hash(path: Path, listen: Listen | None = None) -> str:
    """The SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if listen is not None:
                listen(len(block))
    return digest.hexdigest()


def unreadable(path: Path, error: OSError) -> MeshwrightError:
    """The error for a file that the disk does not let us read now. Its content may be intact, so nothing is renamed or deleted."""
    return MeshwrightError(
        "MW-CKPT-018",
        f"cannot read '{path}'",
        why=f"{error.strerror or error}. The checkpoint may be intact: nothing was renamed or deleted",
        fix="repair the disk, the mount or the permissions, and run the same command again",
        exit_code=IO_ERROR,
    )


def damaged(folder: Path, why: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-CKPT-002",
        f"the checkpoint '{folder}' is damaged",
        why=why,
        fix="resume the run: it uses the last checkpoint that is not damaged",
    )
