"""What an adapter makes of the blocks of a model: which matrices and vectors train, which matrices have a low-rank adapter, and what is saved.

A product with a frozen weight needs its input for no gradient: it is not saved, unless an adapter, or a trained matrix, multiplies the same
input, or attention's backward reads it (the input of its output projection). A norm of separate operations saves its input, and for the gradient of
its weight the normalised input. An adapter saves A·x, `rank` elements for each token, and with dropout the dropped input and its mask. PEFT casts the
input of each adapter to fp32, and autocast back to 16 bits: each saves a copy (`Stack.casts_inputs`), none the input that they share.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from meshwright.describe.adapter import ALL_LINEAR, DEFAULT, MIXERS, WORDS, Adapter, is_adaptable, matches
from meshwright.describe.module_names import TOKENS, module_of, vector_module
from meshwright.describe.shape import ModelShape
from meshwright.describe.tensors import Linear, ParameterBlock, Saved
from meshwright.errors import MeshwrightError, closest_first, nearest

NEEDS_RANK = ("targets", "alpha", "scaling", "dropout", "expert_rank")  # options of adapters
Input = tuple[str, int, float, bool]


def adapted(m: ModelShape, block: ParameterBlock) -> ParameterBlock:
    """The block as the model's adapter trains it."""
    a = m.adapter
    if not a.on:
        return block
    linears = [_linear(m, linear) for linear in block.linears]
    read = {_input(linear) for linear in linears if linear.learns or linear.rank}
    linears = [
        replace(linear, saves_input=linear.saves_input and (_input(linear) in read or linear.name == "o"))
        for linear in linears
    ]
    vectors = [replace(vector, learns=a.learns(vector_module(m, vector))) for vector in block.vectors]
    frozen = {f"{vector.name}-in" for vector in vectors if not vector.learns}
    saved = [replace(one, condition="fused-norm") if one.name in frozen else one for one in block.saved]
    saved += [one for linear in linears if linear.rank for one in _saved(linear, a)]
    return replace(block, linears=tuple(linears), vectors=tuple(vectors), saved=tuple(saved))


def _linear(m: ModelShape, linear: Linear) -> Linear:
    module = module_of(m, linear)
    if linear.name == "head" and m.tied:
        module = TOKENS.rpartition(".")[0]
    expert = linear.style.startswith("experts")
    return replace(
        linear,
        learns=m.adapter.learns(module),
        rank=m.adapter.rank_of(module, expert),
        packed=m.adapter.packs(module),
    )


def _input(linear: Linear) -> Input:
    """Matrices with an equal key multiply the same input, which one of them saves."""
    experts, row = linear.style.startswith("experts"), linear.style in ("row", "experts-row")
    region = "experts" if experts else "mixer" if linear.part in MIXERS else "channel"
    return region, linear.d_in, linear.uses, row


def _saved(linear: Linear, a: Adapter) -> Iterator[Saved]:
    """What the adapter of a matrix keeps for backward."""
    expert = linear.style.startswith("experts")
    inner = Saved(f"{linear.name}-lora", linear.part, linear.uses * linear.rank, "expert" if expert else "whole")
    yield inner
    split: Literal["expert", "tensor", "sequence"]
    split = "expert" if expert else "tensor" if linear.style == "row" else "sequence"
    read = replace(inner, width=linear.uses * linear.d_in, split=split)
    if a.dropout:
        yield replace(read, name=f"{linear.name}-dropped", condition="adapter-dropout")
        yield replace(read, name=f"{linear.name}-dropped-mask", bytes_=1, condition="adapter-dropout")
    else:
        yield replace(read, name=f"{linear.name}-cast", condition="cast-inputs")


def check(m: ModelShape, blocks: dict[str, ParameterBlock]) -> None:
    """Raise if the adapter has an option without effect, does not fit the model, or leaves nothing to train."""
    a = m.adapter
    _check_options(a)
    if not a.on:
        return
    if m.kind != "transformer":
        what, why = f"[adapter] with the model {m.name}", "Its parts are not known one by one"
        fix = " ".join(f"--set adapter.{name}={_default(name)}" for name in a.as_dict())
        raise MeshwrightError("MW-ADPT-003", what, why=why, fix=fix)
    linears = [linear for block in blocks.values() for linear in block.linears if linear.copies]
    matrices = [module_of(m, linear) for linear in linears]
    others = [vector_module(m, vector) for block in blocks.values() for vector in block.vectors]
    adaptable = [module for module in matrices if is_adaptable(module)]
    for field, modules in (("targets", adaptable), ("trains", [*matrices, *others]), ("freezes", [*matrices, *others])):
        for pattern in getattr(a, field):
            if not (field == "targets" and pattern == ALL_LINEAR) and not any(matches([pattern], x) for x in modules):
                raise _no_match(m, field, pattern, modules)
    if a.rank and not any(linear.rank for linear in linears):
        what = f"no matrix of {m.name} has an adapter"
        why = (
            "The targets train in full, or the model has none of PEFT's default targets"
            if a.targets or a.trains
            else f"PEFT's default is {', '.join(DEFAULT)}"
        )
        raise MeshwrightError("MW-ADPT-002", what, why=why, fix=f"--set adapter.targets={ALL_LINEAR}")
    for linear in linears:
        if linear.rank > min(linear.d_in, linear.d_out):
            least = min(min(one.d_in, one.d_out) for one in linears if one.rank)
            field = "expert_rank" if linear.style.startswith("experts") and a.expert_rank else "rank"
            raise MeshwrightError(
                "MW-ADPT-004",
                f"adapter.{field}={linear.rank} exceeds the {linear.d_in} × {linear.d_out} matrix {module_of(m, linear)} of {m.name}",
                why="An adapter of a matrix's full rank has more parameters than the matrix",
                valid=[f"1 to {least}"],
                fix=f"--set adapter.{field}={min(16, least)}",
            )
    if a.base != "plain" and not any(linear.packed for linear in linears):
        what, why = f"adapter.base={a.base} quantises nothing", "Every matrix of a layer trains in full"
        raise MeshwrightError("MW-ADPT-001", what, why=why, fix="--set adapter.base=plain")
    if a.expert_rank and not any(linear.rank and linear.style.startswith("experts") for linear in linears):
        what, why = "adapter.expert_rank has no effect", "No matrix of routed experts has an adapter"
        raise MeshwrightError("MW-ADPT-001", what, why=why, fix="--set adapter.expert_rank=0")
    if (
        (a.rank or a.trains)
        and a.freezes
        and not any(matches(a.freezes, x) and matches(a.trains, x) for x in (*matrices, *others))
    ):
        what, why = (
            "adapter.freezes has no effect",
            "It names no module of adapter.trains, and all others are frozen already",
        )
        raise MeshwrightError("MW-ADPT-001", what, why=why, fix="--set adapter.freezes=''")
    if not any(block.trained for block in blocks.values()):
        raise MeshwrightError("MW-ADPT-005", "no parameter trains", fix="--set adapter.freezes=''")


def _check_options(a: Adapter) -> None:
    """Raise if an option is set that has no effect with the others."""
    changed = a.as_dict()
    for name, unread, why, fix in (
        *((name, not a.rank, "Without a rank there are no adapters", "adapter.rank=16") for name in NEEDS_RANK),
        ("base", not a.on, "Only frozen matrices are quantised, and everything trains", "adapter.rank=16"),
        ("double_quantised", a.base == "plain", "The base is not quantised", "adapter.base=nf4"),
    ):
        if unread and name in changed:
            raise MeshwrightError("MW-ADPT-001", f"adapter.{name} has no effect", why=why, fix=f"--set {fix}")


def _default(field: str) -> str:
    """The default of a field of [adapter], as --set takes it."""
    value = getattr(Adapter(), field)
    return "''" if value in ((), "") else str(value)


def _no_match(m: ModelShape, field: str, pattern: str, modules: list[str]) -> MeshwrightError:
    """A pattern that names no module, with the words and names that exist."""
    names = list(dict.fromkeys(module.replace(".heads.", ".") for module in modules))
    words = [word for word, meant in WORDS.items() if any(name in names for name in meant)]
    valid = [*([ALL_LINEAR] if field == "targets" else []), *words, *names]
    layer = pattern.startswith("layers.") and not pattern.startswith("layers.*.")
    return MeshwrightError(
        "MW-ADPT-002",
        f"adapter.{field}: '{pattern[:60]}' matches no {'matrix' if field == 'targets' else 'module'} of {m.name}",
        why="All layers of a kind are treated alike: a pattern names a module of a layer, not the layer"
        if layer
        else "",
        valid=closest_first(pattern, valid),
        fix=f"--set adapter.{field}={nearest(pattern, valid)}" if nearest(pattern, valid) else "",
    )
