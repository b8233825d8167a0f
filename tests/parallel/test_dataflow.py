"""Which tensors a pipeline sends between two stages of a module, and the ones that it cannot send, named with their readers."""

import re

import pytest
import torch
from torch import nn

from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.parallel.user_module.stages import StageModule, copy_structure, find_layers, record
from meshwright.parallel.user_module.whole import divided, entries_of, find_routes, stop_caching

WIDTH = 8


class Modulated(nn.Module):
    """Reads a condition. Its weights start at zero: the forward does not show that it does, only the gradient."""

    def __init__(self):
        super().__init__()
        self.product, self.modulation = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x, condition):
        return x + self.product(x) * self.modulation(condition)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.product, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, hidden, mask=None):
        self.auxiliary = hidden.square().mean()
        return self.drop(self.product(hidden)) * mask, mask


class Named(nn.Linear):
    def forward(self, x):
        return {"hidden": super().forward(x)}


def plain():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Stack(nn.Module):
    """Four layers between `enter` and `out`; `run(module, x)` is the forward."""

    def __init__(self, run, layer=plain):
        super().__init__()
        self.run = run
        self.enter, self.time, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x):
        return self.run(self, x)


def through(module, x, *args, between=lambda x: x, **kwargs):
    x = module.enter(x)
    for layer in module.layers:
        x = layer(x, *args, **kwargs)
        x = between(x[0] if isinstance(x, tuple) else x)
    return module.out(x)


def collected(module, x):
    """Outputs of all layers."""
    x, outputs = module.enter(x), []
    for layer in module.layers:
        x = layer(x)
        outputs.append(x)
    return x, outputs


def skip(module, x):
    x = first = module.enter(x)
    for layer in module.layers:
        x = layer(x)
    return module.out(x + first)


def u_net(module, x):
    x, kept = module.enter(x), []
    for layer in module.layers[:2]:
        x = layer(x)
        kept.append(x)
    for layer in module.layers[2:]:
        x = layer(x) + kept.pop()
    return module.out(x)


def dense(module, x):
    outputs = [module.enter(x)]
    for layer in module.layers:
        outputs.append(layer(torch.stack(outputs).sum(0)))
    return module.out(outputs[-1])


def preallocated(module, x):
    x, kept = module.enter(x), torch.zeros(4, *x.shape, dtype=x.dtype)
    for i, layer in enumerate(module.layers):
        x = layer(x)
        kept[i] = x
    return module.out(x), kept


def branch(module, x):
    positive = bool(module.enter(x).mean() > -100)
    return through(module, x) if positive else x


def residual(module, x):
    x = module.enter(x)
    for layer in module.layers:
        x = x + layer(x)
    return module.out(x)


def first_in_place(module, x):
    x = module.layers[0](module.enter(x)).mul_(0.5)
    for layer in list(module.layers)[1:]:
        x = layer(x)
    return module.out(x)


def ordered(*order):
    def run(module, x):
        for i in order:
            x = module.layers[i](x)
        return module.out(x)

    return run


def sharing_a_module():
    shared = nn.Linear(WIDTH, WIDTH)
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), shared)


def changed_skip(module, x):
    """The output of the first layer is changed in place inside the second one, and read at the end."""
    module.layers[1][1].forward = torch.Tensor.tanh_
    module.layers[1][0].forward = lambda x: x
    first = x = module.layers[0](module.enter(x))
    for layer in module.layers[1:]:
        x = layer(x * 1 if layer is not module.layers[1] else x)
    return module.out(x + first)


def named(module, x):
    for layer in module.layers:
        x = layer(x)["hidden"]
    return module.out(x)


def noisy(module, x):
    for i, layer in enumerate(module.layers):
        x = layer(x + torch.randn_like(x) if i == 2 else x)
    return module.out(x)


def through_numpy(module, x):
    copied = torch.from_numpy(module.enter(x).detach().numpy().copy())
    x = module.enter(x)
    for layer in module.layers:
        x = layer(x)
    return module.out(x + copied)


class Counting(nn.Linear):
    """Returns a number that it reads in Python, a whole tensor and a tensor of numbers that `hidden` reads only for large inputs."""

    def __init__(self, number=True):
        super().__init__(WIDTH, WIDTH)
        self.number = number

    def forward(self, x):
        y = super().forward(x)
        return y, bool((y > 100).any()) if self.number else 0, (y > 0).long()


def counted(module, x):
    x, numbers = module.enter(x), []
    for layer in module.layers:
        x, number, _ = layer(x)
        numbers.append(number)
    return module.out(-x if numbers[0] else x)


def hidden(module, x):
    large, x, signs = bool((x > 50).any()), module.enter(x), []
    for layer in module.layers:
        x, _, sign = layer(x)
        signs.append(sign)
    return module.out(x + signs[0] if large else x)


NEEDED = "is on pipeline stage 0, and on stage 1 \\(layers 'layers.2' to 'layers.3'\\) it is needed by "
REFUSED = {
    "attribute of a layer": (
        lambda m, x: through(m, x, torch.ones(WIDTH)) + sum(layer.auxiliary for layer in m.layers), Masked,
        f"a tensor made in 'layers.1' {NEEDED}the output of the module"),
    "a skip that a later layer changes in place": (changed_skip, plain,
        "the output of 'layers.0' is on pipeline stage 0, is changed in place in 'layers.1.1'"),
    "a parameter of another stage": (lambda m, x: through(m, x) @ m.enter.weight[:3], plain, f"parameter 'enter.weight' {NEEDED}"),
    "random numbers": (lambda m, x: through(m, x, torch.rand_like(x)), Masked, "a random tensor drawn in the module's forward"),
    "a branch in Python": (branch, plain, f"'enter' {NEEDED}the module's forward"),
    "numpy": (through_numpy, plain, f"'enter' {NEEDED}the module's forward's Python code"),
    "a number of a layer": (counted, Counting, "'layers.1' returns a number that it reads from a tensor, on pipeline stage 0"),
    "a stage that reads nothing": (lambda m, x: [layer(x) for layer in m.layers][3], plain, "read nothing of the stages before"),
    "reversed": (ordered(3, 2, 1, 0), plain, "MW-OWN-002: layer '3' of 'layers' runs as number 1"),
    "twice": (ordered(0, 1, 1, 2, 3), plain, "MW-OWN-002: layer '1' of 'layers' runs 2 times"),
    "skipped": (ordered(0, 1, 3), plain, "MW-OWN-002: layer '2' of 'layers' does not run"),
}  # fmt: skip
LAST = "layers.1"
SENT = {
    "condition": (lambda m, x: through(m, x, m.time(x)), Modulated, ["time", LAST]),
    "condition by name, after a view and a product": (
        lambda m, x: through(m, x, condition=m.time(x)[None].squeeze(0) * 2), Modulated, ["time", LAST]),
    "skip to the end": (skip, plain, ["enter", LAST]),
    "u-net": (u_net, plain, ["layers.0", LAST]),
    "deep supervision": (lambda m, x: sum(y.mean() for y in collected(m, x)[1]), plain, ["layers.0", LAST]),
    "list of outputs": (collected, plain, ["layers.0", LAST]),
    "preallocated outputs": (preallocated, plain, ["layers.0", LAST]),
    "dense": (dense, plain, ["enter", "layers.0", LAST]),
    "residual between layers": (residual, plain, ["enter", "layers.0", LAST]),
    "code between layers": (lambda m, x: through(m, x, between=lambda y: y * 0.5), plain, [LAST]),
    "in-place code": (lambda m, x: through(m, x, between=lambda y: y.mul_(0.5)), plain, [LAST]),
    "a view between layers": (lambda m, x: through(m, x, between=lambda y: y.flip(0)), plain, [LAST]),
    "dictionaries": (named, lambda: Named(WIDTH, WIDTH), [LAST]),
    "noise between layers, for one stage": (lambda m, x: noisy(m, x), plain, [LAST]),
}  # fmt: skip
LEGAL = {
    "plain": (through, plain),
    "the module's input at the end": (lambda m, x: through(m, x) + x[:, :3], plain),
    "a mask of the inputs, by name, with dropout": (lambda m, x: through(m, x, mask=(x > 0).to(x.dtype)), Masked),
    "a parameter of the root in every layer": (lambda m, x: through(m, x, m.scale * 2), Modulated),
    "a module before and after the layers": (lambda m, x: through(m, x) + m.out(m.enter(x)), plain),
    "noise at the entrance": (lambda m, x: through(m, x + torch.randn_like(x)), plain),
    "in-place code inside a stage": (first_in_place, plain),
    "layers that share a module": (through, sharing_a_module()),
    "a branch on the last stage": (lambda m, x: -y if (y := through(m, x)).mean() > 0 else y, plain),
}


def checked(module, example, layers=None):
    """What `parallelize` checks before it builds two stages."""
    stop_caching(module)
    path, chosen = find_layers(module, layers, needed=True)
    spans = divided(len(chosen), Plan(pp=2), 2)
    seen = record(module, path, chosen, example)
    return find_routes(module, seen, spans, entries_of(module, path, seen, spans), example, check=True)


@pytest.mark.parametrize("name", REFUSED)
def test_a_tensor_that_does_not_cross_is_named(name):
    run, layer, words = REFUSED[name]
    with pytest.raises(MeshwrightError) as error:
        checked(Stack(run, layer).double(), torch.randn(4, WIDTH, dtype=torch.float64))
    assert re.search(words, str(error.value)), error.value


@pytest.mark.parametrize("name", SENT)
def test_what_later_stages_read_is_sent(name):
    run, layer, units = SENT[name]
    found = checked(Stack(run, layer).double(), torch.randn(4, WIDTH, dtype=torch.float64))
    assert [port.unit for port in found.boundaries[1]] == units


@pytest.mark.parametrize("name", LEGAL)
def test_what_every_stage_can_compute_is_legal(name):
    module = Stack(*LEGAL[name]).double()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    state = torch.get_rng_state()
    checked(module, torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert not hasattr(module.layers[0], "auxiliary")


SIZES = {"d_model": 16, "vocab_size": 42, "decoder_start_token_id": 0}
ENCODER_DECODERS = {
    "T5ForConditionalGeneration": ({"d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}, "encoder"),
    "BartForConditionalGeneration": (
        {f"{side}_{n}": v for side in ("encoder", "decoder") for n, v in {"layers": 2, "ffn_dim": 24, "attention_heads": 4}.items()},
        "model.encoder"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_the_memory_of_encoder_decoders_is_sent(kind):
    transformers = pytest.importorskip("transformers")
    more, memory = ENCODER_DECODERS[kind]
    model = getattr(transformers, kind)
    module = model(model.config_class(**SIZES, **more))
    ids = torch.arange(1, 17).view(2, 8)
    found = checked(module, {"input_ids": ids, "labels": ids})
    assert memory in {port.unit for port in found.boundaries[1]}


class Passing(nn.Linear):
    """Returns an argument as it is, beside one that may be missing."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, mask, bias, x):
        y = super().forward(x) + bias
        return y if mask is None else y * mask, bias


def without_mask(module, x):
    mask, x = None if bool((x > 50).any()) else torch.ones_like(x), module.enter(x)
    bias = x.tanh()
    for layer in module.layers:
        x, bias = layer(mask, bias, x)
    return module.out(x)


def two_stages(module, example):
    spans = [range(2), range(2, 4)]
    seen = record(module, "layers", list(module.layers), example)
    crossing = find_routes(module, seen, spans, entries_of(module, "layers", seen, spans), example, check=True)
    first, second = (StageModule(copy_structure(module), seen, spans, i, crossing) for i in range(2))

    def run(inputs):
        first.inputs = second.inputs = inputs
        return second(*first(0))

    return seen, run


def test_data_that_takes_another_way_than_the_example():
    example = torch.randn(4, WIDTH, dtype=torch.float64)
    module = Stack(hidden, lambda: Counting(number=False)).double()
    seen, run = two_stages(module, example)
    assert torch.equal(run(example), module(example))
    with pytest.raises(MeshwrightError, match=r"MW-OWN-007: a tensor that 'layers.0' returns.* is read by aten::add"):
        run(example * 1000)
    with pytest.raises(MeshwrightError, match=r"MW-OWN-003: a micro-batch has an input of \(2, 8\), and the example"):
        seen.check_inputs(example[:2])
    module = Stack(without_mask, Passing).double()
    _, run = two_stages(module, example)
    assert torch.equal(run(example), module(example))
    assert torch.equal(run(example * 1000), module(example * 1000))
