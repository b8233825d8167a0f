"""Document masks: attention does not cross documents, on one device and under every layout."""

from itertools import pairwise

import pytest
import torch

import ranks
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.models import build
from meshwright.models.step_context import within
from meshwright.parallel.context import blocks
from meshwright.parallel.context.attend import tiled_attention
from meshwright.parallel.context.blocks import AttentionPattern, Rectangle, shared_documents
from meshwright.proof.compare import compare
from meshwright.proof.prove import prove
from meshwright.proof.records import Job

SEQ = 24
WORKLOAD = Workload(batch=6, seq=SEQ)
LLAMA = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 50}
MODELS = {
    "llama": Model(**LLAMA, tied=True),
    "gemma": Model(**LLAMA, window=5, full_every=2),
    "bert": Model(**{**LLAMA, "kv_heads": 0}, causal=False, positions="learned", max_positions=SEQ),
    "deepseek": Model(**{**LLAMA, "kv_heads": 0}, attention="mla", q_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=10),
    "drops": Model(**LLAMA, attention_dropout=0.3),
}  # fmt: skip
GATHER, ULYSSES = {"cp_kind": "all-gather"}, {"cp_kind": "ulysses"}
LAYOUTS = [
    ("llama", {"cp": 2, "microbatch": 3}),
    ("gemma", {"cp": 2, **GATHER, "microbatch": 6, "recompute": "full"}),
    ("llama", {"cp": 2, **ULYSSES, "microbatch": 6, "recompute": "selective"}),
    ("drops", {"cp": 2, "microbatch": 6}),
    ("gemma", {"tp": 2, "sp": True, "microbatch": 6}),
    ("gemma", {"pp": 2, "microbatch": 3}),
    ("llama", {"cp": 2, "pp": 2, "microbatch": 2}),
]
LAYOUTS_IN_SOAK = [
    ("gemma", {"cp": 2, "microbatch": 6}),
    ("bert", {"cp": 2, "microbatch": 3}),
    ("deepseek", {"cp": 2, "microbatch": 6}),
    ("llama", {"cp": 2, **GATHER, "microbatch": 3}),
    ("gemma", {"cp": 2, **ULYSSES, "microbatch": 6}),
    ("drops", {"cp": 2, **ULYSSES, "microbatch": 6}),
    ("gemma", {"tp": 2, "microbatch": 3, "recompute": "selective"}),
    ("llama", {"pp": 2, "microbatch": 2, "schedule": "zb-h1"}),
    ("llama", {"replicate": 2, "microbatch": 3}),
    ("llama", {"shard": 2, "zero": 3, "microbatch": 1}),
    ("gemma", {"cp": 2, "tp": 2, "sp": True, "microbatch": 3}),
    ("llama", {"cp": 2, **ULYSSES, "replicate": 2, "microbatch": 3}),
    ("llama", {"cp": 4, "microbatch": 3}),
]


def job_of(name, plan):
    return Job(MODELS[name], plan, WORKLOAD, steps=2, dtypes=("fp64",), documents=True)


def record_all(context, jobs):
    """The traces of the jobs on this rank, one after the other."""
    from torch import distributed

    from meshwright.proof.trace import record_one

    out = []
    for job in jobs:
        out.append(record_one(context, job, "fp64"))
        distributed.barrier()
        for group in list(distributed.distributed_c10d._world.pg_map):
            if group is not distributed.group.WORLD:
                distributed.destroy_process_group(group)
    return out


def differences(world, layouts):
    chosen = [(name, Plan(**fields)) for name, fields in layouts if Plan(**fields).world == world]
    by_rank = ranks.run(world, record_all, [job_of(name, plan) for name, plan in chosen])
    names = sorted({name for name, _ in chosen})
    ones = ranks.run(1, record_all, [job_of(name, Plan(microbatch=WORKLOAD.batch)) for name in names])[0]
    for i, (name, plan) in enumerate(chosen):
        yield name, plan.title(), compare(ones[names.index(name)], [rank[i] for rank in by_rank])


@pytest.mark.parametrize(
    ("world", "layouts"), [(2, LAYOUTS), (4, LAYOUTS), *ranks.soak([(2, LAYOUTS_IN_SOAK), (4, LAYOUTS_IN_SOAK)])]
)
def test_a_layout_with_documents_trains_what_one_device_trains(world, layouts):
    for name, title, agreement in differences(world, layouts):
        assert not agreement.breaks, (name, title, [str(b) for b in agreement.breaks[:3]])
        assert all(error < 1e-11 for error in agreement.errors.values()), (name, title, agreement.errors)


@pytest.mark.parametrize("name", ["llama", "gemma", "deepseek"])
def test_a_document_trains_as_if_it_stood_alone(name):
    torch.manual_seed(0)
    model = build(MODELS[name], range(2)).double().to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(0, 50, (1, SEQ))
    starts = [0, 3, 11, SEQ]
    documents = torch.tensor([[sum(at >= start for start in starts) for at in range(SEQ)]])
    with within(documents_BS=documents):
        packed = model(ids)
    for start, stop in pairwise(starts):
        torch.testing.assert_close(packed[:, start:stop], model(ids[:, start:stop]), rtol=0, atol=1e-12)
    assert not torch.allclose(packed, model(ids))
    with within(documents_BS=torch.zeros(1, SEQ, dtype=torch.int32)):
        one_document = model(ids)
    torch.testing.assert_close(one_document, model(ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tile", [1, 7 * SEQ, 1 << 24])
@pytest.mark.parametrize("pattern", [(True, 0), (False, 0), (True, 4), (False, 4)])
def test_tiles_of_documents_equal_the_plain_formula(monkeypatch, tile, pattern):
    monkeypatch.setattr(blocks, "TILE", tile)
    random = torch.Generator().manual_seed(1)
    whole = [torch.randn(3, n, SEQ, 8, generator=random, dtype=torch.float64) for n in (4, 2, 2)]
    documents = (torch.rand(3, SEQ, generator=random) < 0.2).cumsum(1)
    documents[0] = 0
    ours, plain = ([x.clone().requires_grad_() for x in whole] for _ in range(2))
    out = tiled_attention(*ours, AttentionPattern(*pattern, documents))
    q, k, v = plain
    distance = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    seen = (documents[:, :, None] == documents[:, None, :])[:, None]
    seen = seen & (distance >= 0) if pattern[0] else seen
    seen = seen & (distance.abs() < pattern[1]) if pattern[1] else seen
    scores = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~seen, -torch.inf)
    expected = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    gradient = torch.randn(out.shape, generator=random, dtype=torch.float64)
    out.backward(gradient)
    expected.backward(gradient)
    for a, b in ((out, expected), *((a.grad, b.grad) for a, b in zip(ours, plain, strict=True))):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_kernel_runs_only_inside_one_document():
    """A fused kernel has no argument for documents: it gets the blocks that lie inside one document of every sample."""
    documents = torch.tensor([[0] * 8 + [1] * 8, [0] * 8 + [2] * 8])
    runs = (range(16),)
    for rows, columns, shared in ((0, 0, "all"), (8, 8, "all"), (8, 0, "none"), (4, 4, "some")):
        part = Rectangle(slice(rows, rows + 8), slice(columns, columns + 8), "all")
        assert shared_documents(part, runs, runs, AttentionPattern(True, 0, documents)) == shared
        assert shared_documents(part, runs, runs, AttentionPattern(True)) == "all"


def forget_documents():
    """Ring attention does not see the document numbers."""
    from meshwright.parallel.context import sequence

    plain = sequence.pattern_of
    sequence.pattern_of = lambda *a: plain(*a)._replace(documents_BS=None)


@pytest.mark.parametrize("prepare", ["", "test_documents:forget_documents"])
def test_verify_proves_a_plan_with_its_document_masks(prepare):
    data = {"path": "tokens", "document_mask": True}  # a proof does not read the tokens
    config = Config.from_parts(LLAMA, "laptop", workload={"batch": 4, "seq": SEQ}, plan={"cp": 2}, data=data)
    assert prove(config, ranks=2, steps=1, prepare=prepare).passed == (not prepare)
