"""torchtitan's names and conventions for the Llama family, and the conversion of its checkpoints.

torchtitan rotates pairs of *neighbouring* elements of a head, (x₀, x₁), (x₂, x₃), …; our attention, like Transformers', rotates
(x₀, x_{D/2}), (x₁, x_{D/2+1}), …. Both compute the same scores if the rows of the query and key projections are in the matching order:
row (head, i, j) of torchtitan, i < D/2 and j < 2, is row (head, j, i) here. The optimizer's moments have the order of their parameter.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from meshwright.describe.model import Model
from meshwright.describe.sharding import parameters
from meshwright.errors import MeshwrightError, listed
from meshwright.training.checkpoint.full import write_checkpoint
from meshwright.training.checkpoint.manifest import Manifest
from meshwright.training.checkpoint.state import NUMBER, OPTIMIZER, WEIGHT
from meshwright.training.checkpoint.torch_import import TorchCheckpoint
from meshwright.version import VERSION

NAMES = {
    "tok_embeddings.weight": "embedding.tokens.weight",
    "layers.*.attention.wq": "layers.*.attention.q",
    "layers.*.attention.wk": "layers.*.attention.k",
    "layers.*.attention.wv": "layers.*.attention.v",
    "layers.*.attention.wo": "layers.*.attention.o",
    "layers.*.attention.q_norm": "layers.*.attention.q_norm",
    "layers.*.attention.k_norm": "layers.*.attention.k_norm",
    "layers.*.attention_norm": "layers.*.attention_norm",
    "layers.*.feed_forward.w1": "layers.*.ffn.gate",
    "layers.*.feed_forward.w2": "layers.*.ffn.down",
    "layers.*.feed_forward.w3": "layers.*.ffn.up",
    "layers.*.ffn_norm": "layers.*.ffn_norm",
    "norm": "head.norm",
    "output": "head.project",
}
STATES = ("exp_avg", "exp_avg_sq", "step")
ROTATED = re.compile(r"layers\.\d+\.attention\.([qk])\.(weight|bias)")


def convert_torchtitan(
    source: Path, model: Model, out: Path, progress: Callable[[float], None] = lambda share: None
) -> Manifest:
    """Write the weights and AdamW's states of a torchtitan checkpoint as a checkpoint of ours."""
    checkpoint = TorchCheckpoint(source)
    keys = translated_keys(checkpoint, model)
    step = int(checkpoint.read("train_state.step")) if "train_state.step" in checkpoint.tensors else 0

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (key, theirs) in enumerate(keys.items()):
            progress(number / len(keys))
            kind, _, name = key.partition("/")
            tensor = checkpoint.read(theirs)
            yield key, tensor.reshape(1) if kind.startswith(NUMBER) else reordered(tensor, name, model)

    description = {
        "step": step,
        "model": model.as_dict(),
        "plan": {},
        "workload": {},
        "order": (),
        "versions": {
            "meshwright": VERSION,
            "converted from": "torch.distributed.checkpoint (torchtitan)",
        },
        "created": time.time(),
    }
    return write_checkpoint(out, tensors(), description)


def translated_keys(checkpoint: TorchCheckpoint, model: Model) -> dict[str, str]:
    """Our key → theirs, for every tensor that is converted. Raises if the weights are not those of the model."""
    expected = {p.name: p.shape for p in parameters(model, range(model.layers))}
    out: dict[str, str] = {}
    unknown = []
    for theirs, saved in checkpoint.tensors.items():
        if theirs.startswith("optimizer.state."):
            path, _, state = theirs.removeprefix("optimizer.state.").rpartition(".")
            name = translated(path)
            kind = NUMBER if state == "step" else OPTIMIZER
            if name in expected and state in STATES:
                out[f"{kind}{state}/{name}"] = theirs
        elif not theirs.startswith(("optimizer.", "lr_scheduler.", "train_state.", "dataloader.")):
            name = translated(theirs)
            if expected.get(name) == saved.shape:
                out[f"{WEIGHT}/{name}"] = theirs
            elif not (model.tied and name == "head.project.weight"):
                unknown.append(f"{theirs} {list(saved.shape)}")
    missing = [name for name in expected if f"{WEIGHT}/{name}" not in out]
    if unknown or missing:
        raise MeshwrightError(
            "MW-CKPT-012",
            "the checkpoint is not one of this model in torchtitan's names",
            why=f"Without a counterpart: {listed(unknown, 4) or 'none'}; missing: {listed(missing, 4) or 'none'}",
            fix="name the configuration of its model: --model llama3-8b or a run file",
        )
    return out


def translated(name: str) -> str:
    """Our name for a parameter of torchtitan; "" if there is none."""
    layer = next(iter(re.findall(r"^layers\.(\d+)\.", name)), "")
    pattern = re.sub(r"^layers\.\d+\.", "layers.*.", name)
    path, _, last = pattern.rpartition(".")
    found = NAMES.get(pattern) or (f"{NAMES[path]}.{last}" if path in NAMES else "")
    return found.replace("*", layer)


def reordered(tensor: torch.Tensor, name: str, model: Model) -> torch.Tensor:
    """Rows of the query and key projections in the order of our rotation."""
    match = ROTATED.fullmatch(name)
    if match is None or model.positions != "rope":
        return tensor
    heads = model.heads if match[1] == "q" else model.kv_groups
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
