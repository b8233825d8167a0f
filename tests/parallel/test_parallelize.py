"""A plan on a user's module gives the same training as one device: losses, gradients, norms and parameters, in float64."""

from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import ranks
from meshwright.errors import MeshwrightError
from meshwright.training.user_module.parallelize import parallelize

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 42,
    "max_position_embeddings": 16,
}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2, "attention_bias": True}),
    "gpt2": ("GPT2LMHeadModel", STILL),
    "mixtral": ("MixtralForCausalLM", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "vit": ("ViTForImageClassification", {"image_size": (6, 10), "patch_size": 2, "num_channels": 1, "num_labels": 3}),
}
BATCH, SEQ, STEPS, BOUND = 4, 8, 2, 1e-11


def wide_norm(part, x):
    """The original computes in float32, which would hide differences in float64."""
    return functional.rms_norm(x, part.weight.shape, part.weight, part.variance_epsilon)


def wide_router(part, x):
    logits = functional.linear(x.reshape(-1, part.hidden_dim), part.weight)
    value, index = torch.topk(torch.softmax(logits, -1), part.top_k, -1)
    return logits, value / value.sum(-1, keepdim=True), index


class Head(nn.Module):
    """An encoder in a user's module, with a parameter besides the layers."""

    def __init__(self, batch_first):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.ones(16))
        self.out = nn.Linear(16, 3)

    def forward(self, x, mask=None):
        return self.out(self.encoder(x * self.scale, mask))


def encoder_table(module):
    from meshwright.parallel.tensor import tables as families

    inside = families.transformer_encoder(module.encoder)
    return [(f"encoder.{p}".rstrip("."), s) for p, s in inside] + [("", "replicated"), ("out", "replicated")]


def made(name):
    torch.manual_seed(0)
    if name in MODELS:
        import transformers

        kind, more = MODELS[name]
        model_class = getattr(transformers, kind)
        model = model_class(model_class.config_class(**{**SIZES, **more}))
        model.set_experts_implementation("eager")  # the other one has no float64
    elif name == "layers":
        blocks = [nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)) for _ in range(4)]
        model = nn.Sequential(nn.Embedding(42, 16), *blocks, nn.Linear(16, 42))
        model[-1].weight = model[0].weight
    else:
        model = Head(batch_first=name == "encoder")
    model = model.double()
    for parameter in model.parameters():  # no bias at zero, no norm at one
        nn.init.normal_(parameter, std=0.3)
    for part in model.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = partial(wide_norm, part)
        if type(part).__name__.endswith("TopKRouter"):
            part.forward = partial(wide_router, part)
    return model


def batch_of(name, step):
    """(inputs, targets, loss) of a global batch."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(42, (BATCH, SEQ), generator=generator)
    if name == "vit":
        pixels = torch.randn(BATCH, 1, 6, 10, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels}, ids[:, 0] % 3
    if name == "layers":
        return ids, ids.roll(-1, 1)
    if name.startswith("encoder"):
        x = torch.randn(BATCH, SEQ, 16, generator=generator, dtype=torch.float64)
        mask = nn.Transformer.generate_square_subsequent_mask(SEQ, dtype=torch.float64)
        y = ids % 3
        return ({"x": x, "mask": mask}, y) if name == "encoder" else ({"x": x.transpose(0, 1), "mask": mask}, y.T)
    return {"input_ids": ids}, ids


def loss_of(output, y):
    """In float64; a Hugging Face model computes its own in float32."""
    output = getattr(output, "logits", output)
    return functional.cross_entropy(output.flatten(0, -2), y.flatten())


def share_of(tree, index, count, dim):
    from meshwright.parallel.user_module.batches import map_tensors

    def cut(t):
        along = next((d for d in (dim, 0) if t.ndim > d and t.shape[d] == BATCH), None)
        return t if along is None else t.chunk(count, along)[index]

    return map_tensors(cut, tree)


@cache
def one_device(name):
    """Losses, norms and gradients of each step, and the parameters after the last."""
    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out = []
    for step in range(STEPS):
        inputs, targets = batch_of(name, step)
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss = loss_of(output, targets)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        optimizer.step()
        optimizer.zero_grad()
        out.append((loss.detach(), norm, gradients))
    return out, {n: v.detach() for n, v in model.state_dict().items()}


def error_of(got, expected, least=1e-3):
    """The error relative to the largest element; for tensors near zero (the gradient of a key's bias) relative to `least`."""
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=least))


def compared(name, plan, options):
    """The largest relative difference from one device, by what differs."""
    model = made(name)
    if torch.distributed.get_rank():  # rank 0's values are broadcast
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    if name.startswith("encoder") and plan.get("tp", 1) > 1:
        options = {**options, "table": encoder_table(model)}
    dim = int(name == "encoder last")
    if plan.get("pp", 1) > 1:
        share = share_of(batch_of(name, 0)[0], 0, BATCH // plan.get("microbatch", 1), dim)
        options = {**options, "example": share}
    make = partial(torch.optim.AdamW, lr=1e-2)
    trained = parallelize(model, plan, optimizer=make, loss=loss_of, **options)
    mesh, errors = trained.mesh, {}
    expected, after = one_device(name)
    for step in range(STEPS):
        inputs, targets = (share_of(t, mesh.index("dp"), mesh.size("dp"), dim) for t in batch_of(name, step))
        loss = trained.backward(inputs, targets)
        errors[f"loss {step}"] = error_of(loss, expected[step][0])
        gradients = trained.gradients()
        for n, gradient in expected[step][2].items():
            errors[f"gradient {n} {step}"] = error_of(gradients[n], gradient)
        errors[f"norm {step}"] = error_of(trained.clip_norm(0.5), expected[step][1])
        trained.update()
    state = trained.state_dict()
    assert list(state) == list(after)
    for n, value in after.items():
        errors[f"parameter {n}"] = error_of(state[n], value)
    trained.load_state_dict({n: torch.zeros_like(v) for n, v in state.items()})
    trained.load_state_dict(state)
    again = trained.state_dict()
    assert all(torch.equal(again[n], v) for n, v in state.items())
    return {what: error for what, error in errors.items() if not error < BOUND}


TWO = [
    ("llama", {"replicate": 2}, {}),
    ("llama", {"shard": 2, "zero": 1, "microbatch": 1}, {}),
    ("llama", {"shard": 2, "zero": 3, "recompute": "full"}, {}),
    ("llama", {"tp": 2, "sp": True, "recompute": "full"}, {}),
    ("llama", {"pp": 2, "microbatch": 1}, {}),
    ("gpt2", {"tp": 2, "sp": True, "microbatch": 2}, {}),
    ("gpt2", {"pp": 2, "microbatch": 2}, {}),
    ("mixtral", {"tp": 2, "sp": True}, {}),
    ("mixtral", {"replicate": 2, "ep": 2}, {}),
    ("mixtral", {"shard": 2, "zero": 3, "ep": 2}, {}),
    ("vit", {"tp": 2, "sp": True}, {}),
    ("vit", {"pp": 2, "microbatch": 2}, {}),
    ("encoder", {"tp": 2}, {}),
    ("encoder last", {"tp": 2, "sp": True, "recompute": "full"}, {}),
    ("encoder", {"pp": 2, "microbatch": 2}, {}),
    ("layers", {"pp": 2, "virtual": 3, "schedule": "interleaved", "microbatch": 1}, {}),
]
FOUR = [
    ("llama", {"tp": 2, "pp": 2, "sp": True, "microbatch": 2, "schedule": "zb-h1"}, {}),
    ("llama", {"tp": 2, "shard": 2, "zero": 2, "sp": True, "microbatch": 1}, {}),
    ("gpt2", {"pp": 2, "shard": 2, "zero": 3, "microbatch": 1}, {}),
    ("mixtral", {"tp": 2, "replicate": 2, "ep": 2, "sp": True}, {}),
    ("encoder", {"replicate": 2, "shard": 2, "zero": 3}, {}),
]


def compared_all(context, cases):
    return [compared(*case) for case in cases]


@cache
def by_rank(world):
    """One set of ranks for all cases: importing transformers takes longer than the training."""
    return ranks.run(world, compared_all, TWO if world == 2 else FOUR)


def title(case):
    return f"{case[0]} {' '.join(f'{k}={v}' for k, v in case[1].items())}"


@pytest.mark.parametrize("case", range(len(TWO)), ids=[title(case) for case in TWO])
def test_two_ranks_equal_one_device(case):
    for rank in by_rank(2):
        assert not rank[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(FOUR)), ids=[title(case) for case in FOUR])
def test_four_ranks_equal_one_device(case):
    for rank in by_rank(4):
        assert not rank[case]


class Scored(nn.Module):
    """Returns its loss, a sum over targets that are not padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Embedding(42, 8), nn.Linear(8, 42)).double()

    def forward(self, ids):
        return functional.cross_entropy(self.layers(ids).flatten(0, 1), ids.flatten(), ignore_index=0, reduction="sum")


def odd_batches(context):
    """Ranks with three samples and one: a mean over all samples, and a sum over tokens with different padding."""
    ids = torch.arange(16).view(4, 4) * 5 % 42
    ids[0, :3] = 0
    mine = ids[:3] if context.rank == 0 else ids[3:]
    out = []
    for reduction in ("mean", "sum"):
        plain = Scored()
        module = Scored() if reduction == "sum" else nn.Sequential(*Scored().layers)
        loss = None if reduction == "sum" else lambda y, ids: functional.cross_entropy(y.flatten(0, 1), ids.flatten())
        trained = parallelize(module, {"replicate": 2}, loss=loss, reduction=reduction)
        got = trained.backward(mine, mine, count=int((mine != 0).sum()))
        whole = plain(ids) / (ids != 0).sum() if reduction == "sum" else loss(plain.layers(ids), ids)
        whole.backward()
        expected = dict(zip(trained.entries, [p.grad for p in plain.parameters()], strict=True))
        gradients = trained.gradients()
        out.append([error_of(got, whole.detach()), *(error_of(gradients[n], g) for n, g in expected.items())])
    return out


def test_batches_of_different_length_are_weighted():
    for rank in ranks.run(2, odd_batches):
        assert max(map(max, rank)) < BOUND


def wide_loss(y, target):
    """In float32: before torch 2.13 the backward of a loss of two dtypes fails."""
    return functional.mse_loss(y.to(torch.float32), target)


def narrow(context, plan):
    """Losses in 16 bits with fp32 masters, and whether ranks agree; the state has the dtype of the masters."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    trained = parallelize(module, plan, optimizer=partial(torch.optim.SGD, lr=0.05), loss=wide_loss, layers="")
    x = torch.linspace(-1, 1, 32).view(4, 8)
    losses = [float(trained.step(x, x.to(torch.float32), clip=1.0)) for _ in range(6)]
    state = trained.state_dict()
    return losses, {str(v.dtype) for v in state.values()}, [v.sum().item() for v in state.values()]


@pytest.mark.parametrize("plan", [{"replicate": 2}, {"shard": 2, "zero": 3}])
@pytest.mark.parametrize("dtype", ["bf16", *ranks.soak(["fp16"])])
def test_sixteen_bits_train_with_wide_copies(plan, dtype):
    exact = ranks.run(2, narrow, plan)[0]
    first, second = ranks.run(2, narrow, {**plan, "param_dtype": dtype})
    assert first == second
    assert first[1] == exact[1] == {"torch.float32"}
    assert first[0][-1] < first[0][0]
    assert abs(first[0][-1] / exact[0][-1] - 1) < 2e-2
    assert first[0] != exact[0]


REFUSED = [
    ({"cp": 2}, {}, r"MW-OWN-001: plan\.cp=2 on a module of your own.* Fix: plan\.cp=1"),
    ({"replicate": 2, "average_every": 2}, {}, r"MW-OWN-001: plan\.average_every=2"),
    ({"shard": 2, "zero": 3, "gather_dtype": "fp8"}, {}, r"MW-OWN-001: plan\.gather_dtype=fp8"),
    ({"recompute": "selective"}, {}, r"MW-OWN-001: plan\.recompute=selective"),
    ({"tp": 2}, {}, "MW-TP-009: tensor parallelism needs a sharding table for Tanh"),
    ({"pp": 2}, {}, "MW-OWN-002: Tanh has no list of layers"),
    ({"pp": 2}, {"layers": "blocks"}, "MW-OWN-002: 'blocks' of Tanh is not a list of layers"),
    ({"replicate": 2}, {"table": [("x.*", "row")]}, r"MW-TP-003: pattern 'x\.\*' of the table matches no module"),
    ({"replicate": 2, "ep": 2}, {}, "MW-EP-002: ep=2, and no row of the table is 'experts'"),
    ({"replicate": 2}, {"reduction": "max"}, "MW-OWN-001: reduction='max'. Valid: mean, sum"),
    ({"replicate": 3}, {}, "MW-MESH-001: the plan needs 3 ranks and 2 were started"),
]


def refusals(context, cases):
    out = []
    for plan, options, _ in cases:
        try:
            parallelize(nn.Tanh(), plan, **options)
        except MeshwrightError as error:
            out.append(str(error))
    return out


def test_unsupported_plans_give_clear_errors():
    import re

    for error, (_, _, words) in zip(ranks.run(2, refusals, REFUSED)[0], REFUSED, strict=True):
        assert re.search(words, error), error


def misuse(context):
    out = []
    with_layers = parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"replicate": 2, "microbatch": 2})
    x = torch.ones(3, 4)
    for attempt in (
        lambda: with_layers.backward(x),
        lambda: with_layers.backward(torch.ones(2, 4)),
        lambda: with_layers.backward({"x": 3}),
        with_layers.update,
        lambda: with_layers.load_state_dict({}),
        lambda: with_layers.load_state_dict({**with_layers.state_dict(), "0.bias": torch.ones(3)}),
        lambda: parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"pp": 2}),
        lambda: parallelize(nn.Linear(4, 4, device="meta"), {"replicate": 2}),
    ):
        try:
            attempt()
        except MeshwrightError as error:
            out.append(str(error))
    return out


def test_misuse_gives_clear_errors():
    errors = ranks.run(2, misuse)[0]
    assert [error[:10] for error in errors] == [
        "MW-OWN-003",
        "MW-OWN-003",
        "MW-OWN-003",
        "MW-OWN-004",
        "MW-OWN-005",
        "MW-OWN-005",
        "MW-OWN-002",
        "MW-OWN-001",
    ]
    assert "a batch of 3 samples does not divide into micro-batches of 2" in errors[0]
    assert "the loss is a tensor of (2, 4), not one number" in errors[1]
    assert "no '0.bias'" in errors[4]
    assert "'0.bias' of (3,), not (4,)" in errors[5]


@pytest.mark.slow
def test_one_process_needs_no_group_and_several_need_torchrun():
    code = """
import torch, meshwright as mw
from torch import nn
try:
    mw.parallelize(nn.Linear(2, 2), {"replicate": 2})
except ValueError as error:
    print(error)
model = mw.parallelize(nn.Linear(2, 2), {}, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD)
print(model(torch.ones(1, 2)).shape, model.step(torch.ones(4, 2), torch.ones(4, 2)).shape)
"""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "MW-OWN-006: a plan for 2 ranks, and no process group" in done.stdout
    assert "torch.Size([1, 2]) torch.Size([])" in done.stdout
