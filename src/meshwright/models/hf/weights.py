"""The weights of a Transformers folder for one of our models: boxes of our parameters, and the check before any is read.

`FolderWeights.read` takes the same boxes that the sharding table gives to a rank, so a rank reads its own part of each tensor and
nothing else. `check` opens the headers of all files, no tensor, and raises one error for what does not fit the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.describe import hf
from meshwright.describe.model import Model
from meshwright.describe.sharding import PROJECT
from meshwright.errors import MeshwrightError
from meshwright.models.hf.folder import Folder
from meshwright.models.hf.places import Place, places, table_of

MOST_NAMES = 3  # of tensors in an error


class FolderWeights:
    """The parameters of `model`, read from a Transformers folder."""

    def __init__(self, path: str | Path, model: Model) -> None:
        self.folder, self.model = Folder(path), model
        self.family = hf.family_of(self.folder.config)
        self.names = frozenset(self.folder.tensors.names())
        self.places = places(model, self.family, self.names.__contains__)

    @property
    def bytes_read(self) -> int:
        return self.folder.stored.bytes_read

    def read(self, name: str, full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A box of a parameter. Rows that pad the vocabulary are zero."""
        place, shape = self.places[name], list(shape)
        inner = 1 if place.experts else 0
        rows = shape[inner]
        shape[inner] = max(0, min(rows, place.rows - start[inner]))
        parts = [self.folder.tensors.read(theirs, box) for theirs, box in place.slices(start, shape)]
        if place.transposed:
            parts = [part.transpose(-1, -2) for part in parts]
        separate = place.experts and len(place.shape) < len(full)
        if not parts:
            value = torch.empty(shape)
        else:
            value = torch.stack(parts) if separate else torch.cat(parts) if len(parts) > 1 else parts[0]
        if rows > shape[inner]:
            padding = value.new_zeros([rows - shape[inner], *shape[1:]])
            value = torch.cat((value, padding))
        return value

    def check(self) -> None:
        """Raise if a tensor is missing, has another shape, or belongs to no parameter of the model."""
        expected = {theirs: place for place in self.places.values() for theirs in place.names}
        if missing := [name for name in expected if name not in self.names]:
            raise MeshwrightError(
                "MW-HF-013",
                f"'{self.folder.path}' lacks {listed(missing, 'tensor')}",
                why="The model in its config.json needs them",
            )
        for theirs, place in expected.items():
            self._check_shape(theirs, place)
        if extra := sorted(name for name in self.names - set(expected) if not self.ignored(name)):
            raise MeshwrightError(
                "MW-HF-018",
                f"'{self.folder.path}' has {listed(extra, 'tensor')} that belong to no part of the model",
                why="Its config.json describes another model, or one with parts that are not supported",
            )

    def _check_shape(self, theirs: str, place: Place) -> None:
        found = self.folder.tensors.shape(theirs)
        if found != place.shape:
            raise MeshwrightError(
                "MW-HF-014",
                f"'{theirs}' has the shape {list(found)}",
                why=f"The model in config.json needs {list(place.shape)}",
                valid=[str(list(place.shape))],
            )

    def ignored(self, name: str) -> bool:
        """Whether a tensor is not a parameter of the model: buffers, the head of tied embeddings, layers after the last."""
        layer = re.match(rf"(?:{re.escape(self.table.prefix)})?{self.table.layers}\.(\d+)\.", name)
        beyond = layer is not None and int(layer[1]) >= self.model.layers
        predicted = beyond and bool(self.folder.config.get("num_nextn_predict_layers"))
        tied_head = name == f"{self.table.head}.weight" and PROJECT not in self.places
        return predicted or tied_head or re.search(self.table.ignored, name) is not None

    @property
    def table(self):
        return table_of(self.family)


def listed(names: Sequence[str], what: str) -> str:
    """The first names and the number of further ones."""
    more = len(names) - MOST_NAMES
    text = ", ".join(f"'{name[:120]}'" for name in names[:MOST_NAMES])
    return f"{len(names)} {what}{'s' * (len(names) > 1)}: {text}" + (f" and {more} more" if more > 0 else "")
