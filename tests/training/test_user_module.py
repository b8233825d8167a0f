"""A user's module trains with the trainer's own pieces: compression, offload, optimizers, and checkpoints that resume on another layout."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional

import ranks
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.variants import OPTIMIZERS
from meshwright.errors import MeshwrightError
from meshwright.training.user_module.parallelize import check_settings, parallelize, updates_differ

ROWS, BOUND = 8, 1e-12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen.copy_(2 * self.norm.bias.detach())
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


TABLE = [
    *((name, "replicated") for name in ("", "embed", "head", "blocks.*.norm")),
    *(("blocks.*.mlp", "region"), ("blocks.*.mlp.0", "column"), ("blocks.*.mlp.2", "row")),
]
TP = {"tp": 2}
ZERO = {"shard": 2, "zero": 3}
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Lamb(torch.optim.SGD):
    """An update as long as its tensor."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad * parameter.norm() / parameter.grad.norm()


class Prodigious(torch.optim.SGD):
    """A step whose length depends on all parameters, as D-Adaptation's does."""

    @torch.no_grad()
    def step(self):
        parameters = self.param_groups[0]["params"]
        length = sum(p.grad.abs().sum() for p in parameters)
        for parameter in parameters:
            parameter -= 0.1 * parameter.grad / length


def loss_of(output, ids):
    return functional.cross_entropy(output.flatten(0, 1), ids.flatten())


def batch(step):
    ids = torch.randint(0, 11, (ROWS, 5), generator=torch.Generator().manual_seed(step))
    return ids, ids.roll(-1, 1)


def built(plan, optimizer=ADAMW):
    torch.manual_seed(0)
    table = TABLE if "tp" in plan else None
    example = batch(0)[0][: plan.get("microbatch", ROWS // 2)]
    module = Net().double()
    return parallelize(
        module, plan, table, optimizer=optimizer, loss=loss_of, example=example, layers="blocks", check=False
    )


def trained(model, steps):
    for step in steps:
        x, y = (t.chunk(model.data_ranks)[model.data_rank] for t in batch(step))
        model.step(x, y, clip=0.5)
    return model.state_dict()


def error(a, b):
    assert list(a) == list(b)
    return max(float((a[n] - v).abs().max()) for n, v in b.items())


def shared_pieces(context, folder):
    """Differences between layouts, by what is compared."""
    out = {}
    plain = trained(built({"replicate": 2}), range(3))
    for offload in ("states", "activations", "both"):
        out[f"offload {offload}"] = error(trained(built({**ZERO, "offload": offload}), range(3)), plain)
    out["reduce each micro-batch"] = error(
        trained(built({"replicate": 2, "reduce": "microbatch", "microbatch": 2}), range(3)), plain
    )
    for kind in ("adamw", "momentum", "muon"):
        options = {"kind": kind, "learning_rate": 1e-2, "warmup": 2}
        exact = trained(built({"replicate": 2}, options), range(3))
        out[f"{kind} under ZeRO"] = error(trained(built(ZERO, options), range(3)), exact)
        out[f"{kind} under tp"] = error(trained(built(TP, options), range(3)), exact)
    for plan, make in ((ZERO, Lamb), (TP, torch.optim.Adafactor), ({"pp": 2, "microbatch": 2}, Prodigious)):
        with pytest.raises(MeshwrightError, match="MW-OWN-011"):
            built(plan, make)
    trained(built({"pp": 2, "microbatch": 2}, Lamb), range(1))
    compressed = {}
    for plan in ({"replicate": 2}, ZERO):
        state = trained(built({**plan, "compression": "int8"}, partial(torch.optim.SGD, lr=1e-2)), range(3))
        exact = trained(built(plan, partial(torch.optim.SGD, lr=1e-2)), range(3))
        compressed[str(plan)] = error(state, exact)
    first = built(ZERO)
    trained(first, range(2))
    with patch.object(distributed, "new_group", wraps=distributed.new_group) as groups:
        for _ in range(2):
            first.save(folder)
    assert groups.call_count == 1
    expected = trained(first, range(2, 4))
    for plan in ({"replicate": 2}, TP, {"pp": 2, "microbatch": 2}, {**ZERO, "offload": "states"}):
        model = built(plan)
        assert model.resume(folder)
        assert model.steps == 2
        out[f"resumed on {plan}"] = error(trained(model, range(2, 4)), expected)
    for optimizer in (partial(torch.optim.RMSprop, lr=1e-2), "momentum"):
        with pytest.raises(MeshwrightError, match="MW-CKPT-008"):
            built(ZERO, optimizer).resume(folder)
    assert not built(ZERO).resume(f"{folder}/none")
    with pytest.raises(MeshwrightError, match=r"MW-OWN-001: optimizer clip=0.5"):
        built(ZERO, {"kind": "adamw", "clip": 0.5})
    return out, compressed


def test_an_optimizer_of_whole_matrices_takes_no_matrix_that_is_cut_in_several_parts():
    for name, kind in OPTIMIZERS.items():
        pieces = [SimpleNamespace(name="qkv", fused=(4, 2, 2))]
        workload, plan = SimpleNamespace(optimizer=name), SimpleNamespace(tp=2)
        module = SimpleNamespace(settings=Optimizer(), pieces=pieces, workload=workload, plan=plan)
        if kind.matrix_states is None:
            check_settings(module)
            continue
        with pytest.raises(MeshwrightError, match=rf"MW-OWN-001: optimizer kind={name} .* tp=2 cuts 'qkv'"):
            check_settings(module)


def test_a_user_module_trains_and_resumes_with_the_shared_pieces(tmp_path):
    for differences, compressed in ranks.run(2, shared_pieces, str(tmp_path / "run"), silence=60):
        assert not {what: e for what, e in differences.items() if not e < BOUND}
        assert all(0 < e < 1e-3 for e in compressed.values()), compressed  # int8 loses something, and little


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Rprop"])
def test_optimizers_of_elements_are_accepted(kind):
    make = partial(getattr(torch.optim, kind), lr=1e-2, weight_decay=0.1) if kind != "Rprop" else torch.optim.Rprop
    assert not updates_differ(make, cut=True)
    assert not updates_differ(make, cut=False)


@pytest.mark.parametrize(
    ("make", "rows", "tensors"),
    [
        (torch.optim.Adafactor, True, False),
        (partial(torch.optim.Muon, lr=0.1), True, False),
        (Lamb, True, False),
        (Prodigious, True, True),
    ],
)
def test_optimizers_of_whole_tensors_are_found(make, rows, tensors):
    assert (updates_differ(make, cut=True), updates_differ(make, cut=False)) == (rows, tensors)
