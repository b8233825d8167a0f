"""Conversions between formats of checkpoints, on one process, one tensor at a time.

source                                       target
a torch checkpoint with torchtitan's names   meshwright: a checkpoint that any plan resumes
a checkpoint of Meshwright                   meshwright: the same tensors whole, in a few files
a checkpoint of Meshwright                   a Transformers folder, or a PEFT folder of its adapters

**To our format.** The checkpoint has the format of one that a run wrote, with one box per tensor and files of a few gigabytes, in the order
in which the tensors came. At most one file's tensors are in memory.

**From torchtitan.** Names are those of its Llama family. torchtitan rotates pairs of *neighbouring* elements of a head, (x₀, x₁), (x₂, x₃), …;
our attention, like Transformers', rotates (x₀, x_{D/2}), (x₁, x_{D/2+1}), …. Both compute the same scores if the rows of the query and key
projections are in the matching order: row (head, i, j) of torchtitan, i < D/2 and j < 2, is row (head, j, i) here. The optimizer's moments
have the order of their parameter.

**To Transformers.** Config and tokenizer come from the Transformers folder that the run started from, of which the run folder has a copy
(`training.start`); without one, the config is written from the model alone. The dtype is that of the original folder, else that of the
plan's parameters: masters in fp32 are rounded once, here.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.describe import hf
from meshwright.describe.adapter import Adapter
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.run_folder import ORIGINAL
from meshwright.describe.sharding import parameters
from meshwright.errors import MeshwrightError, cannot_write, listed, unknown
from meshwright.models.hf.folder import CONFIG
from meshwright.models.hf.peft import ExportedAdapter, export_adapter
from meshwright.models.hf.weights import Exported, export
from meshwright.models.initialise import Weights
from meshwright.training.checkpoint import folder
from meshwright.training.checkpoint.adapters import MERGED, MergedWeights, base_weights, check_not_merged
from meshwright.training.checkpoint.folder import checkpoints_in
from meshwright.training.checkpoint.load import read_average
from meshwright.training.checkpoint.manifest import (
    Manifest,
    SavedBox,
    SavedFile,
    SavedTensor,
    check_files,
    file_hash,
    read_manifest,
)
from meshwright.training.checkpoint.state import AVERAGE, NUMBER, OPTIMIZER, WEIGHT
from meshwright.training.checkpoint.store import BoxEntry, read
from meshwright.training.checkpoint.torch_import import METADATA, TorchCheckpoint
from meshwright.units import Json
from meshwright.version import VERSION

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CONFIG_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # in a config.json


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


def newest_in(source: Path) -> tuple[Path, Manifest]:
    """The newest checkpoint of `source`, all of whose files are intact, and its manifest."""
    path = checkpoints_in(source)[-1]
    manifest = read_manifest(path)
    check_files(path, manifest)
    return path, manifest


def to_peft(source: Path, out: Path, *, dtype: str = "", like: Path | None = None) -> ExportedAdapter:
    """Write the adapters of the newest checkpoint of `source` as a folder that PEFT loads."""
    path, manifest = newest_in(source)
    model = Model(**manifest.model)
    if not model.adapter.rank:
        raise MeshwrightError(
            "MW-CKPT-015",
            f"'{path}' has no adapters",
            why="The run trained without adapter.rank",
            fix="--to huggingface",
        )
    like = like if like is not None else copied_folder(path)
    family, _ = hf.write(model.but(adapter=Adapter()), hf.load(like) if like is not None else None)
    chosen = DTYPES[dtype_of(manifest, like, dtype)]
    return export_adapter(
        out, model, CheckpointWeights(path, manifest), family, chosen, manifest.base.get("folder", "")
    )


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
    path, manifest = newest_in(source)
    weights: Weights = CheckpointWeights(path, manifest, AVERAGE if average else WEIGHT)
    if average and not any(key.removeprefix("replica-0/").startswith(f"{AVERAGE}/") for key in manifest.tensors):
        raise MeshwrightError(
            "MW-CKPT-016",
            f"'{path}' has no moving average of the weights",
            why="The run kept none: optimizer.ema was 0",
            fix="convert without --ema",
        )
    given, like = like, like if like is not None else copied_folder(path)
    chosen = DTYPES[dtype_of(manifest, like, dtype)]

    def listen(name: str, done: int, total: int) -> None:
        progress(done / total)

    model, note = Model(**manifest.model), {}
    if model.adapter.on:
        note = {MERGED: check_not_merged(manifest, given)}
        weights = MergedWeights(model, base_weights(manifest, given), weights)
    return export(out, model, weights, dtype=chosen, like=like, listen=listen, note=note)


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
    named = CONFIG_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "")
    planned = Plan(**manifest.plan).param_dtype if manifest.plan else "fp32"
    return named or (planned if planned in DTYPES else "fp32")


Progress = Callable[[float], None]  # the share that is done
FILE_BYTES = 4 << 30
HEADER = {"format": "pt", "DCP_VERSION": "1.0"}  # what torch's distributed checkpoint writes and reads


def read_full(path: Path, manifest: Manifest, key: str) -> Tensor:
    """One full tensor of a checkpoint, in the dtype in which it was saved."""
    saved = manifest.tensors[key]
    tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
    read(path, manifest, [BoxEntry(key, saved.shape, (0,) * len(saved.shape), tensor)])
    return tensor


def write_checkpoint(
    out: Path, tensors: Iterable[tuple[str, Tensor]], description: Json, file_bytes: int = FILE_BYTES
) -> Manifest:
    """Write full tensors as a checkpoint at `out`, which must not exist. `description` are the other fields of the manifest."""
    from safetensors.torch import save_file

    if out.exists():
        raise MeshwrightError(
            "MW-CKPT-014", f"'{out}' exists", why="A conversion overwrites nothing", fix="--out with another folder"
        )
    written = out.parent / f"{folder.WRITING}{out.name}"
    saved: dict[str, SavedTensor] = {}
    files: dict[str, SavedFile] = {}
    try:
        folder.abandon(written)
        written.mkdir(parents=True)
        for number, group in enumerate(grouped(tensors, file_bytes), 1):
            name = f"shard-{number:05d}-model-00001-of-00001.safetensors"
            offsets = {key: {"saved_offsets": [0] * tensor.ndim} for key, tensor in group.items()}
            save_file(group, written / name, metadata={**HEADER, "DCP_SHARDING_INFO": json.dumps(offsets)})
            folder.sync(written / name)
            files[name] = SavedFile((written / name).stat().st_size, file_hash(written / name))
            for key, tensor in group.items():
                box = SavedBox(name, (0,) * tensor.ndim, tuple(tensor.shape))
                saved[key] = SavedTensor(str(tensor.dtype).removeprefix("torch."), box.shape, (box,))
        manifest = Manifest(tensors=saved, files=files, **description)
        folder.publish(written, manifest, out.name)
    except OSError as error:
        raise cannot_write(error.filename or out, error) from error
    finally:
        folder.abandon(written)
    return manifest


def grouped(tensors: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """The tensors of each file, of at most `most` bytes; a larger tensor has a file to itself."""
    group: dict[str, Tensor] = {}
    for key, tensor in tensors:
        if group and sum(t.nbytes for t in group.values()) + tensor.nbytes > most:
            yield group
            group = {}
        group[key] = tensor.contiguous()
    yield group


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


def convert_torchtitan(source: Path, model: Model, out: Path, progress: Progress = lambda share: None) -> Manifest:
    """Write the weights and AdamW's states of a torchtitan checkpoint as a checkpoint of ours."""
    checkpoint = TorchCheckpoint(source)
    keys = translated_keys(checkpoint, model)
    step = int(checkpoint.read("train_state.step")) if "train_state.step" in checkpoint.tensors else 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number, (key, theirs) in enumerate(keys.items()):
            progress(number / len(keys))
            kind, _, name = key.partition("/")
            tensor = checkpoint.read(theirs)
            yield key, tensor.reshape(1) if kind.startswith(NUMBER) else reordered(tensor, name, model)

    versions = {"meshwright": VERSION, "converted from": "torch.distributed.checkpoint (torchtitan)"}
    description = {"model": model.as_dict(), "plan": {}, "workload": {}, "order": (), "created": time.time()}
    return write_checkpoint(out, tensors(), {"step": step, "versions": versions, **description})


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


def reordered(tensor: Tensor, name: str, model: Model) -> Tensor:
    """Rows of the query and key projections in the order of our rotation."""
    match = ROTATED.fullmatch(name)
    if match is None or model.positions != "rope":
        return tensor
    heads = model.heads if match[1] == "q" else model.kv_groups
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def convert(source: Path, out: Path, model: Model | None = None, progress: Progress = lambda share: None) -> Path:
    """Convert a checkpoint to one of Meshwright and return the folder that was written. A torch checkpoint needs its `model`."""
    if not (source / METADATA).is_file():
        gather(*newest_in(source), out, progress)
    elif model is None:
        raise MeshwrightError(
            "MW-CKPT-012",
            "a torch checkpoint does not contain its model",
            why="Names and shapes of its tensors do not determine the number of heads",
            fix="--model with a catalog name, a config.json or a run file",
        )
    else:
        convert_torchtitan(source, model, out, progress)
    return out


def gather(path: Path, manifest: Manifest, out: Path, progress: Progress) -> None:
    """Write the tensors of all ranks whole, without what belongs to single ranks or to a plan."""
    keys = [key for key in manifest.tensors if not key.startswith("rank-")]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number, key in enumerate(keys):
            yield key, read_full(path, manifest, key)
            progress((number + 1) / len(keys))

    versions = {**manifest.versions, "converted from": "meshwright"}
    description = {**vars(manifest), "plan": {}, "versions": versions}
    write_checkpoint(out, tensors(), {k: v for k, v in description.items() if k not in ("tensors", "files")})
