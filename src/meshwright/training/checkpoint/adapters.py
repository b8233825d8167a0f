"""A checkpoint of adapters and the base that they belong to: found again, checked, and merged.

A run that trains adapters saves them alone. Its manifest says where the frozen weights came from (`Manifest.base`): a Transformers folder with a
fingerprint of its files, or the seed that they were drawn from.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from meshwright.describe import hf
from meshwright.describe.model import Model
from meshwright.describe.sharding import Parameter, parameters
from meshwright.errors import MeshwrightError
from meshwright.models.adapter import merged
from meshwright.models.hf.folder import CONFIG
from meshwright.models.hf.weights import FolderWeights, fingerprint
from meshwright.models.initialise import DrawnWeights, Weights, box_of
from meshwright.models.quantised import RowPacking
from meshwright.training.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class MergedWeights:
    """The weights of a base with the adapters of a checkpoint merged into them: W + s·B·A, of a quantised base its rounded numbers, since the
    adapters were trained beside them. What trained in full is that of the checkpoint."""

    model: Model
    base: Weights
    trained: Weights

    def read(self, name: str, full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> Tensor:
        p = self.table[name]
        if not p.frozen:
            return self.trained.read(name, full, start, shape)
        if p.packed:
            packing = RowPacking(self.model.adapter.base, full[-1], 0, self.model.adapter.double_quantised)
            rows = self.base.read(name, full, (*start[:-1], 0), (*shape[:-1], full[-1]))
            weight = box_of(
                packing.unpack(packing.pack(rows), torch.float32), (*[0] * (len(full) - 1), start[-1]), shape
            )
        else:
            weight = self.base.read(name, full, start, shape)
        owner = name.removesuffix(".weight")
        if f"{owner}.lora_a.weight" not in self.table:
            return weight
        a, b = (self.table[f"{owner}.lora_{letter}.weight"] for letter in "ab")
        rank = a.shape[-2]
        a_box = self.trained.read(a.name, a.shape, (*start[:-2], 0, start[-1]), (*shape[:-2], rank, shape[-1]))
        b_box = self.trained.read(b.name, b.shape, (*start[:-1], 0), (*shape[:-1], rank))
        return merged(weight, a_box, b_box, self.model.adapter.scale(rank))

    @cached_property
    def table(self) -> dict[str, Parameter]:
        return {p.name: p for p in parameters(self.model, range(self.model.layers))}


def base_weights(manifest: Manifest, like: Path | None) -> Weights:
    """The frozen weights that the adapters of a checkpoint belong to: of the folder that the run read, or drawn from its seed."""
    model, base = Model(**manifest.model), manifest.base
    if "seed" in base:
        return DrawnWeights(model, base["seed"])
    folder = like if like is not None else Path(base.get("folder", ""))
    if not (folder / CONFIG).is_file():
        raise MeshwrightError(
            "MW-ADPT-014",
            f"the base of the adapters, '{folder}', is not there",
            why="A checkpoint of adapters contains what trained, and refers to its base",
            fix="--like FOLDER, where the base is now",
        )
    if fingerprint(folder) != base.get("fingerprint"):
        raise MeshwrightError(
            "MW-ADPT-014",
            f"the weights in '{folder}' are not those that the adapters were trained on",
            why="The headers of its files, or their sizes, have changed",
            fix="--like FOLDER with the original weights",
        )
    return FolderWeights(folder, model)


MERGED = "merged_adapters"  # a key of config.json: the adapters that were merged into the weights


def adapter_mark(manifest: Manifest) -> str:
    """What identifies the adapters of a checkpoint in a folder that they were merged into."""
    return hashlib.sha256("".join(sorted(file.sha256 for file in manifest.files.values())).encode()).hexdigest()[:16]


def check_not_merged(manifest: Manifest, like: Path | None) -> list[str]:
    """The adapters that a base contains already, and this one. Raises if this one is among them."""
    folder = like if like is not None else Path(manifest.base.get("folder", ""))
    known = hf.load(folder).get(MERGED, []) if (folder / CONFIG).is_file() else []
    mark = adapter_mark(manifest)
    if mark in known:
        raise MeshwrightError(
            "MW-ADPT-012",
            f"the adapters are merged into '{folder}' already",
            why="A second time would add their update twice",
            fix="use that folder as it is",
        )
    return [*known, mark]
