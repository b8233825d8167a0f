"""The proof of a plan: train small copies of it on many ranks and on one device, and compare all results.

    1  fold      the plan to few ranks: once with every axis, then with one axis at a time at 4 (`fold`); the model to a small one
                 with the same flags (`small`)
    2  train     both sides through the step of `train`, in float64 and float32, from the same weights on the same batches; a
                 16-bit plan also in its dtypes
    3  compare   losses, norms, every gradient, every parameter; then collectives and memory of one observed step
    4  formulas  one device with plain formulas, which share no code with it (`oracle`): bugs that it has in common with the ranks
       replay    every update in the plan's dtype: unscale, clip, optimizer, masters, rounding (`emulation.update`)
    5  phases    one evaluation, a save and a resume on the same layout (`phases`); `whole` has a run with the data of the run file
    6  converge  if gradients or products are lossy: the loss after the steps, compared with an exact run
    7  blame     if they differ: train with each axis separately; an axis that differs on its own is the broken one

A proof should find as many bugs as possible: no initial bias is zero, padding differs between ranks, and gradients are large
enough to be clipped.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.variants import OPTIMIZERS
from meshwright.errors import MeshwrightError
from meshwright.proof.compare import NARROWER, Agreement, Break, compare, tolerance_of
from meshwright.proof.emulation.update import replay
from meshwright.proof.fold import AXES, order_matters, single_axis
from meshwright.proof.phases import compare_phases, default_phases
from meshwright.proof.records import Job, Trace
from meshwright.proof.result import CopyProof, Proof
from meshwright.proof.small import SmallCopy, small_copies
from meshwright.proof.tolerance import KINDS
from meshwright.training.launch import local
from meshwright.training.launch.temporary import temporary_folder
from meshwright.training.machine import with_precision

TARGET = "meshwright.proof.trace:record"
FORMULAS = "formulas"
TIED = "values at the cut of a lossy sum are equal, and rounding decides which is sent"
OTHER_SEED = 1000
FURTHER_STEPS = 3  # of copies after the first: a first one, one with states, and one that uses what the second left
SILENCE_S = 120.0


def prove(
    config: Config,
    ranks: int = 8,
    steps: int = 5,
    seed: int = 0,
    device: str = "cpu",
    prepare: str = "",
    backend: str = "auto",
) -> Proof:
    """Raise only for a plan that cannot be tried; a plan that trains a different model returns a failed proof."""
    started = time.perf_counter()
    config, _ = with_precision(config, config.cluster.accelerator.name == "cpu")
    # A small copy may be legal where the plan itself is not.
    config.check_trainable()
    proof = Proof(config.plan.title(), [])
    for i, small in enumerate(small_copies(config, ranks)):
        own = steps if i == 0 else min(steps, FURTHER_STEPS)
        job = copy_job(config, small, own, seed, i == 0, prepare, backend)
        proof.copies.append(prove_copy(config, small, job, device))
        if not proof.copies[-1].passed:
            break  # a difference was found; other copies would repeat it
    proof.seconds = time.perf_counter() - started
    return proof


def prove_copy(config: Config, small: SmallCopy, job: Job, device: str) -> CopyProof:
    """The proof of one small copy. If rounding decided what a lossy sum sent, it is repeated once, from other weights."""
    proof = prove_job(config, small, job, device)
    if proof.agreements[0].untold:
        proof = prove_job(config, small, replace(job, seed=job.seed + OTHER_SEED), device)
    return proof


def prove_job(config: Config, small: SmallCopy, job: Job, device: str) -> CopyProof:
    """The proof of one small copy; in float64 only without an evaluation, a save and a resume."""
    all_dtypes = len(job.dtypes) > 1
    with temporary_folder() as folder:
        if all_dtypes:
            job = replace(job, phases=default_phases(config, small, job.steps, job.documents, folder))
        many, failure = run_as_far_as_possible(job, device)
        compiled = many[0]["fp64"].compiled != "off"
        job = job if failure is None and not compiled else replace(job, phases=None)
        alone = replace(one_device(job, many), oracle=not loses(job))
        one = run(alone, device)[0]
    phases, job, alone = job.phases, replace(job, phases=None), replace(alone, phases=None)
    exactly = run(replace(exact(job), oracle=True), device)[0]["fp64"] if all_dtypes and loses(job) else one["fp64"]
    agreements = compare_dtypes(job, alone, one, many, small, device)
    agreements += compare_with_formulas(exactly)
    if phases is not None:
        rounds = order_matters(job.plan) or job.workload.precision == "fp8" or agreements[0].untold
        agreements += compare_phases(None if rounds else one["fp64"], [rank["fp64"] for rank in many], phases)
    if broken := next((a for a in agreements if a.breaks), None):
        record_activations(job, alone if not broken.oracle else replace(alone, oracle=True), broken, device)
    watched = [rank[job.dtypes[-1]] for rank in many]
    proof = CopyProof(small, job.steps, agreements, watched, oracles=oracles_of(job, small, exactly))
    if all_dtypes and compiled:
        proof.oracles["evaluation, save and resume"] = "nothing: they are not run with compiled layers"
    elif all_dtypes and config.run.compile == "auto" and config.cluster.accelerator.name != "cpu":
        proof.oracles["compiled layers"] = "nothing: they are compiled with --set run.compile=blocks only"
    if all_dtypes and loses(job):
        proof.exact_losses = tuple(exactly.losses)
    proof.blamed = blamed_axis(proof, job, one["fp64"], device)
    if failure is not None and proof.passed:
        raise failure
    return proof


def copy_job(
    config: Config,
    small: SmallCopy,
    steps: int,
    seed: int,
    all_dtypes: bool = True,
    prepare: str = "",
    backend: str = "auto",
) -> Job:
    """The training of a small copy on ranks."""
    if order_matters(small.plan) and (small.model.experts or small.workload.precision == "fp8"):
        steps = 1  # what the order of the sum has moved, a router or fp8 may take for its neighbour in the next
    steps = max(steps, small.plan.average_every + 1) if small.plan.average_every else steps
    dtypes = ("fp64", "fp32") if all_dtypes else ("fp64",)
    replays = all_dtypes and small.narrow is None and OPTIMIZERS[small.workload.optimizer].replay is not None
    return Job(
        *(small.model, small.plan, small.workload, small.order, steps, seed, dtypes),
        watch=True,
        prepare=prepare,
        backend=backend,
        updates=replays,
        compile="off" if config.run.compile == "auto" else config.run.compile,
        documents=has_documents(config, small),
        optimizer=small.optimizer,
        schedule=small.schedule,
    )


def compare_dtypes(
    job: Job, alone: Job, one: dict[str, Trace], many: list[dict[str, Trace]], small: SmallCopy, device: str
) -> list[Agreement]:
    """Compare the ranks with one device in every dtype of the proof, and their updates with a replay."""
    out = [compare_doubles(alone, one["fp64"], [rank["fp64"] for rank in many], device)]
    # Where float32 rounds, fp8 and lossy sums may round to a neighbour: there float64 alone is judged.
    if "fp32" in job.dtypes and not (small.workload.precision == "fp8" or small.plan.lossy):
        moved = run(perturbed(alone, "fp32"), device)[0]["fp32"]
        tolerance = tolerance_of(one["fp64"], one["fp32"], moved)
        out.append(compare(one["fp64"], [rank["fp32"] for rank in many], tolerance))
    if job.updates:
        out[-1].breaks += replay([rank[job.dtypes[-1]] for rank in many], job, small.plan)
    if "fp32" in job.dtypes and small.narrow is not None and not any(agreement.breaks for agreement in out):
        out.append(prove_narrow(job, small.narrow, one["fp64"], device))
    return out


def blamed_axis(proof: CopyProof, job: Job, one: Trace, device: str) -> str:
    """The axis that breaks parity on its own, in words; '' if nothing is broken."""
    if proof.parity:
        return ""
    if any(agreement.oracle for agreement in proof.agreements if agreement.breaks):
        return "none: one device itself"
    if not any(b.what in KINDS for b in proof.agreements[0].breaks):  # the axes are tried in float64
        return "none: the steps are equal in float64"
    # Ranks lose different parts of their gradients, so a trial of a lossy plan is compared with an emulation of itself.
    expected = None if loses(job) else one
    return blame(job.plan, lambda plan: differs(replace(job, plan=plan), expected, device))


def run_as_far_as_possible(job: Job, device: str) -> tuple[list[dict[str, Trace]], MeshwrightError | None]:
    """Train; if that fails with an evaluation, a save and a resume, train without them: a wrong step may be why it failed."""
    try:
        return run(job, device), None
    except MeshwrightError as error:
        if job.phases is None:
            raise
        return run(replace(job, phases=None), device), error


def record_activations(job: Job, alone: Job, agreement: Agreement, device: str) -> None:
    """Run the first step that differs once more, on both sides, and record the outputs of their modules (`activations`)."""
    first = agreement.breaks[0]
    compared = agreement.dtype == "fp64" and not agreement.phase and first.what in ("loss", "gradient")
    if not compared or job.plan.average_every:
        return
    jobs = activation_jobs(job, alone, first.step)
    if agreement.oracle:
        single = run(replace(jobs[1], plan=alone.plan), device)[0]["fp64"]
        agreement.rerun = (single.oracle, [single], None) if single.oracle is not None else None
        return
    many, one, *stale = [[rank["fp64"] for rank in run(job, device)] for job in jobs]
    agreement.rerun = one[0], many, stale[0][0] if stale else None


def activation_jobs(job: Job, alone: Job, step: int) -> list[Job]:
    """Jobs that record one step: of the ranks, of one device, sample by sample where that gives the same, and of one device with the weights of the
    step before."""
    job, alone = (
        replace(j, activations_of=step, dtypes=("fp64",), steps=step + 1, watch=False, updates=False, compile="off")
        for j in (job, alone)
    )
    if alone.emulated is None and alone.plan.microbatch == job.workload.batch:
        alone = replace(alone, plan=alone.plan.but(microbatch=1))
    return [job, alone, *([replace(alone, skipped=(step - 1,))] if step else [])]


def prove_narrow(job: Job, plan: Plan, double: Trace, device: str) -> Agreement:
    """Prove the plan in its 16-bit dtypes. Every update is replayed exactly from the gradients of the ranks. The error of the gradients is
    bounded by that of one device in the same 16 bits, unless a router, fp8 or a lossy sum amplifies rounding errors."""
    dtype = plan.param_dtype
    narrow = replace(job, plan=plan, dtypes=(dtype,), watch=False, updates=True)
    many = [rank[dtype] for rank in run(narrow, device)]
    agreement = Agreement(dtype, dict.fromkeys(KINDS, 0.0), [], many[0].losses, untold=untold(job, plan))
    if not agreement.untold:
        alone = one_device(narrow)
        own = alone.plan.but(param_dtype=dtype, master=plan.master, grad_dtype=plan.grad_dtype)
        alone = replace(alone, plan=own)
        single = run(alone, device)[0][dtype]
        agreement = compare(double, many, tolerance_of(double, single, run(perturbed(alone, dtype), device)[0][dtype]))
        agreement.breaks += narrow_operations(single, many)
    agreement.breaks += replay(many, job, plan)
    return agreement


def perturbed(alone: Job, dtype: str) -> Job:
    """One device from weights that are moved by one unit in their last place, sample by sample where that computes the same."""
    together = alone.model.resnet.stages or (alone.emulated is not None and not alone.emulated.average_every)
    plan = alone.plan if together else alone.plan.but(microbatch=1)
    return replace(alone, plan=plan, dtypes=(dtype,), perturbed=True, oracle=False)


def untold(job: Job, plan: Plan) -> str:
    """Why gradients in 16 bits cannot be compared; '' if they can."""
    reasons = {
        "a router may choose another expert after rounding": bool(job.model.experts),
        "a lossy sum may send other elements after rounding": plan.lossy,
        "fp8 may round to the next code after rounding in 16 bits": job.workload.precision == "fp8",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def narrow_operations(single: Trace, many: list[Trace]) -> list[Break]:
    """Operations that a rank computes in 16 bits, and one device in wide numbers."""
    return [
        Break(0, NARROWER, name, trace.rank, 1.0, 0.0, trace.dtype)
        for trace in many
        for name in trace.narrow
        if name not in single.narrow
    ]


def compare_doubles(alone: Job, one: Trace, many: list[Trace], device: str) -> Agreement:
    """Compare in float64: equal to the last digits, unless ranks round while they sum; then one device also sums in the other order."""
    plan = alone.emulated
    if plan is None or not order_matters(plan):
        return without_ties(compare(one, many), one.tied)
    other = run(replace(alone, backwards=True, dtypes=("fp64",)), device)[0]["fp64"]
    return compare(one, many, tolerance_of(one, other, rounded=plan.wire), plan.wire)


def without_ties(agreement: Agreement, tied: int | None) -> Agreement:
    """Whether ranks differ cannot be told from the first step on in which rounding decided what was sent; the loss of that step can."""
    first = next(iter(agreement.breaks), None)
    if first is not None and tied is not None and (first.step, first.what != "loss") >= (tied, True):
        agreement.breaks, agreement.untold = [], TIED
    return agreement


def compare_with_formulas(one: Trace) -> list[Agreement]:
    """Compare one device in float64 with plain formulas: its losses, gradients and updates, and the learning rates of the run."""
    if one.oracle is None:
        return []
    agreement = compare(one.oracle, [one])
    agreement.oracle = FORMULAS
    agreement.breaks = [
        replace(b, than="the formula's") for b in (*one.wrong_weights, *agreement.breaks, *one.wrong_rates)
    ]
    return [agreement]


def has_documents(config: Config, small: SmallCopy) -> bool:
    """Whether attention stays inside the documents of a sequence."""
    return config.data.document_mask and small.model.kind == "transformer"


def oracles_of(job: Job, small: SmallCopy, one: Trace) -> dict[str, str]:
    """What each part of a copy was compared with."""
    optimizer = job.workload.optimizer
    out = {"ranks": "one device in float64", "collectives": "the step program"}
    if loses(job):
        out["ranks"] = "one device in float64, which repeats lossy arithmetic with separate code"
    if job.updates:
        out["fp32 updates"] = f"the formula of {optimizer}, from the gradients of each rank"
    if small.narrow is not None:
        out[f"{small.narrow.param_dtype} updates"] = f"the formula of {optimizer}, rounded step by step"
    if one.oracle is not None:
        network = "plain formulas of attention, positions, masks, norms, experts and losses"
        rates = "the closed formula of every schedule"
        weights = "mean and deviation of the distribution of each tensor"
        out |= {"network": network, "initial weights": weights}
        out |= {"optimizer": f"the formula of {optimizer}", "learning rate": rates}
        if one.evaluations:
            out["evaluation"] = "plain formulas on the weights of one device"
    elif one.plug_in:
        out["network"] = f"none: {one.plug_in} is a plug-in, for which there is no second formula"
    return out


def run(job: Job, device: str) -> list[dict[str, Trace]]:
    return local.run(
        TARGET, job.plan.world, job, silence=SILENCE_S, group_timeout=SILENCE_S / 2, device=device, backend=job.backend
    )


def one_device(job: Job, many: Sequence[dict[str, Trace]] = ()) -> Job:
    """Train the same model and global batch on one device, the full batch in one forward, without injected faults. If the ranks are lossy,
    it emulates them; `many` has their lossy sums."""
    # fp8 scales and statistics of batch norm are of a micro-batch of a rank
    per_rank = job.workload.precision == "fp8" or bool(job.model.resnet.stages)
    copies = job.plan.tp // job.model.kv_groups if per_rank and job.model.kind == "transformer" else 1
    job = replace(job, watch=False, prepare="", kv_copies=max(1, copies), reference=True, compile="off")
    if job.phases is not None:  # one device evaluates with plain formulas, and never stops
        job = replace(job, phases=replace(job.phases, save_after=0, resumes=False))
    if job.plan.average_every:
        size = job.plan.microbatch if per_rank else job.workload.batch // job.plan.dp
        plan = Plan(microbatch=size, param_dtype="fp32", master=False)
        return replace(job, plan=plan, emulated=job.plan)
    rounds = job.plan.microbatches(job.workload)
    counted = bool(job.model.experts) and job.model.router.counts_together
    if job.plan.lossy or (counted and (rounds > 1 or per_rank)):
        plan = Plan(microbatch=job.workload.batch // rounds, param_dtype="fp32", master=False)
        summed = {dtype: [summed for rank in many for summed in rank[dtype].summed] for dtype in job.dtypes}
        return replace(job, plan=plan, emulated=job.plan, summed=summed)
    size = job.plan.microbatch if per_rank else job.workload.batch
    plan = Plan(microbatch=size, param_dtype="fp32", master=False)
    return replace(job, plan=plan)


def loses(job: Job) -> bool:
    """Whether the plan trains with lossy arithmetic."""
    return job.plan.lossy or job.plan.average_every > 0 or job.workload.precision == "fp8"


def exact(job: Job) -> Job:
    """Train on one device without the lossy arithmetic of the plan."""
    plan = job.plan.but(compression="none", comm_dtype=None, average_every=0)
    workload = job.workload.but(precision="fp32", scaling="tensor")
    return one_device(replace(job, plan=plan, workload=workload, watch=False, prepare="", dtypes=("fp64",)))


def blame(plan: Plan, differs: Callable[[Plan], bool]) -> str:
    """The axis that breaks parity on its own; all axes if none does."""
    used = [axis for axis in (*AXES, "ep") if getattr(plan, axis) > 1]
    for axis in ["", *used] if len(used) > 1 else [""]:
        try:
            if differs(single_axis(plan, axis)):
                return axis or "micro-batches"
        except MeshwrightError:
            continue  # this axis is not legal on its own for the small model
    return " × ".join(used) or "micro-batches"


def differs(job: Job, one: Trace | None, device: str) -> bool:
    """Whether a plan with one axis trains another model than one device; without a trace of one device it is run here."""
    job.plan.check(job.model, job.workload)
    trial = replace(job, dtypes=("fp64",), watch=False)
    ranks = run(trial, device)
    expected = run(one_device(trial, ranks), device)[0]["fp64"] if one is None else one
    return bool(compare(expected, [rank["fp64"] for rank in ranks]).breaks)
