"""The weights of a Transformers folder for one of our models: boxes of our parameters, and the check before any is read.

`FolderWeights.read` takes the same boxes that the sharding table gives to a rank, so a rank reads its own part of each tensor and
nothing else. `check` opens the headers of all files, no tensor, and raises one error for what does not fit the model.

A folder that Transformers loads, written tensor by tensor from the weights of one of our models.

    config.json                                the model, with the dtype of the weights
    model-00001-of-00003.safetensors …         at most `shard_bytes` each; one file is called model.safetensors
    model.safetensors.index.json               the file of each tensor, if there are several
    tokenizer and generation settings          copied from the folder that training started from

The weights come from any `Weights`: a checkpoint, drawn ones, another folder. One tensor of theirs is in memory at a time. The folder
is written under a temporary name and renamed when it is complete; an existing folder is never overwritten.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.describe import hf
from meshwright.describe.files import write_text
from meshwright.describe.model import Model
from meshwright.describe.sharding import PROJECT, Parameter, parameters
from meshwright.errors import MeshwrightError, cannot_write
from meshwright.models.hf.folder import COMPANIONS, CONFIG, INDEX, SINGLE, Folder
from meshwright.models.hf.places import HfPlace, places
from meshwright.models.hf.safetensors_file import StoredTensor, write_safetensors
from meshwright.models.hf.tables import EXPERT, table_of
from meshwright.models.initialise import Weights
from meshwright.units import format_bytes

FIRST_BYTES = 1 << 20
MOST_NAMES = 3  # of tensors in an error


class FolderWeights:
    """The parameters of `model`, read from a Transformers folder."""

    def __init__(self, path: str | Path, model: Model) -> None:
        self.folder, self.model = Folder(path), model
        self.family = hf.family_of(self.folder.config)
        self.table = table_of(self.family)
        self.names = frozenset(self.folder.tensors.names())
        self.places = places(model, self.family, self.names.__contains__)

    @property
    def bytes_read(self) -> int:
        return self.folder.stored.bytes_read

    def read(self, name: str, full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """A box of a parameter. Rows that pad the vocabulary are zero."""
        place, shape = self.places[name], list(shape)
        inner = 1 if place.experts else 0
        rows = shape[inner]
        shape[inner] = max(0, min(rows, place.rows - start[inner]))
        parts = [self.folder.tensors.read(theirs, box) for theirs, box in place.slices(start, shape)]
        if place.transposed:
            parts = [part.transpose(-1, -2) for part in parts]
        if not parts:
            value = torch.empty(shape)
        elif place.experts and len(place.shape) < len(full):  # a tensor of each expert
            value = torch.stack(parts)
        else:
            value = torch.cat(parts) if len(parts) > 1 else parts[0]
        if rows > shape[inner]:
            value = torch.cat((value, value.new_zeros([rows - shape[inner], *shape[1:]])))
        return value

    def check(self) -> None:
        """Raise if a tensor is missing, has another shape, or belongs to no parameter of the model."""
        expected = {theirs: list(place.shape) for place in self.places.values() for theirs in place.names}
        if missing := [name for name in expected if name not in self.names]:
            raise MeshwrightError(
                "MW-HF-013",
                f"'{self.folder.path}' lacks {listed(missing, 'tensor')}",
                why="The model in its config.json needs them",
            )
        for theirs, shape in expected.items():
            found = list(self.folder.tensors.shape(theirs))
            if found != shape:
                what, why = f"'{theirs}' has the shape {found}", f"The model in config.json needs {shape}"
                raise MeshwrightError("MW-HF-014", what, why=why, valid=[str(shape)])
        if extra := sorted(name for name in self.names - set(expected) if not self.ignored(name)):
            raise MeshwrightError(
                "MW-HF-018",
                f"'{self.folder.path}' has {listed(extra, 'tensor')} that belong to no part of the model",
                why="Its config.json describes another model, or one with parts that are not supported",
            )

    def ignored(self, name: str) -> bool:
        """Whether a tensor is not a parameter of the model: buffers, the head of tied embeddings, layers after the last."""
        layer = re.match(rf"(?:{re.escape(self.table.prefix)})?{self.table.layers}\.(\d+)\.", name)
        beyond = layer is not None and int(layer[1]) >= self.model.layers
        predicted = beyond and bool(self.folder.config.get("num_nextn_predict_layers"))
        tied_head = name == f"{self.table.head}.weight" and PROJECT not in self.places
        return predicted or tied_head or re.search(self.table.ignored, name) is not None


def fingerprint(folder: Path) -> str:
    """A hash of the names, sizes and first bytes of the weight files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(FIRST_BYTES))
    return digest.hexdigest()


def listed(names: Sequence[str], what: str) -> str:
    """The first names and the number of further ones."""
    more = len(names) - MOST_NAMES
    text = ", ".join(f"'{name[:120]}'" for name in names[:MOST_NAMES])
    return f"{len(names)} {what}{'s' * (len(names) > 1)}: {text}" + (f" and {more} more" if more > 0 else "")


SHARD_BYTES = 5_000_000_000
FORMAT = {"format": "pt"}  # Transformers refuses files without it
MARGIN = 1_000_000  # bytes of free disk for config, index and headers


@dataclass(frozen=True)
class Exported:
    """An export: its folder, family and dtype, and what it counts."""

    folder: Path
    family: str
    dtype: str
    files: int
    tensors: int
    nbytes: int


def export(
    out: str | Path,
    model: Model,
    weights: Weights,
    *,
    dtype: torch.dtype,
    like: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    listen: Callable[[str, int, int], None] | None = None,
    note: Mapping[str, Any] | None = None,
) -> Exported:
    """Write a model as a Transformers folder. `like` is a folder whose config, if it describes this model, and tokenizer are taken;
    `listen` is called with each tensor's name, the bytes written so far and all bytes; `note` is added to config.json."""
    out = Path(out)
    family, config = hf.write(model, hf.load(like) if like is not None else None)
    config |= note or {}
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    parts = contributions(model, family)
    shards = sharded([StoredTensor(name, dtype, part[0].place.shape) for name, part in parts.items()], shard_bytes)
    total = sum(t.nbytes for shard in shards for t in shard)
    check_room(out, total)
    written = 0

    def value(name: str) -> Tensor:
        nonlocal written
        made = assembled(parts[name], weights, dtype)
        written += made.nbytes
        if listen is not None:
            listen(name, written, total)
        return made

    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        files = write_shards(folder, shards, value, total)
        write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
        for name in COMPANIONS:
            if like is not None and (Path(like) / name).is_file():
                shutil.copyfile(Path(like) / name, folder / name)
        folder.chmod(0o755)
        folder.rename(out)
    except OSError as error:
        raise cannot_write(out, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Exported(out, family, config["dtype"], files, len(parts), total)


@dataclass(frozen=True)
class Contribution:
    """A parameter of ours that makes up a tensor of theirs, or a part of it; `expert`: the only expert in that tensor."""

    parameter: Parameter
    place: HfPlace
    expert: int | None


def contributions(model: Model, family: str) -> dict[str, list[Contribution]]:
    """By the name of each tensor of theirs, the parameters it consists of."""
    out: dict[str, list[Contribution]] = {}
    by_name = places(model, family)
    for p in parameters(model, range(model.layers)):
        if p.is_adapter:
            continue
        place = by_name[p.name]
        separate = EXPERT in place.theirs
        for i, theirs in enumerate(place.names):
            out.setdefault(theirs, []).append(Contribution(p, place, i if separate else None))
    return out


def assembled(parts: Sequence[Contribution], weights: Weights, dtype: torch.dtype) -> Tensor:
    """One tensor of theirs."""
    whole = torch.empty(parts[0].place.shape, dtype=dtype)
    for part in parts:
        place, full = part.place, part.parameter.shape
        inner = 1 if place.experts else 0
        start, shape = [0] * len(full), list(full)
        if part.expert is not None:
            start[0], shape[0] = part.expert, 1
        shape[inner] = place.rows  # without the rows that pad the vocabulary
        value = weights.read(part.parameter.name, full, start, shape)
        value, dim = (value, inner) if part.expert is None else (value[0], 0)
        pieces = value.split([count for _, count in place.runs(start[inner], shape[inner])], dim=dim)
        for (_, box), piece in zip(place.slices(start, shape), pieces, strict=True):
            whole[box] = (piece.transpose(-1, -2) if place.transposed else piece).to(dtype)
    return whole


def sharded(tensors: Sequence[StoredTensor], most: int) -> list[list[StoredTensor]]:
    """The tensors in order, in files of at most `most` bytes; a larger tensor has a file to itself."""
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for t in tensors:
        if shards[-1] and size + t.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(t)
        size += t.nbytes
    return shards


def write_shards(
    folder: Path, shards: Sequence[Sequence[StoredTensor]], value: Callable[[str], Tensor], total: int
) -> int:
    """Write the files and, for several, their index. Returns the number of files."""
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, value, FORMAT)
    if count > 1:
        index: dict[str, Any] = {"metadata": {"total_size": total}}
        index["weight_map"] = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return count


def check_room(out: Path, total: int) -> None:
    """Raise if the folder exists, or if the disk has no room for it."""
    if out.exists():
        raise MeshwrightError(
            "MW-HF-019", f"'{out}' exists already", why="An export overwrites nothing", fix="--out DIR"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
    except OSError as error:
        raise cannot_write(out, error) from error
    if free < total + MARGIN:
        raise MeshwrightError(
            "MW-HF-019",
            f"{format_bytes(total)} do not fit on the disk of '{out.parent}'",
            why=f"It has {format_bytes(free)} left",
            exit_code=3,
        )
    if not os.access(out.parent, os.W_OK):
        raise MeshwrightError("MW-HF-019", f"'{out.parent}' is not writable")
