"""Bugs that a weaker proof would miss: `verify` finds each of them on a plan that a user would give it.

folded to 2        with two ranks the previous rank is the next rank, and the first two stages are the first and the last
two micro-batches  a sum of the last two is the full sum
float32            has neither master weights nor a loss scale
shared code        an emulation that runs the compressor of the ranks repeats its bugs
"""

from dataclasses import replace
from functools import cached_property

import pytest
import torch
from torch import distributed

import ranks
from meshwright.describe.config import Config
from meshwright.parallel import apply
from meshwright.parallel.context import attend as ring
from meshwright.parallel.data import local_sgd
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.numerics import precision
from meshwright.parallel.numerics.compress import base
from meshwright.parallel.tensor import vocabulary
from meshwright.proof import prove as proofs
from meshwright.training import loop
from meshwright.training.optimizer import muon, norm


def ring_takes_blocks_from_the_wrong_rank():
    """Block `me + step` instead of `me − step`."""
    plain = ring.ring_blocks

    def wrong(block, group, overlaps=True):
        for step, (_, travelled) in enumerate(plain(block, group, overlaps)):
            yield (group.rank() + step) % group.size(), travelled

    ring.ring_blocks = wrong


def tied_embedding_summed_over_the_first_two_stages():
    ends = cached_property(lambda self: self.new_groups([list(map(int, row[:2])) for row in self.layout.groups("pp")]))
    ends.__set_name__(Mesh, "ends")
    Mesh.ends = ends

    finish = apply.Parallel.finish_gradients

    def finish_gradients(self):
        finish(self)
        shared = [piece.gradient for piece in self.pieces if piece.box.tied]
        if self.mesh.ends is not None:
            zeros = torch.zeros(self.model.padded_vocab, self.model.hidden, dtype=self.dtype)
            distributed.all_reduce(shared[0] if shared else zeros, group=self.mesh.ends)

    apply.Parallel._sum_tied = lambda self, copies, group: None
    apply.Parallel.finish_gradients = finish_gradients


def loss_of_the_last_two_microbatches_only():
    run, scaled, losses = apply.Parallel.forward_backward, apply.Parallel.scaled_loss, []

    def recorded(self, output, target):
        losses.append(scaled(self, output, target))
        return losses[-1]

    def short(self, inputs, targets):
        losses.clear()
        return run(self, inputs, targets) * 0 + sum(loss.detach().double() for loss in losses[-2:])

    apply.Parallel.scaled_loss, apply.Parallel.forward_backward = recorded, short


def masters_update_matrices_only():
    @torch.no_grad()
    def give(self):
        initial = not hasattr(self, "has_given")  # the initial weights are given whole
        self.has_given = True
        for source, master in zip(self.sources, self.pieces, strict=True):
            if initial or source.local.ndim > 1:
                source.local.copy_(master.local)

    precision.Masters.give_parameters = give


def loss_scale_left_in_vectors():
    plain = loop.unscale
    loop.unscale = lambda pieces, scale: plain([p for p in pieces if p.local.ndim > 1], scale)


def loss_in_the_dtype_of_the_logits():
    vocabulary.at_least_single = lambda dtype: dtype


def norm_in_the_dtype_of_the_gradients():
    norm.at_least_single = lambda dtype: dtype


def rounding_not_fed_back():
    base.Feedback.keep = lambda self, index, error: None


def each_rank_orthogonalises_its_shard():
    """Muon on the rows of a rank, as if they were the matrix."""

    def apply(self, box, function, use, meanwhile):
        meanwhile()
        for i in range(len(self.matrices)):
            shard = box(i)
            use(i, function(shard).to(shard))

    muon.WholeMatrices.apply = apply


def averages_without_token_weights():
    """Local SGD averages replicas without their numbers of tokens."""
    after = local_sgd.Average.after_update
    local_sgd.Average.after_update = lambda self, tokens: after(self, tokens * 0 + 1.0)


def proof_of(bug, model, workload, plan, steps=2, most=8):
    plan = {"param_dtype": workload.get("precision", "bf16"), **plan}
    config = Config.from_parts(model, "dgx-h100", workload=workload, plan=plan)
    return proofs.prove(config, ranks=most, steps=steps, prepare=f"test_hidden_bugs:{bug}")


TINY = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 24, "vocab": 32, "out_bias": True, "ffn_bias": True}


@pytest.mark.slow
def test_a_ring_of_sixteen_is_proved_with_four_ranks():
    workload = {"batch": 1, "seq": 64}
    proof = proof_of("ring_takes_blocks_from_the_wrong_rank", "llama3-8b", workload, {"cp": 16}, most=4)
    assert (proof.passed, proof.blamed, proof.agreements[0].breaks[0].what) == (False, "cp", "loss")


@pytest.mark.slow
def test_a_pipeline_of_sixteen_stages_is_proved_with_four():
    bug, plan = "tied_embedding_summed_over_the_first_two_stages", {"pp": 16}
    proof = proof_of(bug, "llama3.2-1b", {"batch": 32, "seq": 64}, plan, steps=1)
    assert (proof.passed, proof.blamed) == (False, "pp")
    assert proof.agreements[0].breaks[0].name == "embedding.tokens.weight"


def test_eight_micro_batches_are_proved_with_six():
    workload = {"batch": 16, "seq": 8, "precision": "fp32"}
    proof = proof_of("loss_of_the_last_two_microbatches_only", TINY, workload, {"replicate": 2}, steps=1)
    assert (proof.passed, proof.blamed, proof.agreements[0].breaks[0].what) == (False, "micro-batches", "loss")
    assert proof.small.microbatches == (8, 6)


@pytest.mark.parametrize(
    ("bug", "dtype", "plan", "what"),
    [
        ("loss_in_the_dtype_of_the_logits", "bf16", {"tp": 2}, "narrow operation"),
        *ranks.soak(
            [
                ("loss_scale_left_in_vectors", "fp16", {"replicate": 2}, "gradient given to the optimizer"),
                ("masters_update_matrices_only", "bf16", {"replicate": 2}, "parameter (its master, rounded)"),
                (
                    "norm_in_the_dtype_of_the_gradients",
                    "bf16",
                    {"replicate": 2, "grad_dtype": "bf16"},
                    "narrow operation",
                ),
            ]
        ),
    ],
)
def test_a_plan_is_proved_in_its_own_16_bits(bug, dtype, plan, what):
    workload = {"batch": 4, "seq": 8, "precision": dtype}
    proof = proof_of(bug, TINY, workload, {**plan, "param_dtype": dtype}, most=2)
    assert (proof.passed, proof.blamed) == (False, "none: the steps are equal in float64")
    assert [bool(a.breaks) for a in proof.agreements] == [False, False, True, False, False, False]
    first = proof.agreements[2].breaks[0]
    assert (first.dtype, first.what) == (dtype, what)
    assert "norm" in first.name or "bias" in first.name or first.name == "exp"


@pytest.mark.slow  # `test_orthogonal_replay` has faults of Muon every day
def test_muon_on_shards_is_not_muon():
    workload = {"batch": 4, "seq": 8, "precision": "fp32", "optimizer": "muon"}
    plan = {"shard": 2, "zero": 1}
    proof = proof_of("each_rank_orthogonalises_its_shard", TINY, workload, plan, most=2, steps=1)
    first = proof.agreements[0].breaks[0]
    assert (proof.passed, first.what, first.step) == (False, "parameter", 0)
    assert "layers." in first.name


@pytest.mark.slow
def test_a_bug_of_a_compressor_is_not_repeated_by_its_emulation(monkeypatch):
    """The bug is in the ranks and in the reference process, as it would be in the source."""
    plain = proofs.one_device
    monkeypatch.setattr(proofs, "one_device", lambda job, many=(): replace(plain(job, many), prepare=job.prepare))
    workload = {"batch": 4, "seq": 8, "precision": "fp32"}
    proof = proof_of("rounding_not_fed_back", TINY, workload, {"replicate": 2, "compression": "int8"}, most=2)
    assert not proof.passed
    assert (proof.agreements[0].breaks[0].what, proof.agreements[0].breaks[0].step) == ("gradient", 1)


def test_a_failed_proof_of_local_sgd_shows_the_difference():
    workload = {"batch": 8, "seq": 8, "precision": "fp32", "optimizer": "sgd"}
    plan = {"replicate": 2, "average_every": 2}
    proof = proof_of("averages_without_token_weights", TINY, workload, plan, most=2)
    assert (proof.passed, proof.blamed, proof.agreements[0].breaks[0].what) == (False, "replicate", "parameter")
