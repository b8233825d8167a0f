"""Which parameters of a model train: low-rank adapters over a frozen base, frozen parts, or everything. The section [adapter] of a plan or run file.

    [adapter]
    rank = 16                       # LoRA: y = W·x + (alpha / rank)·B·A·x, A is [rank, in], B is [out, rank]; W is frozen
    targets = ["q_proj", "v_proj"]  # PEFT's words, or patterns of our module names; empty: PEFT's default; "all-linear"
    base = "nf4"                    # QLoRA: the frozen matrices of layers have 4 bits, and a scale for each 64 inputs of a row
    trains = ["lm_head"]            # these modules train in full besides (PEFT's modules_to_save)

Without a rank there are no adapters: `trains` then names the only modules that train, `freezes` modules that do not.

The adapter is part of the model (`Model.adapter`): A and B are parameters beside the matrix that they adapt, `q.lora_a.weight` and
`q.lora_b.weight`, with a row each in the sharding table (`sharding.parameters`). A trained rank costs (in + out) parameters per matrix instead
of in·out, so that gradients and optimizer states almost vanish and the frozen base is what has to fit (Hu et al. 2021; Dettmers et al. 2023).

A quantised base is a matrix of codes with one absolute maximum for each block of consecutive inputs of a row (`Packing`). Blocks lie inside a
row, so that a cut between rows, or between blocks, quantises to the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from math import sqrt
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from meshwright.describe.base import Described, Whole, number

Number = Any  # a number, or a numpy array over a batch of plans
ALL_LINEAR = "all-linear"
MOST_RANK = 65_536
Rank = Annotated[int, Field(ge=0, le=MOST_RANK), BeforeValidator(number)]

# What a word of PEFT, or of a framework that uses its own names, means: modules of ours. `heads.` of latent attention is left out.
_GATE, _UP, _DOWN = (
    tuple(f"{part}.{name}" for part in ("ffn", "moe.experts", "moe.shared")) for name in ("gate", "up", "down")
)
_QKV = ("attention.q", "attention.k", "attention.v")
WORDS: dict[str, tuple[str, ...]] = {
    "q_proj": ("attention.q",), "k_proj": ("attention.k",), "v_proj": ("attention.v",), "o_proj": ("attention.o",),
    "q_a_proj": ("attention.q_a",), "q_b_proj": ("attention.q_b",),
    "kv_a_proj_with_mqa": ("attention.kv_a",), "kv_b_proj": ("attention.kv_b",),
    "gate_proj": _GATE, "up_proj": _UP, "down_proj": _DOWN,
    "w1": _GATE, "w3": _UP, "w2": _DOWN,  # Mixtral, torchtitan
    "wq": ("attention.q",), "wk": ("attention.k",), "wv": ("attention.v",), "wo": ("attention.o",),
    "wkv": ("attention.k", "attention.v"), "wqkv": _QKV,
    # Fused projections: ours are separate matrices, each with its own adapter.
    "qkv_proj": _QKV, "query_key_value": _QKV, "c_attn": _QKV, "Wqkv": _QKV, "linear_qkv": _QKV,
    "gate_up_proj": (*_GATE, *_UP), "linear_fc1": (*_GATE, *_UP), "linear_fc2": _DOWN, "linear_proj": ("attention.o",),
    "dense": ("attention.o",), "out_proj": ("attention.o", "linear.out"), "in_proj": ("linear.in",),
    "c_proj": ("attention.o", "ffn.down"), "c_fc": ("ffn.up",), "fc1": ("ffn.up",), "fc2": ("ffn.down",),
    "dense_h_to_4h": ("ffn.up",), "dense_4h_to_h": ("ffn.down",),
    "embed_tokens": ("embedding.tokens",), "wte": ("embedding.tokens",), "embed_in": ("embedding.tokens",),
    "lm_head": ("head.project",), "embed_out": ("head.project",), "router": ("moe.router",),
    "input_layernorm": ("attention_norm",), "post_attention_layernorm": ("ffn_norm",),
}  # fmt: skip
# PEFT's targets in most families; the last two are those of latent attention, for which PEFT has no default.
DEFAULT = ("q_proj", "v_proj", "q_b_proj", "kv_b_proj")
# Modules that may have an adapter.
ADAPTABLE = ("attention.", "ffn.", "moe.experts.", "moe.shared.", "linear.in", "linear.out")
NOT_ADAPTABLE = ("attention.index_", "attention.compress_")
MIXERS = ("attention", "linear")


SCALE_BYTES = 4  # of the absolute maximum of a block, in float32


@dataclass(frozen=True)
class Packing:
    """A format of frozen matrices: bits of a code, and inputs of a row that share a scale (0: the whole row)."""

    bits: int
    block: int

    def code_bytes(self, columns: Number) -> Number:
        """Bytes of the codes of a row; they end at a multiple of four, where the scales begin."""
        return in_words(columns * self.bits / 8)

    def row_bytes(self, columns: Number, double: bool, first: int = 0) -> Number:
        """Bytes of the columns from `first` on of a row: codes, and a scale of each block that they touch. Double quantisation keeps scales of
        one byte, and one float32 for the row."""
        blocks = -(-(first + columns) // self.block) - first // self.block if self.block else 1
        return self.code_bytes(columns) + (in_words(blocks) + SCALE_BYTES if double else SCALE_BYTES * blocks)


def in_words(count: Number) -> Number:
    """The next multiple of four."""
    return -(-count // 4) * 4


PACKINGS = {"nf4": Packing(4, 64), "int8": Packing(8, 0), "fp8": Packing(8, 0)}


class Adapter(Described):
    """Adapters and frozen parts; the default trains every parameter."""

    rank: Rank = 0
    """LoRA: inner width of an adapter; 0: no adapters"""
    targets: tuple[str, ...] = ()
    """matrices with an adapter: PEFT's words (q_proj, all-linear) or patterns of module names (attention.*); empty: PEFT's default"""
    alpha: float = Field(default=0.0, ge=0)
    """an adapter's output is multiplied by alpha / rank; 0: alpha = rank"""
    scaling: Literal["rank", "root"] = "rank"
    """the divisor of alpha: the rank, or its square root (rank-stabilised LoRA)"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """share of an adapter's input dropped when training"""
    expert_rank: Whole = 0
    """rank of the adapters of routed experts; 0: rank"""
    base: Literal["plain", "nf4", "int8", "fp8"] = "plain"
    """format of the frozen matrices of layers (QLoRA: nf4); plain: plan.param_dtype"""
    double_quantised: bool = False
    """the scales of a quantised base have one byte each"""
    trains: tuple[str, ...] = ()
    """modules that train in full: PEFT's words (embed_tokens, lm_head) or patterns (*norm); without a rank nothing else trains"""
    freezes: tuple[str, ...] = ()
    """modules that do not train, whatever `trains` says"""
    start_from: str = ""
    """a PEFT folder with the first values of the adapters; empty: A is drawn and B is zero"""

    @property
    def on(self) -> bool:
        """Whether something does not train."""
        return bool(self.rank or self.trains or self.freezes)

    def learns(self, module: str) -> bool:
        """Whether a module's own parameters train, without those of its adapter."""
        if matches(self.freezes, module):
            return False
        return matches(self.trains, module) or not (self.rank or self.trains)

    def rank_of(self, module: str, expert: bool = False) -> int:
        """The rank of the adapter of a matrix; 0: it has none."""
        if not self.rank or self.learns(module) or not is_adaptable(module):
            return 0
        if not (ALL_LINEAR in self.targets or matches(self.targets or DEFAULT, module)):
            return 0
        return self.expert_rank or self.rank if expert else self.rank

    def scale(self, rank: int) -> float:
        """The factor of the output of an adapter of this rank."""
        alpha = self.alpha or rank
        return alpha / (sqrt(rank) if self.scaling == "root" else rank)

    def packs(self, module: str) -> bool:
        """Whether a matrix is frozen in a quantised format: those of layers, but routers."""
        return self.base in PACKINGS and not self.learns(module) and is_adaptable(module)

    def describe(self) -> str:
        """What trains, in a few words."""
        base = f", {self.base} base" if self.base in PACKINGS else ""
        words = f"rank {self.rank} adapters" if self.rank else "parts of the model"
        return f"{words}{base}"

    def row_bytes(self, columns: Number, first: int = 0) -> Number:
        """Bytes of a row of the quantised base on a rank that has these columns of it."""
        return PACKINGS[self.base].row_bytes(columns, self.double_quantised, first)

    def code_bytes(self, columns: Number) -> Number:
        """The part of `row_bytes` without the scales."""
        return PACKINGS[self.base].code_bytes(columns)


def is_adaptable(module: str) -> bool:
    """Whether the matrix of a module may have an adapter, or be quantised: those of mixers, FFNs and experts."""
    return plain(module).startswith(ADAPTABLE) and not plain(module).startswith(NOT_ADAPTABLE)


def plain(module: str) -> str:
    """The name of a module in its block, as patterns write it: without the layer, and without the part of attention that holds the heads."""
    inside = module.split(".", 2)[2] if module.startswith(("layers.", "mtp.")) and module.count(".") > 1 else module
    return inside.replace("attention.heads.", "attention.", 1)


def matches(patterns: Sequence[str], module: str) -> bool:
    """Whether one of the patterns names a module: a word of PEFT, a pattern of such words, or a pattern of our names."""
    name = plain(module)
    return any(name in _words(p) or fnmatchcase(name, p.removeprefix("layers.*.")) for p in patterns)


@cache
def _words(pattern: str) -> frozenset[str]:
    """The modules that a word of PEFT means, or that a pattern of such words does: `*_proj`."""
    if pattern in WORDS:
        return frozenset(WORDS[pattern])
    words = [word for word in WORDS if "*" in pattern and fnmatchcase(word, pattern.removeprefix("*."))]
    return frozenset(name for word in words for name in WORDS[word])
