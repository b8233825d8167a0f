"""Read a checkpoint of torch's distributed checkpoint with its default storage (torchtitan's): a pickled `.metadata` and `.distcp` files.

    .metadata        a pickle: for each tensor its shape, dtype and boxes, and for each box a file, an offset and a length
    __R_N.distcp     one zip archive of `torch.save` after the other, each with a small pickle and the bytes of one box

Both kinds of pickle are read as data (`pickle_data`): nothing is imported or called, and `torch.load` is not used. What the metadata
claims is checked against the files before memory is allocated for it. Entries that are not tensors (settings of parameter groups,
states of data loaders) are not read.
"""

import io
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.models.initialise import box_of
from meshwright.pickle_data import Instance, Symbol, UnreadPickle, parse
from meshwright.training.checkpoint.manifest import SavedBox, SavedTensor, check_cover

METADATA = ".metadata"
METADATA_LIMIT = 1_000_000_000  # bytes
ARCHIVE_PICKLE_LIMIT = 100_000  # bytes of the pickle in one archive
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool",
}  # fmt: skip
DTYPES = tuple(STORAGES.values())
_META, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "Path")
METADATA_NAMES = {
    *(Symbol(_META, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties")),
    *(Symbol(_META, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    Symbol(_FILES, "_StorageInfo"),
    Symbol("torch", "Size"),
    *(Symbol("torch", name) for name in DTYPES),
    Symbol("torch.serialization", "_get_layout"),
    Symbol("builtins", "getattr"),  # how some versions of Python write an enum
    Symbol("collections", "OrderedDict"),
    *(Symbol(module, name) for module in ("pathlib", "pathlib._local") for name in PATHS),
}  # fmt: skip
TENSOR_NAMES = {
    Symbol("torch._utils", "_rebuild_tensor_v2"),
    Symbol("collections", "OrderedDict"),
    *(Symbol("torch", name) for name in STORAGES),
}


@dataclass(frozen=True)
class TensorPlace:
    """The location of a box: the file, and its archive in it."""

    file: str
    offset: int
    length: int


class TorchCheckpoint:
    """The tensors of a folder that `torch.distributed.checkpoint` wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        try:
            if path.stat().st_size > METADATA_LIMIT:
                raise refused(f"{METADATA} is larger than {METADATA_LIMIT // 10**6} MB")
            data = path.read_bytes()
        except OSError as error:
            raise MeshwrightError(
                "MW-CKPT-001", f"'{folder}' is not a torch checkpoint", why=f"{METADATA}: {error.strerror}"
            ) from None
        try:
            root = parse(data, METADATA_NAMES)
        except UnreadPickle as error:
            raise refused(str(error)) from None
        self.tensors, self.places = _read_metadata(root)
        self._check_places()

    def _check_places(self) -> None:
        """Raise if the metadata places a box outside of its file."""
        sizes: dict[str, int] = {}
        for (key, _), place in self.places.items():
            if place.file not in sizes:
                path = self.folder / place.file
                sizes[place.file] = path.stat().st_size if path.is_file() else -1
            if place.offset + place.length > sizes[place.file]:
                raise refused(f"the file {place.file} is missing or too short for {key}")

    def read(self, key: str) -> Tensor:
        """A full tensor."""
        saved = self.tensors[key]
        full = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        for box in saved.boxes:
            place = self.places[key, box.start]
            with (self.folder / place.file).open("rb") as file:
                file.seek(place.offset)
                part = read_archive(file.read(place.length))
            if tuple(part.shape) != box.shape or part.dtype != full.dtype:
                raise refused(f"{key} has another shape or dtype in {place.file} than in {METADATA}")
            box_of(full, box.start, box.shape).copy_(part)
        return full


def refused(why: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-CKPT-011",
        "the file is not the metadata of a torch checkpoint",
        why=why,
        fix="convert only files that torch.distributed.checkpoint wrote",
    )


def _read_metadata(root: Any) -> tuple[dict[str, SavedTensor], dict[tuple[str, tuple[int, ...]], TensorPlace]]:
    """Tensors by key, and the place of each box by key and start."""
    try:
        places = {}
        for index, info in _of(root, "Metadata").field("storage_data").items():
            found = _of(info, "_StorageInfo").state
            if found.get("transform_descriptors"):
                raise ValueError("it was written with a transformation, such as a compression")
            place = TensorPlace(_file(found["relative_path"]), _whole(found["offset"]), _whole(found["length"]))
            start = index.state.get("offset") if isinstance(index.state, dict) else None
            places[_text(_of(index, "MetadataIndex").field("fqn")), () if start is None else _size(start)] = place
        tensors = {}
        for key, saved in root.field("state_dict_metadata").items():
            if saved.symbol.name != "TensorStorageMetadata":
                continue
            boxes = []
            for chunk in saved.field("chunks"):
                start, shape = _size(chunk.field("offsets")), _size(chunk.field("sizes"))
                boxes.append(SavedBox(places[key, start].file, start, shape))
            dtype = saved.field("properties").state[0].name
            if dtype not in DTYPES:
                raise ValueError(f"the dtype {dtype}")
            tensors[_text(key)] = SavedTensor(dtype, _size(saved.field("size")), tuple(boxes))
            check_cover(key, tensors[key])
        return tensors, places
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        if isinstance(error, MeshwrightError):
            raise
        raise refused(f"{METADATA}: {type(error).__name__}: {str(error)[:160]}") from None


def _of(value: Any, name: str) -> Instance:
    if not isinstance(value, Instance) or value.symbol.name != name:
        raise ValueError(f"expected {name}")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """A `torch.Size`."""
    (numbers,) = _of(value, "Size").arguments
    return tuple(_whole(n) for n in numbers)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError("a size is not a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name is not text")
    return value


def _file(value: Any) -> str:
    """The name of a file in the folder of the checkpoint: never a path out of it."""
    if not isinstance(value, str) or Path(value).name != value or not value.endswith(".distcp"):
        raise ValueError("a file name is not valid")
    return value


def read_archive(data: bytes) -> Tensor:
    """The tensor in an archive that `torch.save` wrote."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            head = entries["data.pkl"]
            if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
                raise ValueError("an entry is compressed")
            if head.file_size > ARCHIVE_PICKLE_LIMIT:
                raise ValueError("its pickle is too large for one tensor")
            if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                raise ValueError("its bytes are in big-endian order")

            def storage(reference: Any) -> tuple[torch.dtype, bytes]:
                kind, symbol, name, _, count = reference
                if kind != "storage" or not isinstance(symbol, Symbol):
                    raise ValueError("a reference is not to a storage")
                dtype = getattr(torch, STORAGES[symbol.name])
                content = archive.read(entries[f"data/{_text(name)}"])
                if len(content) != _whole(count) * dtype.itemsize:
                    raise ValueError("a storage has another size than its tensor needs")
                return dtype, content

            return _tensor_of(parse(archive.read(head), TENSOR_NAMES, storage))
    except MeshwrightError:
        raise
    except (ValueError, TypeError, LookupError, OSError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
        raise refused(f"an archive: {type(error).__name__}: {str(error)[:160]}") from None


def _tensor_of(call: Any) -> Tensor:
    (dtype, content), offset, shape, strides, *_ = _of(call, "_rebuild_tensor_v2").arguments
    shape, strides = tuple(map(_whole, shape)), tuple(map(_whole, strides))
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    last = _whole(offset) + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    count = len(content) // dtype.itemsize
    if last >= count or math.prod(shape) > count:
        raise ValueError("a tensor is larger than its storage")
    return torch.frombuffer(bytearray(content), dtype=dtype).as_strided(shape, strides, offset)
