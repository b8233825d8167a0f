"""Padding that begins after the first step: a mean over valid targets is weighted by them, any other loss that looks at them is refused."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import ranks
from meshwright.errors import MeshwrightError
from meshwright.parallel.user_module.samples import mean_over
from meshwright.training.user_module.parallelize import parallelize

ROWS, LENGTH, CLASSES = 8, 4, 6


def tokens(output, targets, **options):
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), **options)


def with_penalty(output, targets):
    return tokens(output, targets) + 0.1 * output.square().mean()


def own_padding(output, targets):
    """Class 0 is padding, which only this function knows."""
    return tokens(output, targets, ignore_index=0)


def of_samples(output, targets):
    """The mean over samples of sums over valid tokens."""
    return tokens(output, targets, reduction="sum") / len(output)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x):
        return self.layers(x)


class Labelled(Words):
    """Returns its own loss, as Hugging Face's models do."""

    def forward(self, x, labels):
        return tokens(self.layers(x), labels)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(CLASSES, 2, batch_first=True)

    def forward(self, x, mask):
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


@pytest.mark.parametrize(
    ("loss", "over"),
    [
        (tokens, "targets"),
        (of_samples, "samples"),
        (with_penalty, ""),
        (nn.CrossEntropyLoss(ignore_index=3), "targets"),
        (lambda y, t: y.gather(-1, t[..., None]).mean(), ""),  # -100 is no index
        (lambda y, t: (y.log().flatten(0, 1) * (t.flatten() != -100)[:, None]).mean(), "samples"),
    ],
)
@pytest.mark.parametrize("rows", [1, 4])
def test_what_a_loss_is_a_mean_over(loss, over, rows):
    output, targets = torch.zeros(rows, LENGTH, CLASSES, dtype=torch.float64), torch.full((rows, LENGTH), -100)
    if isinstance(loss, nn.Module):
        output, targets = output.flatten(0, 1), targets.flatten()
    assert mean_over(loss, output, targets, 0) == over


def targets_of(step, pad):
    generator = torch.Generator().manual_seed(step)
    targets = torch.randint(1, CLASSES, (ROWS, LENGTH), generator=generator)
    if step:
        targets[1, 1:] = targets[6] = targets[2] = pad  # two of one sample each: one micro-batch without a valid target
    return targets


def trained(make, plan, loss=tokens, pad=-100, steps=4, **options):
    """The largest difference from one device, in losses and state."""
    torch.manual_seed(0)
    plain = make().double()
    torch.manual_seed(0)
    optimizer = partial(torch.optim.SGD, lr=0.5)
    x = torch.rand(ROWS, LENGTH, CLASSES, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    if plan.get("pp", 1) > 1:
        options |= {"example": x[: plan["microbatch"]], "layers": "layers"}
    module = parallelize(make().double(), plan, optimizer=optimizer, loss=loss, **options)
    updates, errors = optimizer(plain.parameters()), []
    for step in range(steps):
        targets = targets_of(step, pad)
        expected = plain(x, targets) if loss is None else loss(plain(x), targets)
        updates.zero_grad()
        expected.backward()
        updates.step()
        mine, goals = (t.chunk(module.data_ranks)[module.data_rank] for t in (x, targets))
        got = module.step((mine, goals)) if loss is None else module.step(mine, goals)
        errors.append(abs(float(got - expected)))
    state = module.state_dict()
    return max(*errors, *(float((state[n] - v).abs().max()) for n, v in plain.state_dict().items()))


def masked(plan, **options):
    module = parallelize(Masked().double(), plan, loss=functional.mse_loss, **options)
    x, mask = torch.rand(ROWS, ROWS, CLASSES, dtype=torch.float64), torch.ones(ROWS, ROWS).tril() == 0
    module.backward((x, mask), x)


EXACT = {
    "replicas": ({"replicate": 2}, {}),
    "micro-batches of one sample, ZeRO-3": ({"shard": 2, "zero": 3, "microbatch": 1}, {}),
    "a pipeline": ({"pp": 2, "microbatch": 1}, {}),
    "a mean over samples": ({"replicate": 2, "microbatch": 2}, {"loss": of_samples}),
}
MASK = torch.ones(ROWS, ROWS).tril() == 0
REFUSED = {
    "a penalty": (partial(trained, Words, loss=with_penalty), {"replicate": 2}, {}, "MW-OWN-008: micro-batches have different numbers"),
    "a module's own loss": (partial(trained, Labelled, loss=None), {"replicate": 2}, {}, 'MW-OWN-008: micro-batches have.*reduction="sum"'),
    "padding that only the loss knows": (
        partial(trained, Words, loss=own_padding, pad=0), {"replicate": 2}, {}, "MW-OWN-008: the loss of a batch.*not the mean"),
    "a mask as long as the batch": (masked, {"replicate": 2, "microbatch": 2}, {}, r"MW-OWN-003: an input of \(8, 8\)"),
    "a mask that would be broadcast": (
        masked, {"replicate": 2, "microbatch": 1},
        {"example": (torch.rand(1, ROWS, CLASSES, dtype=torch.float64), MASK)}, r"MW-OWN-003: an input of \(8, 8\)"),
}  # fmt: skip


def all_cases(context):
    exact = {name: trained(Words, plan, **options) for name, (plan, options) in EXACT.items()}
    errors = {}
    for name, (run, plan, options, _) in REFUSED.items():
        try:
            run(plan, **options)
        except MeshwrightError as error:
            errors[name] = str(error)
    return exact, errors


def test_two_ranks_train_with_padding_what_one_device_trains_or_refuse():
    for exact, errors in ranks.run(2, all_cases):
        assert not {name: error for name, error in exact.items() if not error < 1e-13}
        assert not {
            name: errors.get(name) for name, row in REFUSED.items() if not re.search(row[-1], errors.get(name, ""))
        }
