"""The reference's tensors in the names and layouts of another framework, so that a Hugging Face model can be the reference of a Megatron one.

Frameworks call the same weight differently and store it differently: Megatron joins queries, keys and values by groups of heads and the two
first matrices of an MLP; torchtitan orders the rows of queries and keys by pairs for its rotary embedding; experts are stacked or separate.
Gradients and optimizer states are stored as their weight is. Tables of rows as in `models.hf.tables` say how, each against our own names:

    reference (Hugging Face)            ours                                        candidate (Megatron)
    self_attn.q_proj [h·d, H]     →     attention.q                          →      self_attention.linear_qkv
                                        attention.q + attention.k + attention.v     by groups: (h/k)·d rows of q, d of k, d of v

The reference is translated, not the candidate: every rank of the candidate then stays beside its own part, whatever it holds.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.check.folder import RankStep, Recording, of_ranks
from meshwright.check.names import renamed
from meshwright.models.hf.tables import EXPERT, GROUPED, INTERLEAVED, TABLES, TRANSPOSED, Family, TensorRow, rows
from meshwright.proof.parts import Merged, merge, whole_value

PAIRS = "pairs"  # layout: of the two halves of a head, row i of one is followed by row i of the other
ROWS = {
    "megatron ends": """
    embedding.word_embeddings       embedding.tokens
    embedding.position_embeddings   embedding.positions
    decoder.final_layernorm         head.norm
    output_layer                    head.project
""",
    "megatron layer": """
    input_layernorm                                 attention_norm
    self_attention.linear_qkv.layer_norm_weight     attention_norm.weight
    self_attention.linear_qkv.layer_norm_bias       attention_norm.bias
    self_attention.linear_qkv                       attention.q + attention.k + attention.v   grouped
    self_attention.linear_proj                      attention.o
    self_attention.q_layernorm                      attention.q_norm
    self_attention.k_layernorm                      attention.k_norm
    pre_mlp_layernorm                               ffn_norm
    mlp.linear_fc1.layer_norm_weight                ffn_norm.weight
    mlp.linear_fc1.layer_norm_bias                  ffn_norm.bias
    mlp.linear_fc1                                  ffn.gate + ffn.up
    mlp.linear_fc1                                  ffn.up
    mlp.linear_fc2                                  ffn.down
    mlp.router                                      moe.router
    mlp.experts.local_experts.{expert}.linear_fc1   moe.experts.gate + moe.experts.up
    mlp.experts.local_experts.{expert}.linear_fc2   moe.experts.down
    mlp.experts.linear_fc1.weight{expert}           moe.experts.gate.weight + moe.experts.up.weight
    mlp.experts.linear_fc2.weight{expert}           moe.experts.down.weight
    mlp.shared_experts.linear_fc1                   moe.shared.gate + moe.shared.up
    mlp.shared_experts.linear_fc2                   moe.shared.down
""",
    "torchtitan ends": """
    tok_embeddings   embedding.tokens
    norm             head.norm
    output           head.project
""",
    "torchtitan layer": """
    attention_norm           attention_norm
    attention.wq             attention.q               pairs
    attention.wk             attention.k               pairs
    attention.wv             attention.v
    attention.wo             attention.o
    attention.q_norm         attention.q_norm
    attention.k_norm         attention.k_norm
    ffn_norm                 ffn_norm
    feed_forward.w1          ffn.gate
    feed_forward.w3          ffn.up
    feed_forward.w2          ffn.down
    moe.router.gate          moe.router
    moe.experts.w1           moe.experts.gate.weight
    moe.experts.w3           moe.experts.up.weight
    moe.experts.w2           moe.experts.down.weight
    moe.shared_experts.w1    moe.shared.gate
    moe.shared_experts.w3    moe.shared.up
    moe.shared_experts.w2    moe.shared.down
""",
}
MEGATRON = Family(
    rows(ROWS["megatron ends"]), rows(ROWS["megatron layer"]), prefix="", layers="decoder.layers", head=""
)
TORCHTITAN = Family(rows(ROWS["torchtitan ends"]), rows(ROWS["torchtitan layer"]), prefix="", head="")
OWN_ROWS = tuple(dict.fromkeys(name for f in TABLES.values() for row in f.layer for name in row.ours.split(" + ")))
OURS = Family(
    rows("embedding.tokens  embedding.tokens\nembedding.positions  embedding.positions\nhead.norm  head.norm\nhead.project  head.project"),
    tuple(TensorRow(name, name) for name in OWN_ROWS),
    prefix="",
    head="",
)  # fmt: skip
LOADED = TensorRow("lm_head", "head.project")  # Transformers' name in memory, whatever the family's files call it
FAMILIES: dict[str, Family] = {"Meshwright": OURS, "Megatron": MEGATRON, "torchtitan": TORCHTITAN}
FAMILIES |= {name: family._replace(ends=(*family.ends, LOADED)) for name, family in TABLES.items()}


@dataclass(frozen=True)
class NameMap:
    """The names of the candidate's tensors and modules beside those of the reference."""

    rename: Mapping[str, str]  # names of the candidate, and what the reference calls them
    translation: "Translation | None" = None

    @classmethod
    def of(cls, reference: Recording, candidate: Recording, patterns: Mapping[str, str]) -> "NameMap":
        """From the user's patterns; without any, from the shipped tables if the two have few names in common."""
        one, many = (
            list(dict.fromkeys(n for rank in r.ranks for n in rank["parameters"])) for r in (reference, candidate)
        )
        modules = {name for rank in candidate.ranks for name in rank["modules"]}
        if patterns or 2 * len(set(one) & set(many)) >= len(many):
            return cls(renamed({*many, *modules}, dict(patterns)))
        kinds = [
            next((r["model_type"] for r in run.ranks if r.get("model_type")), "") for run in (reference, candidate)
        ]
        theirs, ours = naming_of(one, kinds[0]), naming_of(many, kinds[1])
        if theirs is None or ours is None or theirs.name == ours.name:
            return cls({})
        heads = next((HeadCounts(*r["heads"]) for r in (*reference.ranks, *candidate.ranks) if r.get("heads")), None)
        translation = Translation(theirs, ours, heads)
        return cls(translation.modules(modules), translation)

    def reference(self, steps: list[RankStep], kind: str) -> dict[str, Merged]:
        tensors = merge(of_ranks(steps, kind))
        return tensors if self.translation is None else self.translation(tensors)

    def candidate(self, steps: list[RankStep], kind: str) -> dict[str, Merged]:
        return merge(of_ranks(steps, kind), self.rename if self.translation is None else {})


class HeadCounts(NamedTuple):
    """Of queries, and of keys and values."""

    queries: int
    keys: int


class TensorParts(NamedTuple):
    """A tensor of a framework: our parameters in it, in the layer or at an end, and of which expert."""

    ours: tuple[str, ...]
    layout: tuple[str, ...]
    expert: int | None


@dataclass(frozen=True)
class Naming:
    """The names of a recording, read with the table of its framework."""

    name: str
    family: Family
    names: tuple[str, ...]

    @cached_property
    def rows(self) -> dict[str, list[TensorParts]]:
        """What each name may be: several rows may name the same tensor, as with an MLP that has a gate or none."""
        return {name: read for name in self.names if (read := list(read_name(self.family, name)))}

    @property
    def known(self) -> set[str]:
        """Our parameters of all that the names may be."""
        return {ours for found in self.rows.values() for row in found for ours in row.ours}


def naming_of(names: Iterable[str], model_type: str = "") -> Naming | None:
    """The naming whose table knows most of the names, of equals that of the model's type; None if none knows half of them."""
    names = tuple(names)
    every = [Naming(name, family, names) for name, family in FAMILIES.items()]
    best = max(every, key=lambda naming: (len(naming.rows), naming.name == model_type))
    return best if 2 * len(best.rows) >= len(names) > 0 else None


def read_name(family: Family, name: str) -> Iterable[TensorParts]:
    """The rows of a family's table that a name of a parameter, or of a module, matches."""
    local, table, before = name.removeprefix(family.prefix), family.ends, ""
    if match := re.fullmatch(rf"{re.escape(family.layers)}\.(\d+)\.(.+)", local):
        local, table, before = match[2], family.layer, f"layers.{match[1]}."
    module, _, leaf = local.rpartition(".")
    for row in table:
        pattern = re.escape(row.theirs).replace(re.escape(EXPERT), r"(?P<expert>\d+)")
        whole, of_module = re.fullmatch(pattern, local), re.fullmatch(pattern, module)
        if (found := whole or (of_module if leaf in ("weight", "bias") else None)) is not None:
            suffix = "" if whole else f".{leaf}"
            expert = found.groupdict().get("expert")
            ours = tuple(f"{before}{part}{suffix}" for part in row.ours.split(" + "))
            yield TensorParts(ours, tuple(row.layout.split()), None if expert is None else int(expert))


@dataclass(frozen=True)
class Translation:
    """Translates whole tensors of the reference into those of the candidate."""

    reference: Naming
    candidate: Naming
    heads: HeadCounts | None

    def __call__(self, tensors: Mapping[str, Merged]) -> dict[str, Merged]:
        """By the candidate's names; values without a name are passed on, tensors that cannot be put together are left out."""
        out: dict[str, Merged] = {name: tensor for name, tensor in tensors.items() if not name}
        ours, kind = self.read(tensors), next((tensor.kind for tensor in tensors.values()), "")
        for name, found in self.candidate.rows.items():
            value = next((v for row in found if (v := self.joined(row, ours)) is not None), None)
            if value is not None:
                out[name] = Merged(kind, name, [whole_value(kind, name, value)])
        return out

    def read(self, tensors: Mapping[str, Merged]) -> dict[str, np.ndarray]:
        """The reference's tensors by our names; experts are stacked."""
        out: dict[str, np.ndarray] = {}
        experts: dict[str, dict[int, np.ndarray]] = {}
        wanted = self.candidate.known
        for name, found in self.reference.rows.items():
            row = next((row for row in found if wanted.issuperset(row.ours)), None)
            whole = tensors[name].whole if row is not None and name in tensors else None
            if row is None or whole is None:
                continue
            for ours, value in zip(row.ours, self.split(row, whole), strict=True):
                if row.expert is None:
                    out[ours] = value
                else:
                    experts.setdefault(ours, {})[row.expert] = value
        stacked = {name: np.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}
        return out | stacked

    def joined(self, row: TensorParts, ours: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """A tensor of the candidate from ours; None if one of them is missing."""
        if not all(name in ours for name in row.ours):
            return None
        values = [ours[name] if row.expert is None else ours[name][row.expert] for name in row.ours]
        axis = axis_of(row)
        if PAIRS in row.layout:
            values = [self.paired(v, name) for v, name in zip(values, row.ours, strict=True)]
        if INTERLEAVED in row.layout:
            out = np.stack(values, axis + 1).reshape(*values[0].shape[:axis], -1, *values[0].shape[axis + 1 :])
        else:
            groups = self.groups(row)
            cut = [v.reshape(*v.shape[:axis], groups, -1, *v.shape[axis + 1 :]) for v in values]
            out = np.concatenate(cut, axis + 1).reshape(*values[0].shape[:axis], -1, *values[0].shape[axis + 1 :])
        return turned(out, row, axis)

    def split(self, row: TensorParts, value: np.ndarray) -> list[np.ndarray]:
        """Ours from a tensor of the reference."""
        axis = axis_of(row)
        value = turned(value, row, axis)
        if INTERLEAVED in row.layout:
            parts = [value.take(range(i, value.shape[axis], len(row.ours)), axis) for i in range(len(row.ours))]
        else:
            groups, shares = self.groups(row), [self.share(name) for name in row.ours]
            cut = value.reshape(*value.shape[:axis], groups, -1, *value.shape[axis + 1 :])
            at = np.cumsum(shares)[:-1] * cut.shape[axis + 1] // sum(shares)
            parts = [p.reshape(*value.shape[:axis], -1, *value.shape[axis + 1 :]) for p in np.split(cut, at, axis + 1)]
        if PAIRS in row.layout:
            parts = [self.paired(p, name, back=True) for p, name in zip(parts, row.ours, strict=True)]
        return parts

    def groups(self, row: TensorParts) -> int:
        return self.heads.keys if GROUPED in row.layout and self.heads is not None else 1

    def share(self, name: str) -> int:
        """How many rows a part has in a tensor of several, relative to the others."""
        if self.heads is None or not (part := re.search(r"attention\.([qkv])\.", name)):
            return 1
        return self.heads.queries if part[1] == "q" else self.heads.keys

    def paired(self, value: np.ndarray, name: str, back: bool = False) -> np.ndarray:
        """The rows of each head: the first half and the second, or pairs of one row of each."""
        heads = self.share(name)
        split = (heads, -1, 2) if back else (heads, 2, value.shape[0] // heads // 2)
        return value.reshape(*split, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)

    def modules(self, names: Iterable[str]) -> dict[str, str]:
        """The reference's module for modules of the candidate: layers, and those whose parameters are named by one row each."""
        ours = {key: name for name in self.reference_modules for key in keys_of(self.reference.family, name)}
        found = {
            name: next((ours[k] for k in keys_of(self.candidate.family, name) if k in ours), None) for name in names
        }
        return {name: theirs for name, theirs in found.items() if theirs is not None}

    @cached_property
    def reference_modules(self) -> Sequence[str]:
        """Every module on the way to a parameter, the outer ones first."""
        paths = [name.split(".") for name in self.reference.names]
        return sorted(
            {".".join(path[:i]) for path in paths for i in range(len(path))}, key=lambda name: name.count(".")
        )


def keys_of(family: Family, name: str) -> list[str]:
    """What a module is in our names: the model, the layers, a layer, the modules of a row, or what contains a row's module on both sides."""
    if not name:
        return ["model"]
    local = name.removeprefix(family.prefix)
    match = re.fullmatch(rf"{re.escape(family.layers)}\.(\d+)(?:\.(.+))?", local)
    if match and match[2] is None:
        return [f"layers.{match[1]}"]
    local, table, before = (match[2], family.layer, f"layers.{match[1]}.") if match else (local, family.ends, "")
    out = []
    for row in table:
        theirs, ours = row.theirs.split("."), row.ours.split(" + ")
        if row.theirs == local and len(ours) == 1 and not row.layout:
            out.append(before + ours[0])
        elif local == theirs[0] and len(theirs) == len(ours[0].split(".")) == 2:
            out.append(before + ours[0].split(".")[0])
    return list(dict.fromkeys(out))


def axis_of(row: TensorParts) -> int:
    """The dimension of output features in our layout: experts that are stacked have one before it."""
    return int(row.expert is None and ".experts." in row.ours[0])


def turned(value: np.ndarray, row: TensorParts, axis: int) -> np.ndarray:
    return value.swapaxes(-1, -2) if TRANSPOSED in row.layout and value.ndim == axis + 2 else value
