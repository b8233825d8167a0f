"""A folder of Transformers: config.json, and the tensors of one safetensors file or of many with an index.

    config.json
    model.safetensors                         or   model.safetensors.index.json: {"weight_map": {name: file}}
                                                   model-00001-of-00003.safetensors …

A file is opened when its first tensor is asked for, so that a rank opens only the files that hold its own part. Weights in pickles
(`pytorch_model.bin`) are never read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from meshwright.describe import hf
from meshwright.describe.files import read_text
from meshwright.errors import MeshwrightError
from meshwright.models.hf.quantised import Box, Tensors, plain_tensors
from meshwright.models.hf.safetensors_file import SafetensorsFile, damaged

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MOST_INDEX = 200_000_000  # bytes
# Files that belong to the weights and are copied on export; families have different files of tokenizers.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class Folder:
    """The config of a folder, and its tensors as plain numbers."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config: dict[str, Any] = hf.load(self.path)
        self.stored = StoredTensors(self.path)
        self.tensors: Tensors = plain_tensors(self.stored, self.config)


class StoredTensors:
    """The tensors of a folder as they are stored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, SafetensorsFile] = {}
        self.file_of = files_by_name(path, self.opened)

    def opened(self, file: str) -> SafetensorsFile:
        if file not in self.files:
            self.files[file] = SafetensorsFile.open(self.path / file)
        return self.files[file]

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self.files.values())

    def names(self) -> Iterable[str]:
        return self.file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._file(name).entries[name].dtype

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._file(name).read(name, box)

    def _file(self, name: str) -> SafetensorsFile:
        file = self.opened(self.file_of[name])
        if name not in file.entries:
            raise MeshwrightError(
                "MW-HF-013", f"'{file.path}' lacks the tensor '{name[:200]}'", why=f"{INDEX} says that it is there"
            )
        return file


def files_by_name(path: Path, opened: Any) -> dict[str, str]:
    """The file of each tensor."""
    if (path / INDEX).is_file():
        return parse_index(path)
    if (path / SINGLE).is_file():
        return dict.fromkeys(opened(SINGLE).entries, SINGLE)
    pickles = sorted(entry.name for pattern in ("*.bin", "*.pt", "*.pth") for entry in path.glob(pattern))
    if pickles:
        raise MeshwrightError(
            "MW-HF-010",
            f"'{path}' has its weights in '{pickles[0]}'",
            why="That is a pickle, which can run any code when it is read",
            valid=[SINGLE, INDEX],
            fix="load it in Transformers, then model.save_pretrained(DIR)",
        )
    raise MeshwrightError("MW-HF-010", f"'{path}' has no weights", valid=[SINGLE, INDEX])


def parse_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(read_text(path / INDEX, MOST_INDEX))
    except (RecursionError, json.JSONDecodeError):
        raise damaged(path / INDEX, "it is not JSON") from None
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files or not all(is_file_name(f) for f in files.values()):
        raise damaged(path / INDEX, "it has no 'weight_map' of file names in the same folder")
    return files


def is_file_name(value: Any) -> bool:
    """A name without a folder: an index cannot name files elsewhere."""
    return isinstance(value, str) and value == Path(value).name and value.endswith(".safetensors")
