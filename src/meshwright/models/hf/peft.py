"""Folders of PEFT, read for one of our models with adapters and written from one: the config, and the tensors as `peft_layout` places them."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.describe.adapter import Adapter
from meshwright.describe.files import read_text, write_text
from meshwright.describe.model import Model
from meshwright.describe.sharding import Parameter, parameters
from meshwright.errors import MeshwrightError, cannot_write
from meshwright.models.hf.peft_layout import PREFIX, OwnAdapter, Wrapped, without_base_layer, wrapped_modules
from meshwright.models.hf.places import HfPlace, places
from meshwright.models.hf.safetensors_file import SafetensorsFile, StoredTensor, write_safetensors
from meshwright.models.hf.weights import FORMAT, check_room, listed
from meshwright.models.initialise import Weights, box_of
from meshwright.units import Json

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MOST_CONFIG = 10_000_000  # bytes
# Options of PEFT that change what an adapter computes, and the values with which they do not.
PLAIN: Json = {
    "bias": "none", "use_dora": False, "lora_bias": False, "use_qalora": False, "layer_replication": None, "layers_to_transform": None,
    "trainable_token_indices": None, "use_bdlora": None, "alora_invocation_tokens": None, "arrow_config": None, "velora_config": None,
    "kasa_config": None, "monteclora_config": None,
}  # fmt: skip


# Reading


class PeftFolder:
    """An adapter of PEFT: its config, checked, and its tensors."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = read_config(self.path)
        if not (self.path / TENSORS).is_file():
            others = sorted(entry.name for entry in self.path.glob("adapter_model.*"))
            raise MeshwrightError(
                "MW-ADPT-010",
                f"'{path}' has no {TENSORS}" + (f", but {others[0]}" if others else ""),
                why="A pickle can run any code when it is read" if others else "The weights of the adapter are there",
                fix="load it with PEFT, then model.save_pretrained(DIR)",
            )
        self.file = SafetensorsFile.open(self.path / TENSORS)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.file.entries)

    def rank_of(self, module: Wrapped) -> int:
        return self.file.entries[module.names[0]].shape[0] // max(1, module.experts)

    def read(self, module: Wrapped) -> tuple[Tensor, Tensor]:
        a, b = (self.file.read(name).float() for name in module.names)
        return a, b

    def largest_rank(self, module: Wrapped) -> int:
        """The largest rank of our adapters in a module."""
        if len(module.members) == 1:
            return self.rank_of(module)
        a, b = self.read(module)
        return max(module.of_member(member, a, b)[0].shape[-2] for member in module.members)

    def scale_of(self, module: Wrapped, rank: int) -> float:
        """alpha / rank of a module of theirs."""
        path = module.path.removesuffix(".base_layer") + (
            f".{module.target.rpartition('.')[2]}" if module.parameter else ""
        )
        alpha = pattern_value(self.config.get("alpha_pattern"), path, self.config.get("lora_alpha", 8))
        return alpha / (sqrt(rank) if self.config.get("use_rslora") else rank)

    def adapter(self, model: Model, family: str) -> Adapter:
        """Our description of this adapter. Raises if it is not one of this model."""
        everything = wrapped_modules(model.but(adapter=Adapter(rank=1, targets=("all-linear",))), family)
        modules = [w for w in everything if w.names[0] in self.names]
        taken = {module.path for module in modules}
        alone = [without_base_layer(w) for w in everything if w.path not in taken]
        modules += [w for w in alone if w.names[0] in self.names and w.path not in taken]
        if not modules:
            raise self.misfit("none of its tensors belongs to a matrix of the model", sorted(self.names)[:3])
        owners = sorted({member.owner.split(".", 2)[2] for module in modules for member in module.members})
        ranks = {
            expert: max((self.largest_rank(m) for m in modules if bool(m.experts) == expert), default=0)
            for expert in (False, True)
        }
        rank = ranks[False] or ranks[True]
        return Adapter(
            rank=rank,
            expert_rank=ranks[True] if ranks[True] not in (0, rank) else 0,
            targets=tuple(dict.fromkeys(owner.replace(".heads.", ".") for owner in owners)),
            alpha=float(self.config.get("lora_alpha", 8))
            * (rank / self.config.get("r", rank) if not self.config.get("use_rslora") else 1),
            scaling="root" if self.config.get("use_rslora") else "rank",
            dropout=0.0 if ranks[True] else float(self.config.get("lora_dropout", 0.0)),
            trains=tuple(self.config.get("modules_to_save") or ()),
        )

    def misfit(self, what: str, names: Sequence[str] = ()) -> MeshwrightError:
        return MeshwrightError(
            "MW-ADPT-011",
            f"the adapter in '{self.path}' is not one of this model: {what}"
            + (f" ({', '.join(names)})" if names else ""),
            why=f"It was trained on {self.config.get('base_model_name_or_path') or 'another model'}",
            fix="--from FOLDER, the model that it was trained on",
        )


def pattern_value(patterns: Any, path: str, default: float) -> float:
    """The value of the first pattern that matches a module as PEFT matches them: a regular expression for the end of its name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return float(value)
    return float(default)


def is_peft_folder(path: str | Path) -> bool:
    return (Path(path) / CONFIG).is_file()


def read_config(path: Path) -> Json:
    try:
        config = json.loads(read_text(path / CONFIG, MOST_CONFIG))
    except (RecursionError, json.JSONDecodeError):
        raise MeshwrightError("MW-ADPT-010", f"'{path / CONFIG}' is not JSON", fix="download it again") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else "nothing"
        raise MeshwrightError("MW-ADPT-010", f"'{path}' holds an adapter of the kind {str(kind)[:40]}", valid=["LORA"])
    for name, plain in PLAIN.items():
        if config.get(name, plain) not in (plain, [], {}, None, False):
            what = f"'{path}' was trained with {name}={str(config[name])[:60]}"
            why = "Such an adapter computes something else than W·x + alpha/rank·B·A·x"
            raise MeshwrightError("MW-ADPT-010", what, why=why, valid=[f"{name}={plain}"])
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or isinstance(alpha, bool) or alpha <= 0:
        what = f"'{path / CONFIG}': r = {str(rank)[:20]} and lora_alpha = {str(alpha)[:20]} are not numbers above 0"
        raise MeshwrightError("MW-ADPT-010", what)
    return config


class PeftWeights:
    """The weights of a model with adapters: adapters and fully trained modules from a PEFT folder, all others from `base`."""

    def __init__(self, path: str | Path, model: Model, family: str, base: Weights) -> None:
        self.folder, self.model, self.base = PeftFolder(path), model, base
        self.members: dict[str, tuple[Wrapped, OwnAdapter]] = {}
        for module in self.modules(family):
            for member in module.members:
                self.members |= dict.fromkeys((member.a.name, member.b.name), (module, member))
        self.saved = {f"{PREFIX}{theirs}": place for place in places(model, family).values() for theirs in place.names}
        self.places = places(model, family)

    def modules(self, family: str) -> Iterator[Wrapped]:
        names = self.folder.names
        for module in wrapped_modules(self.model, family):
            alone = without_base_layer(module)
            yield module if module.names[0] in names or not module.parameter else alone

    def check(self) -> None:
        """Raise unless the tensors of the folder are those of the model's adapters and of its fully trained modules, each used once."""
        used: set[str] = set()
        for module, _ in self.members.values():
            used |= set(module.names)
            for name, shape in zip(module.names, self.shapes(module), strict=True):
                if name not in self.folder.names:
                    raise self.folder.misfit(f"it lacks '{name}'")
                found = self.folder.file.entries[name].shape
                if found != shape:
                    raise self.folder.misfit(f"'{name}' has the shape {list(found)}, and the model needs {list(shape)}")
            if (rank := self.folder.largest_rank(module)) > max(module.ranks):
                raise self.folder.misfit(
                    f"'{module.names[0]}' has rank {rank}, and adapter.rank is {max(module.ranks)}"
                )
        trained = {
            self.places[p.name].theirs
            for p in parameters(self.model, range(self.model.layers))
            if p.learns and p.name in self.places
        }
        used |= {PREFIX + name for name in trained}
        if missing := sorted(PREFIX + name for name in trained if PREFIX + name not in self.folder.names):
            raise self.folder.misfit(f"it lacks {listed(missing, 'tensor')}")
        if extra := sorted(self.folder.names - used):
            raise self.folder.misfit(f"it has {listed(extra, 'tensor')} that belong to no adapter of the run")

    def shapes(self, module: Wrapped) -> tuple[tuple[int, ...], tuple[int, ...]]:
        name = module.names[0]
        rows = self.folder.file.entries[name].shape[0] if name in self.folder.names else sum(module.ranks)
        rows -= rows % max(1, module.experts)
        return (rows, module.columns), (module.outputs, rows)

    def read(self, name: str, full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> Tensor:
        if name in self.members:
            module, member = self.members[name]
            a, b = self.folder.read(module)
            factor = self.folder.scale_of(module, self.folder.rank_of(module)) / self.model.adapter.scale(
                member.a.shape[-2]
            )
            ours = module.parted(member, a, b, factor)
            return box_of(ours[name == member.b.name], start, shape)
        place = self.places.get(name)
        if place is not None and PREFIX + place.theirs in self.folder.names:
            value = self.folder.file.read(PREFIX + place.theirs)
            value = value.transpose(-1, -2) if place.transposed else value
            rows = full[0] - len(value)  # that pad the vocabulary
            return box_of(torch.cat((value, value.new_zeros(rows, *value.shape[1:]))) if rows else value, start, shape)
        return self.base.read(name, full, start, shape)


# Writing


@dataclass(frozen=True)
class ExportedAdapter:
    folder: Path
    family: str
    rank: int
    tensors: int
    nbytes: int


def export_adapter(
    out: str | Path, model: Model, weights: Weights, family: str, dtype: torch.dtype, base: str = ""
) -> ExportedAdapter:
    """Write the adapters of a model as a folder that PEFT loads. `base` is the name or the folder of the model they belong to."""
    out, adapter = Path(out), model.adapter
    modules = wrapped_modules(model, family)
    tensors: dict[str, Tensor] = {}
    for module in modules:
        tensors |= dict(zip(module.names, module.joined(weights), strict=True))
    saved = fully_trained(model, family)
    tensors |= {PREFIX + theirs: value_of(weights, p, place) for theirs, (p, place) in saved.items()}
    check_room(out, sum(t.numel() * dtype.itemsize for t in tensors.values()))
    stored = [StoredTensor(name, dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    try:
        out.mkdir(parents=True)
        write_safetensors(out / TENSORS, stored, tensors.__getitem__, FORMAT)
        write_text(out / CONFIG, json.dumps(config_of(model, modules, saved, base), indent=2) + "\n")
    except OSError as error:
        raise cannot_write(out, error) from error
    return ExportedAdapter(out, family, adapter.rank, len(stored), sum(t.nbytes for t in stored))


def config_of(model: Model, modules: Sequence[Wrapped], saved: Iterable[str], base: str) -> Json:
    """adapter_config.json: rank and alpha of most modules, and patterns for those that hold several of ours."""
    adapter, root = model.adapter, model.adapter.scaling == "root"
    by_target = {(m.target, m.parameter): (sum(m.ranks), adapter.scale(m.ranks[0])) for m in modules}

    def alpha(rank: int, scale: float) -> float:
        return scale * (sqrt(rank) if root else rank)

    rank, scale = next(iter(by_target.values()))
    other = {target: found for (target, _), found in by_target.items() if found != (rank, scale)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha(rank, scale),
        "lora_dropout": 0.0 if any(m.parameter for m in modules) else adapter.dropout,  # PEFT has none for parameters
        "use_rslora": root,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": [target for target, parameter in by_target if not parameter],
        "target_parameters": [target for target, parameter in by_target if parameter] or None,
        "rank_pattern": {re.escape(target): r for target, (r, _) in other.items()},
        "alpha_pattern": {re.escape(target): alpha(r, s) for target, (r, s) in other.items()},
        "modules_to_save": sorted({name.split(".")[-2] for name in saved}) or None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def fully_trained(model: Model, family: str) -> Mapping[str, tuple[Parameter, HfPlace]]:
    """Their names of the parameters that train in full beside adapters. Raises for parts of a fused or stacked tensor: PEFT saves whole modules."""
    found: dict[str, tuple[Parameter, HfPlace]] = {}
    by_name = places(model, family)
    for p in parameters(model, range(model.layers)):
        if not p.learns or p.is_adapter:
            continue
        place = by_name[p.name]
        if place.experts or place.rows != place.shape[1 if place.transposed else 0]:
            raise MeshwrightError(
                "MW-ADPT-012",
                f"'{p.name}' trains in full, and {family} has it in '{place.theirs}' together with others",
                why="PEFT saves whole modules",
                fix="meshwright checkpoint convert … --to huggingface writes the whole model",
            )
        found[place.theirs] = (p, place)
    return found


def value_of(weights: Weights, p: Parameter, place: HfPlace) -> Tensor:
    value = weights.read(p.name, p.shape, [0] * len(p.shape), [place.rows, *p.shape[1:]])
    return value.transpose(-1, -2) if place.transposed else value
