"""The bytes that a compiled layer saves for backward equal those that `lower.footprint` predicts for our stack on GPUs: bf16 and fp8 products."""

import numpy as np
import pytest
import torch

from meshwright.describe import catalog
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.batch import Batch
from meshwright.lower.footprint import saved
from meshwright.models import build
from meshwright.parallel import compile as compiling
from meshwright.parallel.apply import apply
from meshwright.parallel.numerics import fp8
from meshwright.parallel.pieces import materialise
from meshwright.parallel.tensor.vocabulary import sum_of_losses
from meshwright.training.data.samples import RandomSamples
from meshwright.training.fake_group import fake_group, filled_receives
from meshwright.training.loop import Trainer

MODEL = Model(hidden=64, layers=1, heads=4, kv_heads=2, ffn=160, vocab=96)
TOKENS = 48


@torch.library.custom_op("meshwright_test::scaled_product", mutates_args=())
def scaled_product(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """In place of the GPU's product: the compiler cannot look into it."""
    return (a.to(torch.float32) @ b.to(torch.float32).T * scale).to(torch.bfloat16)


@scaled_product.register_fake
def _(a, b, scale):
    return a.new_empty(len(a), len(b), dtype=torch.bfloat16)


def saving_backend(graphs):
    """A backend that partitions forward from backward as the GPU's does, and appends what each forward saves."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def forward(graph, inputs):
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        graphs.append([node.meta["val"] for node in output.args[0][1:] if node is not None and "val" in node.meta])
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=lambda *a, **k: min_cut_rematerialization_partition(*a, **{"compiler": "inductor", **k}),
        decompositions=select_decomp_table(),
    )


def bytes_of(saved, tokens):
    """Without weights and without what is saved for each token only."""
    tensors = [t for t in saved if isinstance(t, torch.Tensor) and {*t.shape} & tokens and t.dtype != torch.float32]
    storages = {t.untyped_storage()._cdata: t for t in tensors if t.shape != (2, TOKENS, 16)}  # not the angles
    return sum(t.numel() * t.element_size() for t in storages.values())


def predicted_bytes(plan, workload):
    batch = Batch.of([plan], MODEL, workload, Stack(**catalog.entry("stacks", "meshwright")))
    return sum(float(np.sum(size)) for size in saved(batch, MODEL.blocks["dense"], 2.0).values())


def saved_bytes(precision, monkeypatch):
    net = build(MODEL, range(1)).to(torch.bfloat16)
    materialise(net, "cpu")
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.05)
    if precision == "fp8":
        monkeypatch.setattr(fp8, "has_scaled_product", lambda *_: True)
        monkeypatch.setattr(fp8, "device_product", lambda a, b, sa, sb, out, fast=False: scaled_product(a, b, sa * sb))
        fp8.enable_fp8([net.layers["0"]], keeps=True)
        fp8.quantise_weights([net])
    net.geometry.prepare(TOKENS, torch.bfloat16, torch.device("cpu"))
    x = torch.randn(1, TOKENS, MODEL.hidden, dtype=torch.bfloat16, requires_grad=True)
    graphs = []
    torch.compile(net.layers["0"].forward, backend=saving_backend(graphs), dynamic=False)(x)
    return bytes_of(graphs[0], {TOKENS})


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_compiled_layer_saves_what_is_predicted(precision, monkeypatch):
    predicted = predicted_bytes(Plan(), Workload(batch=1, seq=TOKENS, precision=precision))
    assert saved_bytes(precision, monkeypatch) == pytest.approx(predicted, rel=0.02)


def test_a_compiled_layer_saves_its_share_of_a_gathered_sequence(monkeypatch):
    """And backward gathers it again. Before, torch 2.11 saved both gathered inputs of a layer: 3 GiB of the 7.5 of a rank of a 70B model."""
    graphs = []
    monkeypatch.setattr(compiling, "BACKEND", saving_backend(graphs))
    plan = Plan(tp=2, sp=True, microbatch=1)
    workload = Workload(batch=1, seq=TOKENS, precision="bf16")
    with fake_group(0, plan.world), filled_receives():
        parallel = apply(MODEL, plan, workload, 0, dtype=torch.bfloat16, compile="blocks")
        Trainer(parallel, RandomSamples(MODEL, TOKENS, 0, False)).train(1)
    assert bytes_of(graphs[0], {TOKENS, TOKENS // 2}) == pytest.approx(predicted_bytes(plan, workload), rel=0.02)


def test_a_compiled_loss_of_a_split_vocabulary_saves_logits_in_16_bits():
    """And a few numbers per token. Torch's partition once kept the softmax in float32: 2 GiB of 4.9 for a rank with 16,384 tokens."""
    tokens, columns, kept = 24, 80, []

    def remember(x):
        kept.append(x)
        return x

    with fake_group(0, 4):
        group = torch.distributed.group.WORLD
        loss = torch.compile(lambda z, t: sum_of_losses(z, t, 0, group), backend="aot_eager_decomp_partition")
        logits = torch.randn(2, tokens // 2, columns, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(0, columns, (2, tokens // 2))
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
            loss(logits * 1, targets)
    wide = [x for x in kept if x.numel() > 2 * tokens]
    assert [(x.dtype, x.numel()) for x in wide] == [(torch.bfloat16, tokens * columns)]
