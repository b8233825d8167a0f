"""The proof of a whole run, `verify --whole`: a small copy trains on the token files of the run, is evaluated, saved, resumed and goes on.

    train      eight steps with the optimizer settings of the run. Its schedule is shortened to them, and tokens are taken modulo the small vocabulary
    evaluate   every second step
    save       after four
    resume     on the same layout; on another one; and on this layout from a checkpoint of one device

Every phase is compared with one device that never stopped (`phases`), in float64. A plan in 16 bits also resumes in its dtypes, bit by bit.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.describe import legality
from meshwright.describe.config import Config
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.proof.compare import Agreement
from meshwright.proof.fold import order_matters
from meshwright.proof.phases import (
    EVALUATED_BATCHES,
    compare_elsewhere,
    compare_phases,
    compare_samples,
    random_data,
)
from meshwright.proof.prove import (
    compare_doubles,
    compare_with_formulas,
    copy_job,
    has_documents,
    loses,
    one_device,
    prove,
    run,
)
from meshwright.proof.records import SETTINGS, Job, Phases, Trace
from meshwright.proof.result import Proof
from meshwright.proof.small import SmallCopy, small_copy
from meshwright.training.data.sources import check_data
from meshwright.training.launch.temporary import temporary_folder

STEPS, SAVE_AFTER, EVALUATE_EVERY = 8, 4, 2
OTHER_LAYOUTS: tuple[dict[str, Any], ...] = ({"shard": 2, "zero": 3}, {"tp": 2}, {"pp": 2}, {"replicate": 2}, {})


def prove_whole(
    config: Config, ranks: int = 8, steps: int = 5, seed: int = 0, device: str = "cpu", **options: Any
) -> Proof:
    """The default proof, and that of a whole run on its first copy. Options are those of `prove`."""
    if config.data.path:
        check_data(config)
    started = time.perf_counter()
    proof = prove(config, ranks, steps, seed, device, **options)
    if proof.passed:
        copy = proof.copies[0]
        copy.agreements += whole_run(config, small_copy(config, ranks), seed, device, **options)
        copy.blamed = "" if copy.parity else "none: the steps of the default proof are equal"
        copy.oracles["whole run"] = (
            "one device that never stopped, plain formulas, and the sequences of the token files"
        )
    proof.seconds = time.perf_counter() - started
    return proof


def whole_run(
    config: Config, small: SmallCopy, seed: int, device: str, prepare: str = "", backend: str = "auto"
) -> list[Agreement]:
    with temporary_folder() as folder:
        job = copy_job(config, small, STEPS, seed, False, prepare, backend)
        settings = short_schedule(config.optimizer, small.optimizer, config.run.steps)
        job = replace(job, steps=STEPS, optimizer=settings, watch=False, compile="off")
        phases = Phases(folder / "ranks", data_of(config, small, folder), SAVE_AFTER, resumes=True)
        if small.model.kind == "transformer":
            phases = replace(phases, evaluate_every=EVALUATE_EVERY, trains_on_data=True)
        job = replace(job, phases=phases)
        many = run(job, device)
        alone = one_device(job, many)
        assert alone.phases is not None
        saving = replace(alone.phases, folder=folder / "one", save_after=SAVE_AFTER)
        alone = replace(alone, oracle=not loses(job), phases=saving)
        one = run(alone, device)[0]["fp64"]
        out = compare_run(alone, one, [rank["fp64"] for rank in many], phases, device)
        if not any(agreement.breaks for agreement in out):
            out += elsewhere(job, alone, one, device)
        if small.narrow is not None:
            dtype = small.narrow.param_dtype
            own = replace(phases, folder=folder / dtype)
            narrow = run(replace(job, plan=small.narrow, dtypes=(dtype,), phases=own), device)
            out += compare_phases(None, [rank[dtype] for rank in narrow], own)
    for agreement in out:
        agreement.phase = f"whole run: {agreement.label}"
    return out


def compare_run(alone: Job, one: Trace, many: list[Trace], phases: Phases, device: str) -> list[Agreement]:
    """The agreements of the steps, of evaluations and the resume on the same layout, and of the samples."""
    plan = alone.emulated or alone.plan
    if alone.emulated is not None and order_matters(plan):
        out = []  # ranks round while they sum: the default proof bounds it
    else:
        out = [compare_doubles(replace(alone, phases=None), one, many, device)]
    out += compare_with_formulas(one)
    rounds = order_matters(plan) or alone.workload.precision == "fp8" or one.replicas or one.tied is not None
    out += compare_phases(None if rounds else one, many, phases)
    if phases.trains_on_data and not one.replicas:
        resumed = [trace.resumed for trace in many if trace.resumed is not None]
        out.append(compare_samples(one, [many, resumed], phases.config, STEPS))
    return out


def elsewhere(job: Job, alone: Job, one: Trace, device: str) -> list[Agreement]:
    """Resumes on another layout, and on this one from the checkpoint of one device; none where results depend on the layout."""
    if alone.emulated is not None or job.workload.precision == "fp8" or job.phases is None or alone.phases is None:
        return []
    out = []
    trials = [(job.plan, alone.phases.folder)] if job.plan.world > 1 else []
    trials += [(plan, job.phases.folder) for plan in other_layouts(job)[:1]]
    for plan, folder in trials:
        trial = replace(job, plan=plan, phases=replace(job.phases, start=folder, resumes=False))
        ranks = [rank["fp64"] for rank in run(trial, device)]
        source = "one device" if plan == job.plan else "another layout"
        phase = f"resumed from {source} on {plan.title()}"
        out.append(compare_elsewhere(one, ranks, SAVE_AFTER, phase, job.workload.batch, STEPS))
    return out


def other_layouts(job: Job) -> list[Plan]:
    """Layouts of at most two ranks that can train the model, and that the plan does not use."""
    out = []
    for axes in OTHER_LAYOUTS:
        plan = Plan(**axes, microbatch=job.plan.microbatch, param_dtype="fp32", master=False)
        if all(getattr(job.plan, axis) == size for axis, size in axes.items()) and plan.world == job.plan.world:
            continue
        try:
            legality.check(plan, job.model, job.workload, trainer=True)
        except MeshwrightError:
            continue
        out.append(plan)
    return out


def data_of(config: Config, small: SmallCopy, folder: Path) -> Config:
    """The run with the sizes of the copy: its token files, or random ones of which an epoch ends within the steps, and validation data."""
    sized = replace(config, workload=small.workload)
    if small.model.kind != "transformer":
        return sized
    sequences = small.workload.batch * STEPS * 5 // 8
    random = random_data(folder, small.model, small.workload, has_documents(config, small), sequences)
    data = config.data
    if not data.path:
        return replace(sized, model=small.model, data=random)
    own: dict[str, Any] = {"eval_every": 1, "eval_batches": min(data.eval_batches, EVALUATED_BATCHES)}
    if not (data.validation or data.validation_path):
        own |= {"validation_path": random.validation_path}
    return replace(sized, data=data.but(**own))


def short_schedule(settings: Optimizer, small: Optimizer, steps: int) -> Optimizer:
    """The optimizer settings of the run. Warm-up and decay take their shares of the short run, at least two steps where there are any."""
    own, share = settings.with_steps(steps), STEPS / steps
    scaled = {
        name: max(min(2, count), round(count * share))
        for name, count in ((field, getattr(own, field)) for field in ("warmup", "decay_steps", "decay_start"))
    }
    fixed = {name: getattr(small, name) for name in ("scale_with_batch", "scale_with_width")}
    fixed |= {"on_nan": SETTINGS.on_nan, "most_skips": SETTINGS.most_skips}
    return own.but(**{name: value for name, value in scaled.items() if getattr(own, name)}, **fixed)
