"""Bugs that were planted after the diagnosis was written: `verify` finds each, and names phase, pattern and place as they were planted."""

from dataclasses import replace

import bugs_further
import bugs_reported
import pytest

import ranks  # noqa: F401  preloads what ranks need
from meshwright.describe.config import Config
from meshwright.proof import prove as proofs
from meshwright.proof.small import small_copy

TINY = {"hidden": 16, "layers": 2, "heads": 4, "ffn": 24, "vocab": 32}
NOT_NAMED = (  # seen in a state after the step, or in a resumed run, without the pattern
    "not_resharded_after_an_evaluation",
    "fp8_weights_of_the_first_step",  # what is stale differs by less than fp8 rounds: "noise"
    "fp8_scales_of_the_first_products",
)


def home_of(bug):
    return next(home.__name__ for home in (bugs_further, bugs_reported) if hasattr(home, bug.name))


def diagnosis_of(bug, monkeypatch):
    if bug.shared:
        plain = proofs.one_device
        monkeypatch.setattr(proofs, "one_device", lambda job, many=(): replace(plain(job, many), prepare=job.prepare))
    workload = {"batch": 12, "seq": 16, "precision": "fp32", **(bug.workload or {})}
    plan = {"param_dtype": "fp32", "master": False, **bug.plan}
    config = Config.from_parts(
        {**TINY, **(bug.model or {})}, "laptop", workload=workload, plan=plan, optimizer=bug.optimizer
    )
    if bug.documents:  # without a token file: samples are random, and have documents
        config = replace(config, data=config.data.model_copy(update={"document_mask": True}))
    small = small_copy(config, 2)
    job = proofs.copy_job(config, small, 3, 0, prepare=f"{home_of(bug)}:{bug.name}")
    return proofs.prove_copy(config, small, job, "cpu").diagnosis


PLANTED = [*bugs_further.FURTHER, *bugs_reported.REPORTED]


@pytest.mark.parametrize(
    "bug", [pytest.param(b, id=b.name, marks=[] if b.daily else [pytest.mark.slow]) for b in PLANTED]
)
def test_a_further_bug_is_named(bug, monkeypatch):
    found = diagnosis_of(bug, monkeypatch)
    assert found is not None, "not seen"
    named = (bug.phase in found.phase, found.pattern.kind) == (
        True,
        bug.pattern,
    ) and bug.place in f"{found} {found.tensor}"
    assert named == (bug.name not in NOT_NAMED), str(found)
