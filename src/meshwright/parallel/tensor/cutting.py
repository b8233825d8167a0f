"""Cutting the parameters of a module: by the rule of its style, by a row for one parameter, or part by part of a fused weight.

`shard_parameters` reads `describe.sharding.rules`, for our models and for a user's module: which dimension a style cuts, whether it must
divide, and over which axis the gradient is a partial sum. Everything that is cut is recorded in the `Split`.

**Fused weights.** A tensor-parallel rank holds one range of a dimension, or several of a fused one. Many models compute queries, keys and
values, or gate and up, in one product, whose weight is theirs stacked:

    [ q | k | v ]  cut in two halves:         [ q, half of k ] and [ half of k, v ]        no rank can attend
    each part cut separately:                 [ q₀ | k₀ | v₀ ] and [ q₁ | k₁ | v₁ ]        each has some heads

The table gives the parts, "column:1,1" in proportion, or "heads:32,8,8" in heads, which are never cut: where there are
fewer heads than ranks, neighbours hold copies, as with "keys". Parts that alternate head by head (GPT-NeoX's
q₀k₀v₀q₁k₁v₁…, Falcon's groups) are whole heads one after the other: plain "column" cuts them correctly.

Checks before a module is cut: the layout of its weight, that a layer computes only its product, and that ranks draw the same
dropout masks.

The forward of a row-split linear layer and of an embedding split by vocabulary is replaced by one with a sum over ranks. A layer that
computes more, such as an embedding that scales its output, would silently lose it. So a subclass with its own `forward` is tried: its
output must be that of its weight and bias alone.

Between the split layers all ranks of a group hold the same activations. `nn.Dropout` draws from each rank's generator: with different
seeds the ranks would silently continue with different activations. With equal seeds they stay equal (and drop the same positions of
each rank's heads, which is another draw than one device's, but a valid one).
"""

import zlib
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from meshwright.describe.sharding import KV_COPIES, RULES, Degrees, even_range, partial_over, rule_of
from meshwright.errors import MeshwrightError
from meshwright.models.parts import ProductLinear
from meshwright.parallel import exchange

TRIED = 3  # rows in the trial


def is_transposed(part: Any) -> bool:
    """Hugging Face's Conv1D of GPT-2: a linear layer whose weight is [in, out]."""
    return type(part).__name__ == "Conv1D" and hasattr(part, "nf") and part.weight.ndim == 2


def output_dim(part: Any) -> int:
    """The output dimension of a linear layer's weight."""
    return int(is_transposed(part))


def product(part: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    compute = part.product if isinstance(part, ProductLinear) else F.linear
    return compute(x, part.weight.T if is_transposed(part) else part.weight, bias)


@torch.no_grad()
def check_plain(name: str, part: Any) -> None:
    """Raise for a linear layer or an embedding that computes more than its product."""
    plain = (nn.Linear.forward, ProductLinear.forward, nn.Embedding.forward)
    if "forward" not in vars(part) and (type(part).forward in plain or is_transposed(part)):
        return
    weight = part.weight
    if weight.is_meta:
        raise MeshwrightError(
            "MW-TP-004",
            f"'{name}' is a {type(part).__name__} with its own forward, on the meta device",
            why="Without weights it cannot be checked whether it computes more than its product",
            fix="load its weights before splitting",
        )
    if isinstance(part, nn.Embedding):
        given = torch.arange(min(TRIED, len(weight)), device=weight.device)
        expected = F.embedding(given, weight)
    else:
        inner = weight.shape[1 - output_dim(part)]
        given = torch.linspace(-1, 1, TRIED * inner, device=weight.device).view(TRIED, inner).to(weight.dtype)
        expected = product(part, given, part.bias)
    got, close = part.forward(given), 16 * torch.finfo(weight.dtype).eps
    atol = close * float(expected.abs().max())
    if got.shape != expected.shape or not torch.allclose(got, expected, rtol=close, atol=atol):
        raise MeshwrightError(
            "MW-TP-004",
            f"'{name}', a {type(part).__name__}, computes more than its product",
            why="Split, it is replaced by its product summed over ranks: anything else would be lost",
            fix="compute the additional part in a module around it",
        )


def check_dropout_seeds(module: nn.Module, group: ProcessGroup) -> None:
    """Raise for a module with dropout on ranks whose random states differ."""
    drops = next((name for name, part in module.named_modules() if drop_rate(part) > 0), None)
    if drops is None:
        return
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    drawn = float(zlib.crc32(state.numpy().tobytes()))
    ends = torch.tensor([drawn, -drawn], dtype=torch.float64, device=device if device.type == "cuda" else "cpu")
    distributed.all_reduce(ends, distributed.ReduceOp.MAX, group)
    if float(ends.sum()) != 0:
        raise MeshwrightError(
            "MW-TP-007",
            f"'{drops}' has dropout, and the random states of the ranks differ",
            why="Between split layers all ranks hold the same activations and must draw the same dropout masks",
            fix="call torch.manual_seed with the same number on all ranks of a tensor-parallel group",
        )


def drop_rate(part: nn.Module) -> float:
    if isinstance(part, nn.MultiheadAttention):
        return part.dropout
    return part.p if isinstance(part, nn.Dropout) else 0.0


@dataclass(frozen=True)
class ParameterCut:
    """This rank's range of one dimension of a parameter, which `copies` neighbours hold."""

    dim: int
    start: int
    length: int
    full: int
    copies: int = 1


def fused_cuts(name: str, dim: int, full: int, kind: str, parts: str, group: ProcessGroup) -> tuple[ParameterCut, ...]:
    """This rank's ranges of a dimension that holds several `parts`, such as "32,8,8"."""
    ranks, rank = group.size(), group.rank()
    counts = [int(word) for word in parts.split(",") if word.isdecimal() and int(word)]
    if len(counts) != parts.count(",") + 1 or full % sum(counts):
        raise MeshwrightError(
            "MW-TP-005",
            f"'{name}' has {full} columns, which '{kind}:{parts}' does not divide",
            why="The parts are whole numbers, in proportion or in heads, whose sum divides the columns",
            valid=["column:1,1", "heads:32,8,8"],
        )
    width, cuts, begin = full // sum(counts), [], 0
    for count in counts:
        units, what = (count, "heads") if kind == "heads" else (count * width, "columns")  # none of which is cut
        if units % ranks and (kind != "heads" or ranks % units or count == max(counts)):
            problem = f"a part of {units} {what} of '{name}' does not divide over tp={ranks}"
            raise MeshwrightError("MW-TP-002", problem, why="Each rank holds whole heads or columns")
        copies = max(1, ranks // units)
        start, stop = even_range(count * width, ranks // copies, rank // copies)
        cuts.append(ParameterCut(dim, begin + start, stop - start, full, copies))
        begin += count * width
    return tuple(cuts)


def cut_out(cuts: tuple[ParameterCut, ...], full: Tensor) -> Tensor:
    """A rank's part of a full tensor."""
    return torch.cat([full.narrow(cut.dim, cut.start, cut.length) for cut in cuts], dim=cuts[0].dim)


@dataclass
class Split:
    """The result of `split`: the cuts by parameter name, and the parameters whose gradient is a partial sum, over tp
    (`partial`) or over the ranks that hold the same KV head (`copied`)."""

    group: ProcessGroup
    sequence: bool = False
    form: str = "megatron"
    head: int = 0
    copies: ProcessGroup | None = None
    sequence_dim: int = 1  # of activations: 1 in [B, S, H], 0 where a module takes [S, B, H]
    cuts: dict[str, ParameterCut] = field(default_factory=dict)
    fused: dict[str, tuple[ParameterCut, ...]] = field(default_factory=dict)  # of parameters that hold several parts
    partial: set[str] = field(default_factory=set)
    copied: set[str] = field(default_factory=set)
    made: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)  # a weight shared by two modules stays shared
    configs: list[Any] = field(default_factory=list)  # copied configs of modules that read their counts from one

    def enter(self, x: Tensor) -> Tensor:
        """The input of column-split products: gathered along the sequence where that is divided."""
        if self.sequence:
            return exchange.gather_in(x, self.group, self.sequence_dim)
        return exchange.copy_in(x, self.group)

    def leave(self, partial_sum: Tensor) -> Tensor:
        """The sum over the ranks, of which each keeps its share of the sequence where that is divided. `partial_sum` must be a
        fresh tensor: it may be summed in place."""
        if self.sequence:
            return exchange.scatter_out(partial_sum, self.group, self.sequence_dim)
        return exchange.reduce_out(partial_sum, self.group)

    def cuts_of(self, name: str) -> tuple[ParameterCut, ...]:
        """One cut, several of a fused parameter, none of a whole one."""
        return self.fused.get(name) or ((self.cuts[name],) if name in self.cuts else ())


def shard_parameters(done: Split, name: str, part: Any, style: str, copies: int = 1) -> None:
    """Replace a module's parameters by this rank's part, by the rule of its style; `copies` neighbours hold the same KV head."""
    degrees = Degrees(done.group.size(), kv_copies=copies, sp=done.sequence, all_gather=done.form == "all-gather")
    for field_name, parameter in list(part.named_parameters(recurse=False)):
        own = f"{style}-bias" if field_name == "bias" and f"{style}-bias" in RULES else style
        rule, flipped = rule_of(own, degrees.all_gather), parameter.ndim == 2 and is_transposed(part)
        for dim, _ in rule.cuts:
            cut_parameter(done, part, name, field_name, 1 - dim if flipped else dim, rule.even, copies)
        for axis, partial in partial_over(own, degrees).items():
            if partial:
                (done.copied if axis == KV_COPIES else done.partial).add(f"{name}.{field_name}")


def cut_parameter(
    done: Split, owner: Any, prefix: str, name: str, dim: int, even: bool = True, copies: int = 1
) -> None:
    """Replace a parameter by this rank's range of dimension `dim`, of which `copies` neighbours keep the same."""
    full, parts = getattr(owner, name).shape[dim], done.group.size() // copies
    if even and full % parts:
        what = f"dimension {dim} of '{prefix}.{name}', {full}, does not divide over tp={done.group.size()}"
        raise MeshwrightError("MW-TP-002", what, why="Each rank holds whole heads or columns")
    start, stop = even_range(full, parts, done.group.rank() // copies)
    done.cuts[f"{prefix}.{name}"] = cut = ParameterCut(dim, start, stop - start, full, copies)
    replace_parameter(done, owner, name, (cut,))


def replace_parameter(done: Split, owner: Any, name: str, cuts: tuple[ParameterCut, ...]) -> None:
    parameter = getattr(owner, name)
    if parameter not in done.made:
        part = cut_out(cuts, parameter.detach()).clone(memory_format=torch.contiguous_format)
        done.made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    setattr(owner, name, done.made[parameter])


def cut_row(done: Split, owner: Any, prefix: str, name: str, argument: str) -> None:
    """A row for one parameter: "cut:1", or "cut:1:1,1" if dimension 1 has two parts, each cut separately."""
    dim, _, parts = argument.partition(":")
    parameter, full = getattr(owner, name), f"{prefix}.{name}"
    if not dim.isdecimal() or int(dim) >= parameter.ndim:
        raise MeshwrightError(
            "MW-TP-005",
            f"'cut:{argument}' does not fit '{full}', which has {parameter.ndim} dimensions",
            why="A cut names a dimension, and the parts in it if there are several",
            valid=["cut:0", "cut:1:1,1"],
        )
    if parts:
        cut_parts(done, owner, prefix, name, int(dim), "column", parts)
    else:
        cut_parameter(done, owner, prefix, name, int(dim))


def cut_parts(done: Split, owner: Any, prefix: str, name: str, dim: int, kind: str, parts: str) -> int:
    """Replace a parameter by this rank's range of each part of a dimension; returns how many neighbours hold the same."""
    full, size = f"{prefix}.{name}", getattr(owner, name).shape[dim]
    done.fused[full] = cuts = fused_cuts(full, dim, size, kind, parts, done.group)
    replace_parameter(done, owner, name, cuts)
    return max(cut.copies for cut in cuts)


def cut_fused(done: Split, name: str, part: Any, kind: str, argument: str) -> None:
    """Columns of several parts, each cut separately."""
    for field_name, dim in (("weight", output_dim(part)), ("bias", 0)):
        if getattr(part, field_name) is None:
            continue
        copies = cut_parts(done, part, name, field_name, dim, kind, argument)
        if copies > 1:
            done.copies = done.copies or neighbours(done.group, copies)
            done.copied.add(f"{name}.{field_name}")
    set_width(part)


def set_width(part: Any) -> None:
    setattr(part, "nf" if is_transposed(part) else "out_features", part.weight.shape[output_dim(part)])


def divide_counts(done: Split, name: str, part: Any, kind: str, argument: str) -> None:
    """Divide attributes by which a module counts, such as its heads, by the ranks; with the prefix `config.`, in a copy of its config."""
    ranks = done.group.size()
    for path in argument.split(","):
        owner, field_name = part, path
        if path.startswith("config."):
            if not any(part.config is made for made in done.configs):
                part.config = copy(part.config)
                done.configs.append(part.config)
            owner, field_name = part.config, path.removeprefix("config.")
        count = getattr(owner, field_name, None)
        if not isinstance(count, int) or (count % ranks and ranks % count):
            raise MeshwrightError(
                "MW-TP-005",
                f"'{name}' counts {field_name} = {count!r}, which does not divide over tp={ranks}",
                why="The attribute must be an integer, and so must each rank's share",
            )
        setattr(owner, field_name, max(1, count // ranks))


def neighbours(group: ProcessGroup, count: int) -> ProcessGroup:
    """The group of `count` neighbouring ranks that this rank belongs to; created by its members if it is not the whole group."""
    if count == group.size():
        return group
    ranks, first = distributed.get_process_group_ranks(group), group.rank() // count * count
    made = distributed.new_group(ranks[first : first + count], use_local_synchronization=True)
    assert isinstance(made, ProcessGroup)
    return made
