"""Complete proofs: large plans are folded, issued collectives equal lowered ones, and the exit code of the command."""

import json

import pytest

from meshwright import api
from meshwright.cli import main
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.proof.page import page
from meshwright.proof.phases import EVALUATION, RESUME
from meshwright.proof.prove import FORMULAS, copy_job, prove, prove_copy
from meshwright.proof.small import small_copy
from meshwright.view.tables import console
from ranks import soak

PLAN = """
model = "tiny"
cluster = "laptop"
[workload]
batch = 8
seq = 16
precision = "fp32"
[plan]
replicate = 2
microbatch = 2
param_dtype = "fp32"
master = false
"""


PIPELINE = {"pp": 4, "virtual": 2, "schedule": "interleaved"}


@pytest.mark.parametrize(("axes", "ranks", "folded"), [({}, 4, [2, 1, 4]), *soak([(PIPELINE, 8, [2, 2, 4, 1])])])
def test_a_large_plan_is_folded_and_proved(axes, ranks, folded):
    plan = {"tp": 8, "sp": True, "replicate": 16, "recompute": "selective", "microbatch": 64, **axes}
    config = Config.from_parts("llama3-70b", "dgx-h100", workload={"batch": 1024}, plan=plan)
    proof = prove(config, ranks=ranks, steps=2)
    assert proof.passed
    assert [copy.small.plan.world for copy in proof.copies] == [ranks] * len(folded)
    assert all(copy.communication for copy in proof.copies)
    assert proof.convergence == {}  # an exact plan has no loss to compare with that of exact arithmetic
    for copy in proof.copies:
        assert all(error < 1e-11 for error in copy.agreements[0].errors.values())
    assert [a.label for a in proof.agreements] == ["fp64", "fp32", "bf16", "formulas", EVALUATION, RESUME]
    assert 1e-9 < proof.agreements[1].errors["gradient"] < 1e-4
    assert 1e-4 < proof.agreements[2].errors["gradient"] < 0.5
    found = proof.as_dict()
    json.dumps(found, allow_nan=False)
    assert found["plan"] == config.plan.title()
    assert found["first_break"] is None
    assert len(found["memory"]) == ranks
    assert all(0.75 < row["predicted_bytes"] / row["peak_bytes"] < 1.4 for row in found["memory"])
    assert found["warnings"] == []
    assert [copy["folded"]["tp"]["proved"] for copy in found["copies"]] == folded
    with (out := console()).capture() as text:
        out.print(page(proof))
    for words in ("trains what one device trains", "folded", "reduce-scatter", "equal", "predicted"):
        assert words in text.get()


@pytest.mark.parametrize(
    "plan", soak([{"pp": 2, "schedule": "zbv", "virtual": 2}, {"shard": 2, "zero": 3, "microbatch": 2}])
)  # the matrix compares both every day
def test_issued_collectives_equal_lowered_ones(plan):
    model = {"hidden": 24, "layers": 4, "heads": 3, "ffn": 36, "vocab": 33, "tied": True}
    config = Config.from_parts(model, "laptop", workload={"batch": 16, "seq": 8}, plan=plan)
    proof = prove(config, ranks=4, steps=1)
    assert proof.parity
    assert [row for _, row in proof.rows if not row.equal] == []
    assert [copy.unknown for copy in proof.copies] == [[]] * len(proof.copies)
    for trace in proof.copies[0].traces:
        assert trace.observed.peak_bytes > sum(p.parameters[0].nbytes for p in trace.pieces)


def test_every_copy_of_a_plan_is_compared_with_the_formulas():
    workload = {"batch": 2, "seq": 8, "precision": "fp32"}
    config = Config.from_parts(
        {"hidden": 16, "layers": 2, "heads": 2, "ffn": 24, "vocab": 32}, "laptop", workload=workload, plan={}
    )
    small = small_copy(config, 1)
    further = copy_job(config, small, 1, 0, all_dtypes=False)
    assert [a.oracle for a in prove_copy(config, small, further, "cpu").agreements] == ["", FORMULAS]


def test_fp8_works_with_copied_kv_heads():
    plan, fp8 = {"tp": 16, "replicate": 2}, {"batch": 64, "precision": "fp8"}
    small = small_copy(Config.from_parts("llama3-8b", "dgx-h100", workload=fp8, plan=plan), 8)
    assert small.workload.precision == "fp8"
    assert small.plan.tp > small.model.kv_groups


def test_verify_and_train_refuse_what_is_modelled_only_in_one_error():
    plan = {"tp": 8, "replicate": 2}
    for precision, cluster in (("mxfp8", "dgx-b200"), ("fp4", "dgx-b200")):
        work = {"batch": 64, "precision": precision}
        made = Config.from_parts("llama3-8b", cluster, workload=work, plan=plan).check()
        refusals = []
        for run in (prove, lambda made: api.train(made, shrink=True), lambda made: api.train(made), api.verify):
            with pytest.raises(MeshwrightError) as refused:
                run(made)
            refusals.append(str(refused.value))
        assert len(set(refusals)) == 1
        assert (
            f"MW-TRAIN-001: workload.precision={precision} with plan.param_dtype=bf16 is modelled only" in refusals[0]
        )


def test_the_command(tmp_path, capsys):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    with pytest.raises(SystemExit) as leaving:
        main(["verify", str(path), "--steps", "1", "--device", "cpu", "--json"])
    assert not leaving.value.code
    reported = json.loads(capsys.readouterr().out)
    assert reported["passed"]
    assert (reported["ranks"], reported["steps"]) == (2, 1)
    assert reported["errors"]["fp64"]["gradient"] < 1e-11


@pytest.mark.parametrize(
    ("plan", "work"), [({"replicate": 2, "compression": "int4"}, {}), *soak([({"replicate": 2}, {"precision": "fp8"})])]
)
def test_the_loss_of_lossy_arithmetic_is_compared_with_the_exact_run(plan, work):
    model = {"hidden": 24, "layers": 2, "heads": 3, "ffn": 36, "vocab": 33}
    config = Config.from_parts(model, "laptop", workload={"batch": 8, "seq": 8, **work}, plan=plan)
    proof = prove(config, ranks=2, steps=3)
    assert proof.passed
    reported = proof.convergence
    assert 1e-9 < abs(reported["difference"]) < 0.05
    assert reported["difference"] == pytest.approx(reported["loss"] / reported["exact_loss"] - 1)
    with (out := console()).capture() as text:
        out.print(page(proof))
    assert "Loss of step 3" in text.get()
    counted = proof.collectives
    assert f"{counted['equal']} equal" in text.get()
    assert counted["unexplained"] == 0


def test_an_illegal_plan_is_refused_even_if_its_small_copy_is_legal():
    config = Config.from_parts("llama3-70b", "dgx-h100", workload={"batch": 64}, plan={"tp": 6})
    with pytest.raises(MeshwrightError, match=r"MW-PLAN-004: tp=6 does not divide 64 attention heads"):
        prove(config)


@pytest.mark.parametrize(("ratio", "warns"), [(0.4, True), (0.6, False), (1.9, False), (2.1, True), (116.0, True)])
def test_a_memory_far_from_its_prediction_is_a_warning(ratio, warns):
    from types import SimpleNamespace

    from meshwright.proof.records import Trace
    from meshwright.proof.result import CopyProof
    from meshwright.training.hooks import Observed

    traces = [Trace(0, "fp32", observed=Observed(peak_bytes=1000), predicted_bytes=1000.0)]
    traces.append(Trace(1, "fp32", observed=Observed(peak_bytes=1000), predicted_bytes=1000.0 * ratio))
    found = CopyProof(SimpleNamespace(plan=Plan(tp=2)), 1, [], traces).warnings
    assert [warning.code for warning in found] == ["MW-VERIFY-007"] * warns
    assert all("rank 1" in str(warning) and f"{ratio:.3g} times" in str(warning) for warning in found)


def test_a_residual_network_trains_what_one_device_trains():
    """Batch norm normalises by the micro-batch of a rank; one device runs the same micro-batches."""
    config = Config.from_parts(
        "resnet-50", "laptop", workload={"batch": 8}, plan={"shard": 2, "zero": 3, "microbatch": 2, "recompute": "full"}
    )
    proof = prove(config, ranks=2, steps=2)
    assert proof.passed
    assert [a.label for a in proof.agreements] == [
        "fp64",
        "fp32",
        "formulas",
        RESUME,
    ]  # no precision is named, and CPUs compute
    assert all(error < 1e-11 for error in proof.agreements[0].errors.values())
    assert proof.small.microbatches == (2, 2)
    assert any("batch norm" in change for change in proof.small.changes)
    assert any("precision fp32" in change for change in proof.small.changes)
