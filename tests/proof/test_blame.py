"""`verify` on bugs of the corpus: it fails, and names the axis and the tensor."""

import bugs
import pytest
import torch
from torch import distributed

import ranks
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.parallel.data import buckets
from meshwright.proof.prove import blame, prove

MODEL = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 24, "vocab": 32, "out_bias": True, "ffn_bias": True}
WORKLOAD = {"batch": 4, "seq": 8, "precision": "fp32"}


def wasted_all_reduce():
    """Training is correct, but a collective is issued that is not in the plan."""
    finish = buckets.Buckets.finish

    def wasteful(self):
        finish(self)
        if self.group is not None:
            distributed.all_reduce(torch.zeros(1000), group=self.group)

    buckets.Buckets.finish = wasteful


def proof_of(plan, bug, **model):
    home = "test_blame" if bug in globals() else "bugs" if hasattr(bugs, bug) else "bugs_axes"
    config = Config.from_parts({**MODEL, **model}, "laptop", workload=WORKLOAD, plan={"param_dtype": "fp32", **plan})
    return prove(config, ranks=4, steps=2, prepare=f"{home}:{bug}")


@pytest.mark.parametrize(
    ("bug", "plan", "model", "axis", "what"),
    ranks.soak(  # the corpus shows every day that they are caught, `test_hidden_bugs` that the axis is named
        [
            ("clip_by_local_norm", {"pp": 2}, {}, "pp", "parameter"),
            ("gradient_averaged_twice", {"replicate": 2, "tp": 2}, {}, "replicate", "gradient"),
            ("microbatch_loss_not_divided", {"replicate": 2, "tp": 2}, {}, "micro-batches", "loss"),
            ("bias_on_every_row_parallel_rank", {"replicate": 2, "tp": 2}, {}, "tp", "loss"),
            ("tied_embedding_not_summed", {"pp": 2, "tp": 2}, {"tied": True}, "pp", "gradient"),
            ("loss_normalised_per_rank", {"replicate": 2, "pp": 2}, {}, "replicate", "loss"),
            ("clip_by_local_norm", {"shard": 2, "zero": 3}, {}, "shard", "parameter"),
            ("norms_not_summed_over_sequence", {"tp": 2, "sp": True}, {}, "tp", "gradient"),
        ]
    ),
)
def test_a_classic_bug_is_caught_and_named(bug, plan, model, axis, what):
    proof = proof_of(plan, bug, **model)
    assert not proof.passed
    first = proof.agreements[0].breaks[0]
    assert (proof.blamed, first.what) == (axis, what), str(first)
    assert first.step == 0
    reported = proof.as_dict()["first_break"]
    assert reported["axis"] == axis
    assert reported["rank"] in range(4)
    if what != "loss":
        assert reported["name"]
    if bug == "gradient_averaged_twice":
        assert first.ratio == pytest.approx(0.5)


def test_the_axis_that_differs_on_its_own_is_blamed():
    plan = Plan(replicate=2, tp=2, microbatch=2)
    assert blame(plan, lambda trial: trial.tp > 1) == "tp"
    assert blame(plan, lambda trial: trial.replicate > 1) == "replicate"
    assert blame(plan, lambda trial: True) == "micro-batches"
    assert blame(plan, lambda trial: False) == "replicate × tp"
    assert blame(Plan(pp=2), lambda trial: trial.pp > 1) == "pp"


def test_unexpected_communication_fails_the_proof():
    proof = proof_of({"replicate": 2}, "wasted_all_reduce")
    assert proof.parity
    assert not proof.decisive.communication
    assert not proof.passed
    (row,) = {(r.axis, r.operation) for _, r in proof.rows if r.unexplained}
    assert row == ("replicate", "all_reduce")
