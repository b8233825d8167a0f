"""Folders of PEFT: adapters of a Transformers model, read for one of our models and written from one.

    adapter_config.json          the rank, alpha, targets
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight [rank, in] and .lora_B.weight [out, rank]

Where the matrix of a module is that of one of ours, so are A and B. Two layouts differ:

    fused     their query_key_value holds our q, k and v, with one A for all three. Ours have an adapter each. Written, the ranks are added up,
              which computes the same: A = [A_q; A_k; A_v], and B has B_q, B_k and B_v in blocks of columns, at the rows where the values
              of q, k and v are (`tables`). Read, each of ours gets a copy of A and its rows of B
    experts   stacked in one parameter, which PEFT wraps: A [E·r, in] has the ranks of one expert after another, B [out, r·E] has a column
              of each expert for each rank. Of two parameters in a module the first is wrapped first, and its name has one more `base_layer`

The factor alpha / rank may differ from module to module (`rank_pattern`, `alpha_pattern`); ours is one number, and B is scaled by the quotient.
A module with a smaller rank than others gets rows and columns of zeros. Modules that train in full are saved as they are (`modules_to_save`).
"""

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.describe.model import Model
from meshwright.describe.sharding import Parameter, parameters
from meshwright.models.hf.places import HfPlace, places
from meshwright.models.hf.tables import EXPERT
from meshwright.models.initialise import Weights

PREFIX = "base_model.model."
A, B = ".lora_a.weight", ".lora_b.weight"
# In a model with experts PEFT takes targets with these names for those of Transformers 4, and converts them to the stacked experts'.
CONVERTED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate")


class OwnAdapter(NamedTuple):
    """One of our adapters in a module of theirs, and the rows of their output dimension that are its outputs."""

    owner: str  # our module: layers.0.attention.q
    rows: Tensor
    a: Parameter
    b: Parameter


@dataclass(frozen=True, eq=False)
class Wrapped:
    """A module of theirs that has an adapter, or a stacked parameter of experts in one."""

    path: str  # of its tensors, without the prefix
    target: str  # as `target_modules` and the patterns name it
    experts: int
    outputs: int  # of them, also those of matrices without an adapter
    members: tuple[OwnAdapter, ...]
    parameter: bool = False

    @property
    def columns(self) -> int:
        return self.members[0].a.shape[-1]

    @property
    def ranks(self) -> list[int]:
        return [member.a.shape[-2] for member in self.members]

    @property
    def names(self) -> tuple[str, str]:
        return f"{PREFIX}{self.path}.lora_A.weight", f"{PREFIX}{self.path}.lora_B.weight"

    def joined(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """Their A and B, of our adapters."""
        stack, total = (self.experts,) if self.experts else (), sum(self.ranks)
        a, b = torch.zeros(*stack, total, self.columns), torch.zeros(*stack, self.outputs, total)
        start = 0
        for member, rank in zip(self.members, self.ranks, strict=True):
            own = slice(start, start + rank)
            a[..., own, :] = whole(weights, member.a)
            b[..., member.rows, own] = whole(weights, member.b).float()
            start += rank
        if self.experts:
            return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        return a, b

    def parted(self, member: OwnAdapter, a: Tensor, b: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """A and B of one of our adapters, of theirs. `factor` is multiplied into B; a smaller rank than ours is filled with zeros."""
        a, b = self.of_member(member, a, b)
        rank = a.shape[-2]
        ours_a, ours_b = torch.zeros(member.a.shape), torch.zeros(member.b.shape)
        ours_a[..., :rank, :] = a
        ours_b[..., :rank] = b * factor
        return ours_a, ours_b

    def of_member(self, member: OwnAdapter, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The ranks of theirs that reach the outputs of one of our matrices: all of an adapter that PEFT trained, one block of one we wrote."""
        if self.experts:
            a, b = a.unflatten(0, (self.experts, -1)), b.unflatten(1, (-1, self.experts)).permute(2, 0, 1)
        b = b[..., member.rows, :]
        used = (b != 0).flatten(0, -2).any(0)
        if len(self.members) == 1 or not bool(used.any()):
            return a, b
        return a[..., used, :], b[..., used]


def whole(weights: Weights, p: Parameter) -> Tensor:
    return weights.read(p.name, p.shape, [0] * len(p.shape), p.shape).float()


def wrapped_modules(model: Model, family: str) -> list[Wrapped]:
    """The modules of a family that have an adapter, for the adapters of one of our models."""
    found: dict[tuple[str, str], list[OwnAdapter]] = {}
    outputs: dict[tuple[str, str], int] = {}
    plain, every = places(model, family), {p.name: p for p in parameters(model, range(model.layers))}
    for p in every.values():
        if not p.name.endswith(A):
            continue
        owner = p.name.removesuffix(A)
        base, place = every[f"{owner}.weight"], plain[f"{owner}.weight"]
        key = expert_module(place, owner) if place.experts else (place.theirs.removesuffix(".weight"), "")
        found.setdefault(key, []).append(OwnAdapter(owner, rows_of(base, place, owner), p, every[owner + B]))
        outputs[key] = outputs_of(base, place, owner, model.gated)
    several = {module for module, name in found if name and len({n for m, n in found if m == module}) > 1}
    out = []
    for (module, name), members in found.items():
        suffix = re.split(r"\.\d+\.", module, maxsplit=1)[-1]
        inner = ".base_layer" if module in several and name == "gate_up_proj" else ""
        renamed = bool(model.experts) and not name and suffix.rpartition(".")[2] in CONVERTED
        target = f"{suffix}.{name or 'weight'}" if name or renamed else suffix
        experts = members[0].a.shape[0] if name else 0
        out.append(
            Wrapped(module + inner, target, experts, outputs[module, name], tuple(members), bool(target != suffix))
        )
    return out


def expert_module(place: HfPlace, owner: str) -> tuple[str, str]:
    """The module of a family's experts in Transformers, which holds them stacked, and the parameter in it."""
    stem = place.theirs.partition(f".{EXPERT}")[0] if EXPERT in place.theirs else place.theirs.rpartition(".")[0]
    return stem.replace("block_sparse_moe.", "mlp."), "down_proj" if owner.endswith(".down") else "gate_up_proj"


def outputs_of(p: Parameter, place: HfPlace, owner: str, gated: bool) -> int:
    """The outputs of their matrix."""
    if EXPERT in place.theirs:
        return p.shape[-2] * (2 if gated and not owner.endswith(".down") else 1)
    return place.shape[-1] if place.transposed else place.shape[-2]


def rows_of(p: Parameter, place: HfPlace, owner: str) -> Tensor:
    """The rows of their output dimension that are those of one of our matrices."""
    rows = p.shape[-2]
    if EXPERT in place.theirs:  # in files a tensor for each expert; in the model gate and up are one
        return torch.arange(rows) + (rows if owner.endswith(".up") else 0)
    return torch.cat([first + place.step * torch.arange(count) for first, count in place.runs(0, rows)])


def without_base_layer(module: Wrapped) -> Wrapped:
    return replace(module, path=module.path.removesuffix(".base_layer"))
