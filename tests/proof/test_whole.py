"""`verify --whole`: a run that is evaluated, saved and resumed equals one device that never stopped, and bugs around the steps are found."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bugs_whole
import layouts
import numpy as np
import pytest

import ranks
from meshwright.describe.config import Config
from meshwright.proof import prove as proofs
from meshwright.proof import whole
from meshwright.proof.fold import order_matters
from meshwright.proof.phases import RESUME, compare_phases, compare_resumed, default_phases, write_random_tokens
from meshwright.proof.records import Phases, Trace
from meshwright.proof.small import small_copy
from meshwright.proof.windows import windows
from meshwright.training.data.samples import Sequences
from meshwright.training.data.sources import Documents
from meshwright.training.data.token_file import open_tokens

TINY = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 24, "vocab": 32}
WORKLOAD = {"batch": 4, "seq": 8, "precision": "fp32"}


def config_of(data=None, plan=None, model=None, optimizer=None, workload=None):
    plan = {"shard": 2, "zero": 3, "param_dtype": "fp32", "master": False} | (plan or {})
    model, workload = TINY | (model or {}), WORKLOAD | (workload or {})
    return Config.from_parts(model, "laptop", workload=workload, plan=plan, data=data, optimizer=optimizer)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A token file of 24 sequences of 8 tokens: an epoch ends within the steps of a whole run."""
    folder = tmp_path_factory.mktemp("tokens") / "tokens"
    write_random_tokens(folder, 32, 24 * 8 + 3, 8, seed=7)
    return str(folder)


def first_break(agreements):
    return next((b for a in agreements for b in a.breaks), None)


@pytest.mark.parametrize(
    "bug", [pytest.param(b, id=b.name, marks=[] if b.daily else [pytest.mark.slow]) for b in bugs_whole.WHOLE]
)
def test_bugs_around_the_steps_are_found(bug, tokens, monkeypatch):
    """The bug is in the ranks and in one device."""
    plain = proofs.one_device
    alone = lambda job, many=(): replace(plain(job, many), prepare=job.prepare)  # noqa: E731
    monkeypatch.setattr(proofs, "one_device", alone)
    monkeypatch.setattr(whole, "one_device", alone)
    dtype = bug.plan.get("param_dtype", "fp32")
    data = {"path": [tokens], **bug.data}
    config = config_of(data, bug.plan, bug.model, bug.optimizer, {"precision": dtype})
    small, prepare = small_copy(config, 2), f"bugs_whole:{bug.name}"
    if bug.default:
        agreements = proofs.prove_copy(
            config, small, proofs.copy_job(config, small, 3, 0, prepare=prepare), "cpu"
        ).agreements
    else:
        agreements = whole.whole_run(config, small, 0, "cpu", prepare)
    first = first_break(agreements)
    assert first is not None
    assert first.what == bug.what, str(first)


def test_a_whole_run_passes_on_token_files_and_without_them(tokens):
    data = {"path": [tokens], "validation": 0.2, "eval_every": 5, "document_mask": True}
    optimizer = {"schedule": "wsd", "warmup": 5, "ema": 0.9}
    config = config_of(data, {"tp": 2, "shard": 1, "zero": 0, "recompute": "full"}, {"dropout_rate": 0.1}, optimizer)
    agreements = whole.whole_run(config, small_copy(config, 2), 0, "cpu")
    assert first_break(agreements) is None
    phases = [agreement.phase for agreement in agreements]
    assert len(phases) == len(set(phases)) == 7


@pytest.mark.parametrize(("pack", "masked"), [(True, False), (True, True), (False, False), (False, True)])
def test_plain_windows_are_the_sequences_that_training_reads(tokens, pack, masked):
    for part in (Documents(open_tokens(tokens)), Documents(open_tokens(tokens), 0.3)):
        read = Sequences(part, 8, pack, masked, 32)
        rows = list(windows(part, 8, pack, masked))
        assert len(rows) == read.count > 0
        for i, row in enumerate(rows):
            np.testing.assert_array_equal(row, np.stack(read[i]))


def test_a_resume_in_16_bits_has_a_label_of_its_own():
    labels = [
        compare_resumed([Trace(0, dtype, resumed=Trace(0, dtype))], phases_of()).label for dtype in ("fp64", "bf16")
    ]
    assert labels == [RESUME, f"{RESUME}, in bf16"]


def phases_of():
    return Phases(Path(), config_of(), 1, resumes=True)


def test_a_short_schedule_has_every_part_of_the_long_one():
    optimizer = {"schedule": "wsd", "warmup": 2000, "decay_steps": 10_000, "learning_rate": 3e-4, "betas": [0.8, 0.9]}
    config = Config.from_parts(TINY, "laptop", workload=WORKLOAD, plan={}, optimizer=optimizer, run={"steps": 100_000})
    short = whole.short_schedule(config.optimizer, config.optimizer, config.run.steps)
    assert (short.warmup, short.decay_start, short.decay_steps) == (2, 7, 2)
    assert (short.learning_rate, short.betas) == (3e-4, (0.8, 0.9))


def interrupted(layouts_together, folder):
    """Jobs of layouts that are evaluated, saved and resumed after one step of two, and those of one device."""
    jobs, alone = [], []
    for i, layout in enumerate(layouts_together):
        job = replace(layout.job(), watch=False)
        small = SimpleNamespace(model=job.model, workload=job.workload)
        own = folder / str(i)
        own.mkdir(parents=True)
        job = replace(job, phases=default_phases(config_of(), small, job.steps, False, own))
        jobs.append(job)
        one = replace(layout.reference.job(), phases=replace(job.phases, save_after=0, resumes=False))
        alone.append(one)
    return jobs, alone


CHOSEN = [one for one in layouts.all_layouts() if one.plan.world <= 4 and not one.prepare]
SETS = [CHOSEN[i : i + 12] for i in range(0, len(CHOSEN), 12)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(len(SETS)))
def test_no_layout_of_the_matrix_is_reported_in_error(number, tmp_path):
    for world in (1, 2, 4):
        together = [one for one in SETS[number] if one.plan.world == world]
        if not together:
            continue
        jobs, alone = interrupted(together, tmp_path / str(world))
        by_rank = ranks.run(world, layouts.train_all, jobs)
        references = ranks.run(1, layouts.train_all, alone)[0]
        for i, layout in enumerate(together):
            lossy = order_matters(layout.plan) or layout.precision == "fp8"
            one = None if lossy or references[i].replicas else references[i]
            for agreement in compare_phases(one, [rank[i] for rank in by_rank], jobs[i].phases):
                assert not agreement.breaks, (layout.title, [str(b) for b in agreement.breaks[:3]])
