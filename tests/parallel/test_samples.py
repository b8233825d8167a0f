"""Modules and losses that look at the batch as a whole are refused or made exact, and a plan's step is one device's: float64, AdamW with decay."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import ranks
from meshwright.errors import MeshwrightError
from meshwright.parallel.user_module.samples import LossCheck, Trial
from meshwright.training.user_module.parallelize import parallelize

WIDTH, ROWS = 8, 8


class Stack(nn.Module):
    def __init__(self, *middle):
        super().__init__()
        self.enter, self.middle, self.out = nn.Linear(WIDTH, WIDTH), nn.Sequential(*middle), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(self.middle(self.enter(x)).relu())


class Standardised(nn.Module):
    """Batch normalisation under another name, hidden by a weight of zero."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x + self.weight * (x - x.mean(0)) / x.std(0)


class Scaled(nn.Module):
    """A gradient that is divided by its norm over the batch."""

    def forward(self, x):
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda g: g / g.norm())
        return x


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x


class Noisy(nn.Module):
    """Dropout, noise and a random choice per sample."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        keep = torch.rand(len(x), 1, dtype=x.dtype) < 0.5
        return self.drop(x + torch.randn_like(x)) * keep


class Number(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.value


class Counter(nn.Module):
    """Counts its calls: the same for a batch and for its halves, and not for several micro-batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Contrast(Stack):
    """Returns its loss: each sample against all others."""

    def forward(self, x):
        return contrast(super().forward(x), None)


class Unused(Stack):
    """Parameters without a gradient: not used, used without autograd, frozen."""

    def __init__(self):
        super().__init__()
        self.spare, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.constant = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        with torch.no_grad():
            shift = self.constant * 2
        return self.out(self.frozen(self.enter(x)).relu() + shift)


class Sharing(nn.Module):
    """Both pipeline stages use one module and one parameter of the root, and `enter` runs before and after the layers."""

    def __init__(self):
        super().__init__()
        self.enter, self.scale, shared = (
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.ones(WIDTH)),
            nn.Linear(WIDTH, WIDTH),
        )
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), shared, nn.Tanh()) for _ in range(4))

    def forward(self, x):
        hidden = self.enter(x * self.scale)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.enter(hidden) * self.scale + x


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4, momentum=None)
        self.out = nn.Linear(4, WIDTH)

    def forward(self, x):
        return self.out(self.norm(self.convolution(x.view(-1, 1, 2, 4).repeat(1, 1, 2, 1))).relu().mean((2, 3)))


class Cross(nn.Module):
    """A region that takes two tensors, by position or by name."""

    def __init__(self, by_name):
        super().__init__()
        self.by_name, self.encoder, self.query = by_name, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pair = Pair()

    def forward(self, x):
        memory = self.encoder(x).relu()
        return self.pair(self.query(x), memory=memory) if self.by_name else self.pair(self.query(x), memory)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x, memory):
        return self.down(self.up(x) * self.gate(memory).tanh())


def contrast(output, _):
    samples = functional.normalize(output, dim=1)
    return functional.cross_entropy(5 * samples @ samples.T, torch.arange(len(samples)))


def valid_tokens(output, targets):
    """A mean over samples of which some are padding."""
    return functional.cross_entropy(output, torch.where(targets[:, 0] > 0.6, -100, 1))


def batch(rows=ROWS):
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


def built(make):
    torch.manual_seed(3)
    return make().double()


BY_SAMPLE = {
    "plain": [],
    "noise": [Noisy],
    "layer norm": [partial(nn.LayerNorm, WIDTH)],
    "evaluation": [partial(nn.BatchNorm1d, WIDTH)],
}
BY_BATCH = {
    "batch norm": ([partial(nn.BatchNorm1d, WIDTH)], "output", "middle.0"),  # on one sample it raises
    "a norm of another name": ([nn.Tanh, Standardised], "output", "middle.1"),
    "a running mean": ([RunningMean], "buffer middle.0.mean", ""),
    "a gradient's norm": ([Scaled], "gradient enter.weight", ""),
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", BY_SAMPLE)
def test_a_module_that_treats_samples_independently_passes(name, rows):
    module = built(lambda: Stack(*(part() for part in BY_SAMPLE[name]))).train(name != "evaluation")
    before = {n: t.clone() for n, t in module.state_dict().items()}
    assert Trial(module, batch(rows)[0], 0, True, []).problem(gradients=True) == ""
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


def test_a_batch_of_which_a_half_does_not_run():
    trial = Trial(built(lambda: Stack(nn.BatchNorm1d(WIDTH))), batch(2)[0], 0, True, [])
    assert trial.problem(gradients=False).startswith("error ValueError: Expected more than 1 value per channel")
    assert trial.first_module() == ""


@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("name", BY_BATCH)
def test_a_module_that_looks_at_the_batch_is_found(name, rows):
    parts, problem, first = BY_BATCH[name]
    trial = Trial(built(lambda: Stack(*(part() for part in parts))), batch(rows)[0], 0, True, [])
    assert trial.problem(gradients=True) == problem
    assert trial.first_module() == first


LOSSES = {
    "mean": (functional.mse_loss, True, ""),
    "sum": (partial(functional.mse_loss, reduction="sum"), False, ""),
    "noise": (lambda y, t: functional.mse_loss(y + torch.randn_like(y), t), True, ""),
    "sum that is called a mean": (partial(functional.mse_loss, reduction="sum"), True, "not the mean"),
    "mean that is called a sum": (functional.mse_loss, False, 'not the sum.*reduction="mean"'),
    "contrast": (contrast, True, "not the mean"),
    "padding": (valid_tokens, True, 'not the mean.*reduction="sum" and step'),
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_looks_at_the_batch_is_found(name, size):
    loss, mean, words = LOSSES[name]
    check, (output, targets) = LossCheck(size, 0, mean), batch(8)
    targets[:2, 0] = torch.tensor([0.1, 0.2])  # one sample of padding in the first four, none in the first two
    for start in range(0, 8, size):
        check.add(loss, output[start : start + size], targets[start : start + size])
    expected = words if not (name == "padding" and size == 1) else ""
    assert (check.problem is None) == (expected == "")
    if expected:
        with pytest.raises(MeshwrightError, match=f"MW-OWN-008.*{expected}"):
            raise check.problem


TABLE = [
    ("pair.up", "column"),
    ("pair.gate", "column"),
    ("pair.down", "row"),
    ("encoder", "replicated"),
    ("query", "replicated"),
]
REGION = [("pair", "region"), *TABLE]
MSE = functional.mse_loss
EXACT = {
    "batch norm": (lambda: Stack(nn.BatchNorm1d(WIDTH, affine=False)), {"replicate": 2}, {}),
    "batch norm, ZeRO-3, an example": (Images, {"shard": 2, "zero": 3}, {"example": ROWS}),
    "batch norm, recompute": (lambda: Stack(nn.BatchNorm1d(WIDTH)), {"replicate": 2, "recompute": "full"}, {"layers": "middle"}),
    "batch norm, evaluation": (lambda: Stack(nn.BatchNorm1d(WIDTH)).eval(), {"replicate": 2, "microbatch": 2}, {}),
    "a number, ZeRO-3": (lambda: Stack(Number()), {"shard": 2, "zero": 3}, {"example": ROWS}),
    "a number, ZeRO-1": (lambda: Stack(Number()), {"shard": 2, "zero": 1, "microbatch": 1}, {}),
    "a counter": (lambda: Stack(Counter()), {"replicate": 2}, {}),
    "unused": (Unused, {"replicate": 2, "microbatch": 2}, {}),
    "unused, ZeRO-3": (Unused, {"shard": 2, "zero": 3}, {}),
    "a pipeline whose stages share a module and a parameter": (Sharing, {"pp": 2, "microbatch": 2}, {"example": 2, "layers": "layers"}),
    "two tensors in a region": (lambda: Cross(False), {"tp": 2}, {"table": REGION, "example": ROWS}),
    "two tensors by name": (lambda: Cross(True), {"tp": 2, "recompute": "full"}, {"table": REGION}),
}  # fmt: skip
WITHOUT_EFFECT = {
    (case, what) for case in ("batch norm", "batch norm, recompute") for what in ("enter.bias", "middle.0.running_mean")
}
REFUSED = {
    "batch norm, micro-batches": (lambda: Stack(nn.BatchNorm1d(WIDTH)), {"replicate": 2, "microbatch": 2}, {}, "MW-OWN-008: batch normalisation"),
    "batch norm, a pipeline": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), {"pp": 2}, {"example": 4},
        "MW-OWN-008: the output of '1' for a batch"),
    "a counter, micro-batches": (
        lambda: Stack(Counter()), {"replicate": 2, "microbatch": 2}, {}, "MW-OWN-008: forward changes the buffer 'middle.0.calls', once for each of"),
    "a counter, recompute": (
        lambda: Stack(Counter()), {"replicate": 2, "recompute": "full"}, {"layers": "middle"}, "forward changes the buffer .* repetition"),
    "another norm": (lambda: Stack(Standardised()), {"shard": 2, "zero": 3}, {}, "MW-OWN-008: the output of 'middle.0'"),
    "another norm, an example": (lambda: Stack(Standardised()), {"replicate": 2}, {"example": 4}, "MW-OWN-008: the output of 'middle.0'"),
    "a module's contrast": (Contrast, {"replicate": 2}, {"loss": None}, "MW-OWN-008: the output of Contrast .* not the mean"),
    "a contrast": (Stack, {"replicate": 2, "microbatch": 1}, {"loss": contrast}, "MW-OWN-008: the loss of a batch"),
    "two regions": (
        lambda: Cross(False), {"tp": 2}, {"table": [("pair.up", "region"), *REGION]}, "MW-TP-011: the region 'pair.up' is inside the region 'pair'"),
    "no region": (lambda: Cross(False), {"tp": 2}, {"table": TABLE}, "MW-TP-011: 'pair.up' is split by columns.*\"pair\", \"region\""),
    "one of two tensors": (
        lambda: Cross(False), {"tp": 2}, {"table": [*TABLE, ("query", "enter")]}, "MW-TP-011: the gradient of 'encoder.weight' differs"),
    "a table that does not run": (
        lambda: Cross(False), {"tp": 2}, {"table": [r if r[0] != "pair.gate" else ("pair.gate", "replicated") for r in REGION], "example": 4},
        "MW-OWN-009: the divided module does not run: RuntimeError"),
}  # fmt: skip


def trained(make, plan, loss=MSE, table=None, example=0, steps=3, **options):
    """The largest difference of losses and state from one device."""
    inputs, targets = batch()
    optimizer = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    example = inputs[:example] if example else None
    module = parallelize(built(make), plan, table, optimizer=optimizer, loss=loss, example=example, **options)
    plain = built(make)
    updates, errors = optimizer(plain.parameters()), {}
    shares = [t.chunk(module.data_ranks)[module.data_rank] for t in (inputs, targets)]
    for step in range(steps):
        expected = plain(inputs) if loss is None else loss(plain(inputs), targets)
        updates.zero_grad()
        expected.backward()
        updates.step()
        errors[f"loss {step}"] = float((module.step(*shares) - expected.detach()).abs())
    state = module.state_dict()
    return errors | {n: float((state[n] - value).abs().max()) for n, value in plain.state_dict().items()}


def all_trained(context):
    exact = {name: trained(make, plan, **options) for name, (make, plan, options) in EXACT.items()}
    errors = {}
    for name, (make, plan, options, _) in REFUSED.items():
        try:
            trained(make, plan, steps=1, **options)
        except MeshwrightError as error:
            errors[name] = str(error)
    # A refusal is switched off.
    trained(lambda: Stack(Standardised()), {"replicate": 2}, steps=1, example=4, check=False)
    return exact, errors


def test_two_ranks_train_what_one_device_trains_or_refuse():
    import re

    for exact, errors in ranks.run(2, all_trained):
        for name, differences in exact.items():
            # Batch normalisation takes away what the bias before it adds: its gradient is rounding, which AdamW enlarges to
            # anything, and the running mean follows it.
            fixed = {what: error for what, error in differences.items() if (name, what) not in WITHOUT_EFFECT}
            assert not {what: error for what, error in fixed.items() if not error < 1e-12}, name
        assert errors.keys() == REFUSED.keys()
        assert not {name: error for name, error in errors.items() if not re.search(REFUSED[name][-1], error)}
