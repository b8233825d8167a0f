"""Boxes to safetensors files and back, through torch's distributed checkpoint (DCP): its planners, its storage, no pickle.

    write   every rank offers its boxes; DCP's coordinator checks that they cover each tensor once; each rank writes one file
    read    for each box that a rank needs, DCP intersects it with the saved boxes and reads the slices that overlap

DCP usually learns boxes from DTensors. Ours come from the sharding table (`describe.sharding`), so the two planners below name them
directly: a plan's tensors need not be DTensors, and a checkpoint does not contain a mesh. Reading takes the boxes from the manifest in
place of the headers of all files, so that a rank opens only files that overlap with its boxes.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.models.initialise import box_of
from meshwright.training.checkpoint.manifest import Manifest, SavedBox, SavedTensor


@dataclass(frozen=True)
class BoxEntry:
    """A box of a full tensor on this rank. `written`: this rank writes it; other ranks that hold the same elements do not."""

    key: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Tensor
    written: bool = True

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.start), sizes=self.tensor.shape)


def write(
    entries: Sequence[BoxEntry], folder: Path, group: ProcessGroup | None
) -> tuple[list[str], dict[str, SavedTensor]]:
    """Write the entries of all ranks of a group on the CPU; a collective. No group: this process alone. If a rank fails, all raise. Returns
    the files that this rank wrote, and on the coordinator the boxes of all ranks."""
    writer = _Writer(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it saves in one process: that is intended
        dcp.save({}, storage_writer=writer, planner=_SavePlanner(entries), process_group=group, no_dist=group is None)
    return writer.files, writer.tensors


def read(folder: Path, manifest: Manifest, entries: Sequence[BoxEntry]) -> None:
    """Fill the tensors of the entries from a checkpoint; values are converted to the dtype of each tensor. Not a collective."""
    wanted: dict[str, list[BoxEntry]] = {}
    for entry in entries:
        if entry.tensor.numel():
            wanted.setdefault(entry.key, []).append(entry)
    if not wanted:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = _Reader(folder, {key: manifest.tensors[key] for key in wanted})
        dcp.load(dict.fromkeys(wanted), storage_reader=reader, planner=_LoadPlanner(wanted), no_dist=True)


class _SavePlanner(DefaultSavePlanner):
    """Offers boxes in place of DTensors."""

    def __init__(self, entries: Sequence[BoxEntry]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.entries = {entry.key: entry for entry in entries}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(entry) for entry in self.entries.values()])
        return self.plan

    def _item(self, entry: BoxEntry) -> WriteItem:
        properties = TensorProperties(dtype=entry.tensor.dtype)
        data = TensorWriteData(chunk=entry.chunk, properties=properties, size=torch.Size(entry.full_shape))
        return WriteItem(index=MetadataIndex(entry.key, entry.start), type=WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.entries[index.fqn].tensor


class _Writer(dcp.HuggingFaceStorageWriter):
    """Keeps what DCP reports about the files that it wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.per_thread_copy_ahead = 0  # from a GPU: torch would open a CUDA context, and our tensors are on the host
        self.files: list[str] = []
        self.tensors: dict[str, SavedTensor] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future = super().write_data(plan, planner)
        self.files = sorted({result.storage_data.relative_path for result in future.wait()})
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        file_of = {result.index: result.storage_data.relative_path for rank in results for result in rank}
        for key, saved in metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                boxes = [(c.offsets, c.sizes, file_of[MetadataIndex(key, c.offsets)]) for c in saved.chunks]
                self.tensors[key] = SavedTensor(
                    str(saved.properties.dtype).removeprefix("torch."),
                    tuple(saved.size),
                    tuple(SavedBox(file, tuple(start), tuple(shape)) for start, shape, file in boxes),
                )


class _LoadPlanner(DefaultLoadPlanner):
    """Asks for boxes; several of one tensor, where this rank holds it twice (a tied embedding)."""

    def __init__(self, wanted: Mapping[str, list[BoxEntry]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.wanted = wanted

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self.saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, entries in self.wanted.items():
            saved = self.saved[key]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, saved, [entry.chunk for entry in entries])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        entry = self.wanted[read_item.dest_index.fqn][read_item.dest_index.index or 0]
        return box_of(entry.tensor.detach(), read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: the values are in the entry's tensor."""


@dataclass(frozen=True)
class _Place:
    relative_path: str


class _Reader(dcp.HuggingFaceStorageReader):
    """Takes the boxes from the manifest."""

    def __init__(self, folder: Path, tensors: Mapping[str, SavedTensor]) -> None:
        super().__init__(str(folder))
        self.tensors = tensors

    def read_metadata(self) -> Metadata:
        places: dict[MetadataIndex, _Place] = {}
        tensors: dict[str, Any] = {}
        for key, saved in self.tensors.items():
            places |= {MetadataIndex(key, b.start): _Place(str(Path(self.path) / b.file)) for b in saved.boxes}
            chunks = [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)) for box in saved.boxes]
            properties = TensorProperties(dtype=getattr(torch, saved.dtype))
            tensors[key] = TensorStorageMetadata(properties, torch.Size(saved.shape), chunks)
        return Metadata(state_dict_metadata=tensors, storage_data=places)
