"""Write what a rank recorded: tensors and numbers by step, as safetensors and JSON (`folder` reads them).

A step is written when it is complete, so that a script that dies leaves what it did until then. Tensors are stored whole until the recording of
the rank has reached its limit of bytes; from then on their sketches are.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from meshwright.check.folder import FORMAT
from meshwright.check.holdings import Holding
from meshwright.proof.sketch import sketch, sketch_each

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # exact, and numpy reads them
SMALL = 1 << 10  # bytes: always stored whole


class RecordingWriter:
    """Collects the entries of a step, and writes it."""

    def __init__(self, out: Path, limit: float) -> None:
        self.out, self.limit = out, limit
        self.bytes = self.noted = 0
        self.entries: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.batch_dim = 0  # of activations

    def number(self, kind: str, value: float) -> None:
        self.entries.append({"kind": kind, "name": "", "value": value})

    def drop(self, kinds: tuple[str, ...]) -> None:
        """Forget the entries of these kinds in the step that is not written yet."""
        for entry in self.entries:
            if entry["kind"] in kinds and "key" in entry:
                self.bytes -= self.tensors[entry["key"]].nbytes
                del self.tensors[entry["key"]]
        self.entries = [entry for entry in self.entries if entry["kind"] not in kinds]

    def tensor(self, kind: str, name: str, tensor: torch.Tensor, holding: Holding | None, **more: Any) -> None:
        """Note a tensor, or the part of it that this rank holds; without a holding it is not known which part it is."""
        key, value = f"t{self.noted}", tensor.detach()
        self.noted += 1
        row = {"kind": kind, "name": name, **more, "key": key, "dtype": str(value.dtype).removeprefix("torch.")}
        size = value.numel() * value.element_size()
        sketched = size > SMALL and self.bytes + size > self.limit and value.is_floating_point()
        if sketched:
            value = sketch_of(value, holding, self.batch_dim)
            row["sketched"] = list(tensor.shape)
        wide = value.to(WIDER.get(value.dtype, value.dtype)).to("cpu", copy=True).contiguous()
        self.bytes += wide.numel() * wide.element_size()
        self.entries.append({**row, "holding": holding and asdict(holding)})
        self.tensors[key] = wide

    def save(self, rank: int, step: int) -> None:
        """Write the tensors of the step."""
        folder = self.out / f"rank-{rank:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        tensors, self.tensors = self.tensors, {}
        partial = folder / "step.partial"
        save_file(tensors, str(partial))
        partial.replace(folder / f"step-{step:03d}.safetensors")

    def describe(self, rank: int, step: int, about: dict[str, Any], **more: Any) -> None:
        """Write what the tensors of the step are, then what is known of the rank."""
        folder = self.out / f"rank-{rank:05d}"
        entries, self.entries = self.entries, []
        write_json(folder / f"step-{step:03d}.json", {"entries": entries, **more})
        write_json(folder / "rank.json", {"format": FORMAT, "rank": rank, "bytes": self.bytes, **about})


def sketch_of(value: torch.Tensor, holding: Holding | None, batch_dim: int) -> torch.Tensor:
    """Of a parameter's tensor one sketch; of an activation one for each sample, so that samples can be found."""
    if holding is not None:
        first = holding.flat[0] if holding.flat else 0
        return sketch(value, holding.shape, holding.start, holding.size, first)
    if value.ndim < 2:
        return sketch(value, value.shape, (0,) * value.ndim, value.shape)
    return sketch_each(value.movedim(min(batch_dim, value.ndim - 2), 0))


def write_json(path: Path, value: Any) -> None:
    """Through a second file, so that a reader never sees half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value), "utf-8")
    partial.replace(path)
