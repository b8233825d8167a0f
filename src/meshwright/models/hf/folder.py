"""A folder of Transformers: config.json, and the tensors of one safetensors file or of many with an index.

    config.json
    model.safetensors                         or   model.safetensors.index.json: {"weight_map": {name: file}}
                                                   model-00001-of-00003.safetensors …

A file is opened when its first tensor is asked for, so that a rank opens only the files that hold its own part. Weights in pickles
(`pytorch_model.bin`) are never read.

Quantised weights as tensors of plain numbers: fp8 with a scale per block (DeepSeek-V3), and MXFP4 (gpt-oss).

    fp8       W[i, j] = q[i, j] · s[i div 128, j div 128]        q in e4m3, s in fp32: `X.weight` and `X.weight_scale_inv`
    MXFP4     W[.., 32g + j] = v(n_j) · 2^(e[.., g] − 127)       32 numbers share an exponent byte e; each is 4 bits n_j with the
                                                                 value v(n) of e2m1, two in a byte, the low half first:
                                                                 `X_blocks` [E, out, in/32, 16] and `X_scales` [E, out, in/32]

Both are computed in fp32, which is exact for MXFP4 and rounds the product of fp8 once; a caller rounds further. gpt-oss stores
MXFP4 as [out, in] and plain weights as [in, out]: the tensor `X` is [E, in, out] here in both cases.

A box of the plain tensor needs only the blocks that it touches, so that a rank reads a quantised model part by part too.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.describe import hf
from meshwright.describe.files import read_text
from meshwright.errors import MeshwrightError
from meshwright.models.hf.safetensors_file import SafetensorsFile, damaged

Box = tuple[slice, ...]
# Value of a number without its sign, which is the highest of the 4 bits
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32  # numbers that share an exponent in MXFP4
BIAS = 127
SCALE, BLOCKS, EXPONENTS = "_scale_inv", "_blocks", "_scales"


class Tensors(Protocol):
    """Named tensors of a model, of which any slice can be read."""

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, box: Box) -> Tensor: ...


class Fp8Tensors:
    """Weights with a tensor of scales become plain tensors; others are read as they are."""

    def __init__(self, stored: Tensors, block: tuple[int, int]) -> None:
        self.stored, self.block = stored, block
        self.all_names = frozenset(stored.names())

    def names(self) -> Iterable[str]:
        scales = {name for name in self.all_names if name.removesuffix(SCALE) != name}
        return self.all_names - scales

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.stored.shape(name)
        if name + SCALE in self.all_names:
            expected = tuple(-(-n // size) for n, size in zip(shape, self.block, strict=True))
            found = self.stored.shape(name + SCALE)
            if found != expected:
                raise MeshwrightError(
                    "MW-HF-014",
                    f"'{name}{SCALE}' has the shape {list(found)}",
                    why=f"A weight of shape {list(shape)} has a scale per block of {self.block[0]} × {self.block[1]}",
                    valid=[str(list(expected))],
                )
        return shape

    def read(self, name: str, box: Box) -> Tensor:
        values = self.stored.read(name, box)
        if name + SCALE not in self.all_names:
            return values
        out, shape = values.to(torch.float32), self.stored.shape(name)
        blocks = tuple(
            blocks_of_slice(part, size, length) for part, size, length in zip(box, self.block, shape, strict=True)
        )
        scale = self.stored.read(name + SCALE, blocks).to(torch.float32)
        for dim, (part, size) in enumerate(zip(box, self.block, strict=True)):
            scale = scale.repeat_interleave(size, dim)
            scale = scale.narrow(dim, part.start % size, part.stop - part.start)
        return out * scale


class Mxfp4Tensors:
    """A pair of packed numbers and exponents becomes one plain tensor; others are read as they are."""

    def __init__(self, stored: Tensors) -> None:
        self.stored = stored
        names = set(stored.names())
        self.packed = {name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS)}
        halves = {name + half for name in self.packed for half in (BLOCKS, EXPONENTS)}
        if missing := sorted(halves - names):
            raise MeshwrightError(
                "MW-HF-013", f"the folder lacks the tensor '{missing[0]}'", why="MXFP4 needs both halves"
            )
        self.all_names = names - halves | self.packed

    def names(self) -> Iterable[str]:
        return self.all_names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.packed:
            return self.stored.shape(name)
        blocks, exponents = self.stored.shape(name + BLOCKS), self.stored.shape(name + EXPONENTS)
        if len(blocks) != 4 or blocks[3] != GROUP // 2 or blocks[:3] != exponents:
            raise MeshwrightError(
                "MW-HF-014",
                f"'{name}{BLOCKS}' has the shape {list(blocks)} and '{name}{EXPONENTS}' {list(exponents)}",
                why=f"MXFP4 packs {GROUP} numbers into {GROUP // 2} bytes with one exponent",
                valid=["[experts, out, in/32, 16] and [experts, out, in/32]"],
            )
        experts, d_out, groups, _ = blocks
        return experts, groups * GROUP, d_out

    def read(self, name: str, box: Box) -> Tensor:
        if name not in self.packed:
            return self.stored.read(name, box)
        experts, d_in, d_out = box
        groups = blocks_of_slice(d_in, GROUP, self.shape(name)[1])
        packed = self.stored.read(name + BLOCKS, (experts, d_out, groups, slice(0, GROUP // 2)))
        exponents = self.stored.read(name + EXPONENTS, (experts, d_out, groups))
        values = unpacked(packed, exponents)
        return values[..., d_in.start % GROUP :][..., : d_in.stop - d_in.start].transpose(1, 2)


def unpacked(packed_EOGB: Tensor, exponents_EOG: Tensor) -> Tensor:
    """[E, O, 32·G] in fp32: the numbers of MXFP4 blocks."""
    value_of = torch.tensor([*E2M1, *(-v for v in E2M1)])
    halves = torch.stack((packed_EOGB & 0x0F, packed_EOGB >> 4), dim=-1).flatten(-2)
    values = value_of[halves.long()]
    return torch.ldexp(values, exponents_EOG.to(torch.int32).unsqueeze(-1) - BIAS).flatten(-2)


def blocks_of_slice(part: slice, size: int, length: int) -> slice:
    """The blocks of `size` elements that a slice touches."""
    assert part.step in (None, 1)
    return slice(part.start // size, -(-min(part.stop, length) // size))


def plain_tensors(stored: Tensors, config: dict[str, Any]) -> Tensors:
    """The tensors of a folder as plain numbers, by the `quantization_config` of its config.json."""
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, dict):
        return stored
    method = quantisation.get("quant_method")
    if method == "fp8":
        block = quantisation.get("weight_block_size") or [128, 128]
        if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
            raise MeshwrightError(
                "MW-HF-006", f"weight_block_size = {str(block)[:60]} is not valid", valid=["[128, 128]"]
            )
        return Fp8Tensors(stored, (block[0], block[1]))
    if method == "mxfp4":
        return Mxfp4Tensors(stored)
    raise MeshwrightError(
        "MW-HF-015",
        f"the weights are quantised with '{str(method)[:40]}'",
        why="They cannot be turned back into plain numbers here",
        valid=["fp8 (blocks)", "mxfp4", "weights that are not quantised"],
        fix="--from a folder with the original weights; --set adapter.base=nf4 quantises them beside adapters",
    )


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

    def read(self, name: str, box: Box) -> Tensor:
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
