"""A checkpoint as a Transformers folder: its weights read part by part, on one process, whatever plan wrote them.

Config and tokenizer come from the Transformers folder that the run started from, which the run folder has a copy of (`training.start`);
without one, the config is written from the model alone. The dtype is that of the original folder, else that of the plan's parameters:
masters in fp32 are rounded once, here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.describe import hf
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.run_folder import ORIGINAL
from meshwright.errors import MeshwrightError, unknown
from meshwright.models.hf.folder import CONFIG
from meshwright.models.hf.weights import Exported, export
from meshwright.training.checkpoint.folder import checkpoints_in
from meshwright.training.checkpoint.load import read_average
from meshwright.training.checkpoint.manifest import Manifest, check_files, read_manifest
from meshwright.training.checkpoint.state import AVERAGE, WEIGHT
from meshwright.training.checkpoint.store import BoxEntry, read

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # in a config.json


@dataclass(frozen=True)
class CheckpointWeights:
    """The weights of a checkpoint, or their moving average. Replicas of local SGD are averaged."""

    path: Path
    manifest: Manifest
    kind: str = WEIGHT

    def read(self, name: str, full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> Tensor:
        key = f"{self.kind}/{name}"
        saved = self.manifest.tensors[f"replica-0/{key}" if self.manifest.replicas else key]
        entry = BoxEntry(key, tuple(full), tuple(start), torch.empty(tuple(shape), dtype=getattr(torch, saved.dtype)))
        if self.manifest.replicas:
            read_average(self.path, self.manifest, [entry], "")
        else:
            read(self.path, self.manifest, [entry])
        return entry.tensor


def to_huggingface(
    source: Path,
    out: Path,
    *,
    dtype: str = "",
    like: Path | None = None,
    average: bool = False,
    progress: Callable[[float], None] = lambda share: None,
) -> Exported:
    """Write the newest checkpoint of `source` as a Transformers folder. `like`: a Transformers folder whose config and tokenizer to use;
    `average`: write the moving average of the weights."""
    path = checkpoints_in(source)[-1]
    manifest = read_manifest(path)
    check_files(path, manifest)
    weights = CheckpointWeights(path, manifest, AVERAGE if average else WEIGHT)
    if average and not any(key.removeprefix("replica-0/").startswith(f"{AVERAGE}/") for key in manifest.tensors):
        raise MeshwrightError(
            "MW-CKPT-016",
            f"'{path}' has no moving average of the weights",
            why="The run kept none: optimizer.ema was 0",
            fix="convert without --ema",
        )
    like = like if like is not None else copied_folder(path)
    chosen = DTYPES[dtype_of(manifest, like, dtype)]

    def listen(name: str, done: int, total: int) -> None:
        progress(done / total)

    return export(out, Model(**manifest.model), weights, dtype=chosen, like=like, listen=listen)


def copied_folder(checkpoint: Path) -> Path | None:
    """The copy of the Transformers folder in the run folder of a checkpoint, RUN/checkpoints/step-…"""
    copy = checkpoint.resolve().parents[1] / ORIGINAL
    return copy if (copy / CONFIG).is_file() else None


def dtype_of(manifest: Manifest, like: Path | None, given: str) -> str:
    """The dtype to write: as given, else that of the original folder, else that of the plan's parameters."""
    if given:
        if given not in DTYPES:
            raise unknown("MW-CKPT-017", "the dtype", given, DTYPES, "--dtype {}")
        return given
    config = hf.load(like) if like is not None else {}
    named = NAMES.get(str(config.get("dtype") or config.get("torch_dtype")), "")
    planned = Plan(**manifest.plan).param_dtype if manifest.plan else "fp32"
    return named or (planned if planned in DTYPES else "fp32")
