"""A pipeline sends what later stages read beside the output of the layer before: training equals one device's, in float64 to 1e-12."""

from functools import partial

import pytest
import torch
from torch import nn

import ranks
from meshwright.errors import MeshwrightError
from meshwright.parallel.pipeline import receives_integers
from meshwright.training.user_module.parallelize import parallelize

WIDTH, ROWS, STEPS, BOUND = 6, 8, 2, 1e-12


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.product, self.more = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, other=None):
        h = self.norm(x)
        return x + torch.tanh(self.product(h if other is None else h * self.more(other)))


class Net(nn.Module):
    """Four layers between `enter` and `out`."""

    def __init__(self, layer=Layer):
        super().__init__()
        self.enter, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x):
        return self.out(self.run(self.enter(x)))


class UNet(Net):
    """Each layer of the second half reads the output of its mirror image in the first, concatenated and projected between layers."""

    def __init__(self):
        super().__init__()
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def run(self, x):
        skips = []
        for i, layer in enumerate(self.layers):
            if i >= 2:
                x = self.join(torch.cat([x, skips.pop()], -1))
            x = layer(x)
            skips.append(x)
        return x


class LateSkip(Net):
    def run(self, x):
        first = x
        for layer in self.layers:
            x = layer(x)
        return x + first.relu()


class Conditioned(Net):
    """Every layer reads a condition, whose weights start at zero."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        for layer in self.layers:
            nn.init.zeros_(layer.more.weight)

    def forward(self, x):
        condition, x = self.time(x.flip(-1)), self.enter(x)
        for layer in self.layers:
            x = layer(x, condition)
        return self.out(x)


class Attending(nn.TransformerDecoderLayer):
    def __init__(self):
        super().__init__(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(Attending(), 4)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = torch.stack([x, x.flip(-1), x * 0.5], 1)
        return self.out(self.decoder(x[:, :2], self.encoder(x))).mean(1)


class Supervised(Net):
    """Deep supervision: the loss reads every layer."""

    def run(self, x):
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return torch.stack(outputs).mean(0)


class Returning(Layer):
    """Returns a dictionary, with a whole number and its argument beside the activations; changes its input in place."""

    def forward(self, given, other=None):
        x = given["x"].mul_(0.9)
        return {"x": super().forward(x), "sign": (x > 0).long(), "first": given["first"]}


class Dictionaries(Net):
    def __init__(self):
        super().__init__(Returning)

    def run(self, x):
        state, signs = {"x": x * 1.0, "first": x}, 0
        for layer in self.layers:
            state = layer(state)
            signs = signs + state["sign"]
        return state["x"] * signs + state["first"]


MODULES = {c.__name__: c for c in (UNet, LateSkip, Conditioned, EncoderDecoder, Supervised, Dictionaries)}
REFUSED = [] if receives_integers() else ["Dictionaries"]
TWO = [(name, {"pp": 2, "microbatch": 2}) for name in MODULES] + [
    (name, {"pp": 2, "virtual": 2, "schedule": "interleaved", "microbatch": 2}) for name in ("UNet", "EncoderDecoder")
]
FOUR = [
    *((name, {"pp": 4, "microbatch": 2}) for name in ("UNet", "Dictionaries")),
    ("UNet", {"pp": 2, "shard": 2, "zero": 3, "microbatch": 1}),
    ("Conditioned", {"pp": 2, "shard": 2, "zero": 1, "virtual": 2, "schedule": "interleaved", "microbatch": 1}),
    ("LateSkip", {"pp": 2, "replicate": 2, "microbatch": 2, "recompute": "full"}),
]


def made(name):
    torch.manual_seed(0)
    return MODULES[name]().double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64), torch.randn(
        ROWS, 3, generator=generator, dtype=torch.float64
    )


def one_device(name):
    module = made(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    out = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        out.append((loss.detach(), norm))
    return out, module.state_dict()


def compared(name, plan):
    """The largest difference from one device."""
    rows = plan["microbatch"]
    layers = "decoder.layers" if name == "EncoderDecoder" else "layers"
    trained = parallelize(
        made(name),
        plan,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        loss=nn.functional.mse_loss,
        example=batch(0)[0][:rows],
        layers=layers,
    )
    steps, state = one_device(name)
    errors = []
    for step, (loss, norm) in enumerate(steps):
        x, y = (t.chunk(trained.data_ranks)[trained.data_rank] for t in batch(step))
        errors.append(float((trained.backward(x, y) - loss).abs()))
        errors.append(float((trained.clip_norm(0.5) - norm).abs()))
        trained.update()
    now = trained.state_dict()
    return max(errors + [float((now[n] - v).abs().max()) for n, v in state.items()])


def compared_all(context, cases):
    for name in REFUSED:
        with pytest.raises(MeshwrightError, match="MW-PIPE-043: pipeline stage 1 receives integers"):
            compared(name, {"pp": context.world, "microbatch": 2})
    with pytest.raises(MeshwrightError, match=r"'enter' is read by later pipeline stages, and plan.schedule=zb-h1"):
        compared("LateSkip", {"pp": context.world, "microbatch": 1, "schedule": "zb-h1"})
    return [compared(*case) for case in cases]


@pytest.mark.parametrize("world", [2, *ranks.soak([4])])
def test_a_pipeline_with_skips_equals_one_device(world):
    cases = [case for case in (TWO if world == 2 else FOUR) if case[0] not in REFUSED]
    for errors in ranks.run(world, compared_all, cases, silence=60):
        assert not {str(case): e for case, e in zip(cases, errors, strict=True) if not e < BOUND}
