"""Bugs that a small copy shows only if it is large enough: `verify` finds each of them on the plan of a user.

short runs          with one token in every run of a ring no mask is computed
few micro-batches   the first three, or two for each stage of a pipeline, are right
full rounds         micro-batches that P divides leave no remainder
few stages          two stages of a rank are a first and a last one
all copies          a KV head on every tensor-parallel rank makes its group the whole tp group
"""

import pytest
import torch

import ranks
from meshwright.describe.config import Config
from meshwright.parallel import apply, pipeline
from meshwright.parallel.context import attend as ring
from meshwright.parallel.context import blocks
from meshwright.parallel.data import local_sgd
from meshwright.parallel.mesh import Mesh
from meshwright.proof import prove as proofs


def window_of_a_ring_off_by_one():
    plain = blocks._mask
    blocks._mask = lambda rows, columns, p: plain(rows, columns, p._replace(window=p.window + bool(p.window)))


def whole_blocks_of_a_ring_without_a_window():
    """A block that the window cuts is taken for one that is seen whole."""
    plain = blocks._relation

    def relation(q, k, pattern):
        return plain(q, k, pattern._replace(window=0)) if q.start - k.start > pattern.window else plain(q, k, pattern)

    blocks._relation = relation


def groups_of_kv_copies_strided():
    """Ranks r, r + tp/c, … instead of c neighbours: right where all ranks of a tp group have the same head."""
    plain = Mesh.new_groups

    def strided(self, groups):
        rows = torch.tensor(groups)
        return plain(self, rows.reshape(-1, rows.shape[1], rows.shape[1]).transpose(1, 2).flatten(0, 1).tolist())

    Mesh.new_groups = strided


def other_weights_on_the_third_virtual_stage():
    """From stage 2P on, layers do not have the weights of their position in the model."""
    plain = apply.initialise

    @torch.no_grad()
    def shifted(pieces, weights):
        plain(pieces, weights)
        late = [
            p for p in pieces if p.name.startswith("layers.") and int(p.name.split(".")[1]) >= 4 and p.local.ndim > 1
        ]
        for piece in late:
            piece.local.mul_(0.5)

    apply.initialise = shifted


def averages_every_second_step():
    make = local_sgd.Average.__init__
    local_sgd.Average.__init__ = lambda self, tensors, group, every: make(self, tensors, group, min(every, 2))


def fourth_and_later_micro_batches_dropped():
    run = apply.Parallel.forward_backward

    def short(self, inputs, targets):
        targets = targets.clone()
        targets[3 * self.plan.microbatch :] = -100
        return run(self, inputs, targets)

    apply.Parallel.forward_backward = short


def fifth_and_sixth_micro_batch_swapped():
    run = pipeline.Pipeline.run

    def swapped(self, inputs, targets):
        if self.microbatches > 5:
            parts = list(inputs.chunk(self.microbatches))
            parts[4], parts[5] = parts[5], parts[4]
            inputs = torch.cat(parts)
        return run(self, inputs, targets)

    pipeline.Pipeline.run = swapped


def remainder_of_the_micro_batches_repeated():
    """Micro-batches of an incomplete round are those of the round before."""
    run = pipeline.Pipeline.run

    def repeated(self, inputs, targets):
        rest = self.microbatches % self.stages[0].group_size
        if rest:
            size = len(inputs) // self.microbatches * rest
            inputs = torch.cat((inputs[:-size], inputs[-2 * size : -size]))
        return run(self, inputs, targets)

    pipeline.Pipeline.run = repeated


def fifth_step_of_a_ring_from_the_wrong_rank():
    plain = ring.ring_blocks

    def wrong(block, group, overlaps=True):
        for step, (source, travelled) in enumerate(plain(block, group, overlaps)):
            yield (source + (step >= 5)) % group.size(), travelled

    ring.ring_blocks = wrong


FP32 = {"precision": "fp32"}
TINY = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 24, "vocab": 32}
WINDOW, DEEP = {**TINY, "window": 64}, {**TINY, "layers": 12}
COPIES = {"hidden": 64, "layers": 2, "heads": 16, "kv_heads": 4, "ffn": 64, "vocab": 64}
INTERLEAVED = {"pp": 2, "virtual": 3, "schedule": "interleaved"}
BUGS = [
    ("window_of_a_ring_off_by_one", WINDOW, {"batch": 1, "seq": 512}, {"cp": 4}, "loss"),
    ("fourth_and_later_micro_batches_dropped", TINY, {"batch": 16, "seq": 8}, {"replicate": 2}, "loss"),
    ("whole_blocks_of_a_ring_without_a_window", WINDOW, {"batch": 1, "seq": 512}, {"cp": 4}, "loss"),
    ("groups_of_kv_copies_strided", COPIES, {"batch": 1, "seq": 64}, {"tp": 16}, "gradient"),
    ("other_weights_on_the_third_virtual_stage", DEEP, {"batch": 12, "seq": 8}, INTERLEAVED, "loss"),
    (
        "averages_every_second_step",
        TINY,
        {"batch": 8, "seq": 8, "optimizer": "sgd"},
        {"replicate": 2, "average_every": 8},
        "parameter",
    ),
    ("fifth_and_sixth_micro_batch_swapped", TINY, {"batch": 16, "seq": 8}, {"pp": 2}, "loss"),
    ("remainder_of_the_micro_batches_repeated", DEEP, {"batch": 15, "seq": 8}, {**INTERLEAVED, "virtual": 2}, "loss"),
    ("fifth_step_of_a_ring_from_the_wrong_rank", TINY, {"batch": 1, "seq": 512}, {"cp": 16}, "loss"),
]


@pytest.mark.parametrize(("bug", "model", "work", "plan", "what"), ranks.soak(BUGS))  # `test_fold`: daily
def test_a_small_copy_reaches_the_code_of_the_plan(bug, model, work, plan, what):
    plan = {"param_dtype": "fp32", "master": False, **plan}
    config = Config.from_parts(model, "dgx-h100", workload={**work, **FP32}, plan=plan)
    most = 2 if plan.get("replicate") else 4 if plan.get("cp") == 4 else 8
    proof = proofs.prove(config, ranks=most, steps=2, prepare=f"test_reach:{bug}")
    first = next(b for a in proof.agreements for b in a.breaks)
    assert (proof.passed, first.what) == (False, what)
