"""The operations that are timed on a device, forward and backward where they have one: parts of a transformer layer, linear layers,
attention, the optimizer.

Operations run in a chain, so that several of them share the cost of starting a backward.

A chain of transformer layers of fixed sizes, forward and backward, with room for a collective where tensor parallelism has one.

Operations that are timed one by one are too fast to predict a training step. In a layer no operation follows itself: each finds caches, and
branches of the processor, that other operations have used. Around the operations are modules, views and saved tensors, which take the
host's time and start no kernel. So a calibration also times whole layers, built as the trainer builds them (`models.transformer`), at sizes
listed in `device.LAYERS`, before any model is known; what they take beyond their operations becomes two factors (`device_fit`).

    x + attention(norm(x)),  then  x + ffn(norm(x))          heads of 16, half as many of keys and values, FFN twice as wide

`Between` is called before and after attention and FFN: in backward of their input and in forward of their output, the four places of a
layer in which tensor parallelism communicates.

What is timed where the host computes: parts of layers, linear layers, attention, whole layers, the optimizer, and ZeRO units.

Each operation runs forward and backward through autograd, small and large, because a small training spends most of its time in the host's
work per operation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed, nn
from torch.nn import functional as F

from meshwright.calibrate.device_fit import layer_model
from meshwright.models.attention import Geometry, rotate
from meshwright.models.loss import cross_entropy
from meshwright.models.transformer import Layer

CHAIN = 4  # operations of one kind in a row

Call = Callable[[], object]


class MeasuredCase(NamedTuple):
    """One operation to time: its kind, its sizes, how many of them one call runs, and the call."""

    kind: str
    shape: Mapping[str, float]
    repeats: int
    call: Call
    dtype: str = ""  # if it is not that of the measurement


def part_call(part: str, dtype: torch.dtype, tokens: int, width: int) -> Call:
    """Forward and backward of a chain of one part of a transformer layer."""
    x = torch.randn(1, tokens, width, dtype=dtype, requires_grad=True)
    start = torch.randn(1, tokens, width, dtype=dtype)
    if part == "loss":
        target = torch.zeros(tokens, dtype=torch.long)

        def loss() -> None:
            cross_entropy(x * 1.0, target).backward()

        return loss
    if part == "norm":
        return _chain_call(x, [nn.RMSNorm(width, dtype=dtype) for _ in range(CHAIN)], start)
    steps: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "activation": lambda y: F.silu(y) * y,
        "residual": lambda y: y + x,
        "rotation": _rotation(tokens, width, dtype),
    }
    return _chain_call(x, [steps[part]] * CHAIN, start)


def _chain_call(x: torch.Tensor, steps: Sequence[Callable[[torch.Tensor], torch.Tensor]], start: torch.Tensor) -> Call:
    """Forward through the steps, one after the other, and backward from the gradient `start` of the last output."""

    def run() -> None:
        y = x
        for step in steps:
            y = step(y)
        y.backward(start)

    return run


def _rotation(tokens: int, width: int, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Queries and keys of heads of 16, rotated as RoPE does; their halves of the width are adjacent again afterwards."""
    cosine, sine = torch.randn(2, tokens, 16, dtype=dtype)

    def step(y: torch.Tensor) -> torch.Tensor:
        heads = y.view(1, -1, tokens, 16)
        queries, keys = (rotate(heads, cosine, sine, interleaved=False) for _ in range(2))
        return (queries + keys).view_as(y)

    return step


def linear_call(dtype: torch.dtype, m: int, n: int, k: int) -> Call:
    """Forward and backward of linear layers k → n → k → …; weight gradients accumulate."""
    sizes = [(k, n), (n, k)] * (CHAIN // 2)
    layers = [nn.Linear(a, b, bias=False, dtype=dtype) for a, b in sizes]
    for layer in layers:
        layer.weight.grad = torch.zeros_like(layer.weight)
    x = torch.randn(1, m, k, dtype=dtype, requires_grad=True)
    return _chain_call(x, layers, torch.randn(1, m, sizes[-1][1], dtype=dtype))


def attention_call(dtype: torch.dtype, batch: int, heads: int, seq: int, width: int, device: str = "cpu") -> Call:
    """Forward and backward of causal attention, twice, with the reshapes into heads and back."""
    shape = (batch, seq, heads * width)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    start = torch.randn(shape, dtype=dtype, device=device)

    def attend(x: torch.Tensor) -> torch.Tensor:
        in_heads = [y.unflatten(-1, (heads, width)).transpose(1, 2) for y in (x, k, v)]
        mixed = F.scaled_dot_product_attention(in_heads[0], in_heads[1], in_heads[2], is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    return _chain_call(q, [attend] * 2, start)


def tile_call(dtype: torch.dtype, batch: int, heads: int, seq: int, width: int) -> Call:
    """Attention to one block of keys in torch operators, forward and backward, outside autograd: scores, log-sum-exp, probabilities, the
    merge with an earlier block, and the gradients."""
    shape, scale = (batch, heads, seq, width), width**-0.5
    q, k, v, grad = (torch.randn(shape, dtype=dtype) for _ in range(4))
    hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    before, merged = torch.randn(shape[:-1], dtype=dtype), torch.randn(shape, dtype=dtype)

    @torch.no_grad()
    def run() -> None:
        rows = slice(0, seq)
        scores = q[:, :, rows].mul(scale) @ k[:, :, rows].transpose(-1, -2)
        scores.masked_fill_(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        probability = scores.sub_(lse.unsqueeze(-1)).exp_()
        output = (probability @ v[:, :, rows]).reshape(shape)
        after = torch.logaddexp(before, lse)
        weight = (before - after).exp_().unsqueeze(-1)
        (merged[:, :, rows] * weight).add_(output * (lse - after).exp_().unsqueeze(-1))
        delta = (grad * output).sum(-1)
        ds = grad[:, :, rows] @ v[:, :, rows].transpose(-1, -2)
        ds.sub_(delta.unsqueeze(-1)).mul_(probability).mul_(scale)
        gradients = ds @ k, ds.transpose(-1, -2) @ q, probability.transpose(-1, -2) @ grad
        for gradient in gradients:
            gradient.reshape(shape)[:, :, rows].add_(gradient)

    return run


def count_operators(call: Call) -> float:
    """Torch operators that a call dispatches, views included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return operator(*args, **(kwargs or {}))

    with Counter() as counter:
        call()
    return float(counter.count)


def update_call(values: list[torch.Tensor], fused: bool | None = None) -> Call:
    """The norm of the gradients, clipping and AdamW, tensor by tensor as the training loop runs them."""
    parameters = [nn.Parameter(value) for value in values]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=fused)

    def update() -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm([g.to(g.dtype) for g in gradients])
        factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for g in gradients:
            g.mul_(factor)
        optimizer.step()

    return update


CALLS_PER_LAYER = 4  # of `Between`


class Between(Protocol):
    """The operation of a chain between two parts of a layer: in the forward of the given tensor, or in its backward."""

    def __call__(self, x: torch.Tensor, in_backward: bool) -> torch.Tensor: ...


def unchanged(x: torch.Tensor, in_backward: bool) -> torch.Tensor:
    return x


def layers_call(
    dtype: torch.dtype, tokens: int, width: int, sequences: int, layers: int = 1
) -> Callable[[Between], None]:
    """Forward and backward of some layers on `sequences` that have `tokens` together; weight gradients accumulate."""
    model = layer_model(width, tokens // sequences)
    geometry = Geometry(model)
    chain = [Layer(model, geometry, 0).to(dtype) for _ in range(layers)]
    for layer in chain:
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
    shape = (sequences, tokens // sequences, width)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    start = torch.randn(shape, dtype=dtype)

    def run(between: Between) -> None:
        y = x
        for layer in chain:
            attended = layer.attention(between(layer.attention_norm(y), in_backward=True))
            y = y + layer.attention_drop(layer.attention_post_norm(between(attended, in_backward=False)))
            fed = layer.ffn(between(layer.ffn_norm(y), in_backward=True))
            y = y + layer.ffn_drop(layer.ffn_post_norm(between(fed, in_backward=False)))
        y.backward(start)

    return run


UNIT_PARAMETERS = 9  # of a ZeRO unit: as many as a transformer layer with gated FFN and without biases
SMALL, MIDDLE, LARGE = {"tokens": 4, "width": 16}, {"tokens": 128, "width": 64}, {"tokens": 512, "width": 256}
PARTS = ("norm", "activation", "residual", "rotation", "loss")
LINEARS = ((64, 32, 32), (64, 64, 64), (256, 64, 64), (256, 64, 192), (128, 64, 512), (512, 256, 256), (256, 512, 512))
ATTENTIONS = ((1, 1, 8, 8), (2, 4, 64, 16), (1, 4, 256, 16), (1, 4, 128, 64))
TILES = ((2, 2, 8, 8), (4, 4, 16, 16))
LAYERS = ((32, 32, 1), (160, 48, 5), (192, 96, 3), (384, 128, 2))  # tokens, width and sequences of whole layers
UPDATES = ((16, 64), (16, 16384))
PRODUCT, COPIED, LAUNCHES = (512, 512, 512), 2**26, 1000  # of `rate_cases`: m, n, k; bytes; operators in a row
SELECTED_FROM = 2**20  # elements, of which a top-k keeps one in a hundred


def cpu_cases(dtype: torch.dtype) -> Iterator[MeasuredCase]:
    for part in PARTS:
        for size in (SMALL, MIDDLE, LARGE):
            repeats = 1 if part == "loss" else CHAIN
            yield MeasuredCase(part, {k: float(v) for k, v in size.items()}, repeats, part_call(part, dtype, **size))
    for m, n, k in LINEARS:
        yield MeasuredCase("linear", {"m": m, "n": n, "k": k}, CHAIN, linear_call(dtype, m, n, k))
    for batch, heads, seq, width in ATTENTIONS:
        shape = {"batch": batch, "heads": heads, "seq": seq, "width": width}
        yield MeasuredCase("attention", shape, 2, attention_call(dtype, batch, heads, seq, width))
    for tokens, width, sequences in LAYERS:
        layers = partial(layers_call(dtype, tokens, width, sequences, CHAIN), unchanged)
        sizes = {"tokens": float(tokens), "width": float(width), "sequences": float(sequences)}
        yield MeasuredCase("layer", sizes, CHAIN, layers)
    for batch, heads, seq, width in TILES:
        tile = tile_call(dtype, batch, heads, seq, width)
        sizes = {"batch": float(batch), "heads": float(heads), "seq": float(seq), "width": float(width)}
        yield MeasuredCase("tile", {**sizes, "operators": count_operators(tile)}, 1, tile)
    state, name = (dtype, "") if dtype.itemsize > 2 else (torch.float32, "fp32")  # masters and summed gradients
    values = torch.randn(SELECTED_FROM, dtype=state)
    kept = SELECTED_FROM // 100
    yield MeasuredCase("top-k", {"elements": SELECTED_FROM}, 1, lambda: values.abs().topk(kept, sorted=False), name)
    for tensors, elements in UPDATES:
        plain = [torch.randn(elements, dtype=state) for _ in range(tensors)]
        yield MeasuredCase("optimizer", {"tensors": tensors, "elements": elements}, 1, update_call(plain), name)
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        yield from sharded_cases(dtype)


def rate_cases(dtype: torch.dtype) -> Iterator[MeasuredCase]:
    """Rates that `bench` shows and no fit uses: a matrix product, a copy beyond the caches, and the host's time for a single operator."""
    m, n, k = PRODUCT
    a, b, out = (torch.randn(*shape, dtype=dtype) for shape in ((m, k), (k, n), (m, n)))
    yield MeasuredCase("gemm", {"m": m, "n": n, "k": k}, 1, partial(torch.mm, a, b, out=out))
    source = torch.zeros(COPIED, dtype=torch.uint8)
    yield MeasuredCase("copy", {"bytes": float(COPIED)}, 1, partial(torch.empty_like(source).copy_, source))
    little = torch.zeros(16, dtype=dtype)
    yield MeasuredCase("launch", {}, LAUNCHES, partial(repeated, partial(little.add_, 1.0), LAUNCHES))


def repeated(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def sharded_cases(dtype: torch.dtype) -> Iterator[MeasuredCase]:
    """ZeRO units of a few parameters each: with their gathers and reductions, with hooks alone, and the same modules without ZeRO."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # A slice of a larger mesh, as with pipeline or tensor parallelism: torch compares meshes in every operator.
    mesh = init_device_mesh("cpu", (1, distributed.get_world_size()), mesh_dim_names=("stage", "shard"))["shard"]

    def small_unit() -> nn.Module:
        return nn.Sequential(*(nn.Linear(16, 16, bias=False, dtype=dtype) for _ in range(UNIT_PARAMETERS)))

    units, held, plain = (nn.Sequential(*(small_unit() for _ in range(CHAIN))) for _ in range(3))
    for sharded, reshard in ((units, True), (held, False)):
        for unit in sharded:
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(units, mesh=mesh)
    kept = fully_shard(held, mesh=mesh, reshard_after_forward=False)
    x, start = torch.randn(1, 16, 16, dtype=dtype), torch.randn(1, 16, 16, dtype=dtype)
    kept.set_reshard_after_backward(False)  # a micro-batch that neither gathers nor reduces
    kept.set_requires_gradient_sync(False)
    for kind, module in (("sharded-units", units), ("held-units", held), ("plain-units", plain)):
        yield MeasuredCase(kind, {"units": CHAIN}, 1, _chain_call(x, [module], start))
