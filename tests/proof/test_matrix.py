"""Every layout of the matrix trains what one device trains (loss, norm, every gradient, every parameter, in float64) and
issues the lowered collectives."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import combinations

import layouts
import pytest
import torch
from kinds import covering, exact_kinds, lossy_kinds
from torch.torch_version import TorchVersion

import ranks
from meshwright.describe.variants import COMPRESSIONS
from meshwright.errors import MeshwrightError
from meshwright.parallel.pipeline import check_split_products, drops_custom_functions
from meshwright.parallel.stages import program_of
from meshwright.programs.pipelines import SCHEDULES
from meshwright.proof import prove as proof
from meshwright.proof import traffic
from meshwright.proof.compare import compare, tolerance_of

ALL, LOSSY, NARROW = layouts.all_layouts(), layouts.lossy_layouts(), layouts.narrow_layouts()
REFUSED = {layout for layout in (*ALL, *LOSSY) if drops_custom_functions() and layout.splits_fp8_products}
DAILY = {*covering(ALL, exact_kinds), *covering(LOSSY, lossy_kinds), *covering(NARROW, lossy_kinds)}
TOGETHER = {1: 40, 2: 30, 4: 13, 8: 4}  # layouts that share a set of processes
BOUND = 1e-10
SILENCE_S = 300.0


@cache
def one_device(together):
    """The references of the layouts that train in the same processes."""
    wanted = list(dict.fromkeys(layout.reference for layout in together))
    return dict(zip(wanted, train_on_one([layout.job() for layout in wanted]), strict=True))


def train(world, jobs, backend="auto"):
    return ranks.run(world, layouts.train_all, jobs, silence=SILENCE_S, backend=backend)


def train_on_one(jobs):
    return train(1, jobs)[0]


@cache
def sets():
    """The set of each layout: layouts that train in the same processes have the same world size and preparation and are all daily or none;
    at most `TOGETHER`. A refused layout is a set of one."""
    same = defaultdict(list)
    for layout in ALL:
        alone = layout if layout in REFUSED else None
        same[layout.plan.world, layout.prepare, layout in DAILY, alone].append(layout)
    found = {}
    for (world, *_), every in same.items():
        for start in range(0, len(every), TOGETHER[world]):
            together = tuple(every[start : start + TOGETHER[world]])
            found |= dict.fromkeys(together, together)
    return found


def companions(layout):
    return sets()[layout]


@cache
def trained(together):
    """Traces by layout. If the set fails, there are none, and each layout trains separately, so that one failure does not hide others."""
    try:
        by_rank = train(together[0].plan.world, [layout.job() for layout in together])
        return {layout: [rank[i] for rank in by_rank] for i, layout in enumerate(together)}
    except Exception:
        return {}


def traces_of(layout):
    together = trained(companions(layout))
    return together[layout] if together else [rank[0] for rank in train(layout.plan.world, [layout.job()])]


def marked(layout, group=""):
    """A test parameter; layouts that train in the same processes run on one worker (see `conftest`)."""
    group = group or f"matrix {ALL.index(companions(layout)[0])}"
    marks = [] if layout in DAILY else [pytest.mark.slow]
    if layout in REFUSED:
        marks.append(pytest.mark.skip(reason="this torch drops fp8 products in a split backward"))
    return pytest.param(layout, id=f"{layout.title} @ {group}", marks=marks)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", [marked(layout) for layout in ALL])
def test_a_layout_trains_what_one_device_trains(layout):
    one = one_device(companions(layout))[layout.reference]
    traces = traces_of(layout)
    agreement = compare(one, traces)
    assert not agreement.breaks, "\n".join(map(str, agreement.breaks[:5]))
    assert {p.name for trace in traces for p in trace.pieces} == {p.name for p in (one.replicas or [one])[0].pieces}
    assert all(error < BOUND for error in agreement.errors.values()), agreement.errors
    assert_issues_what_is_lowered(layout, traces)


def test_adapters_have_a_layout_for_every_strategy_and_pair():
    """Data parallelism or a stage of ZeRO, tensor or sequence, context, pipeline and expert parallelism."""
    covered = [layouts.strategies_of(fields) for _, fields in layouts.ADAPTED]
    families = layouts.PAIRED.values()
    wanted = [{one, other} for a, b in combinations(families, 2) for one in a for other in b]
    wanted += [{one} for family in families for one in family]
    assert [pair for pair in wanted if not any(pair <= names for names in covered)] == []
    assert [fields for model, fields in layouts.ADAPTED if layouts.refused(model, fields)] == []


ON_OUR_BACKEND = [({"pp": 2, "shard": 2, "zero": 1, "ep": 2}, "muon")]


@pytest.mark.timeout(200)
def test_layouts_on_the_backend_meshwright_train_what_one_device_trains():
    """The same steps over our collectives: data, pipeline and expert parallelism, ZeRO-1, and Muon."""
    chosen = [layouts.Layout("mixtral", layouts.Plan(**fields), optimizer=kind) for fields, kind in ON_OUR_BACKEND]
    one = train_on_one([layout.reference.job() for layout in chosen])
    by_rank = train(4, [layout.job() for layout in chosen], backend="meshwright")
    for i, layout in enumerate(chosen):
        traces = [rank[i] for rank in by_rank]
        agreement = compare(one[i], traces)
        assert not agreement.breaks, (layout.title, [str(b) for b in agreement.breaks[:5]])
        assert all(error < BOUND for error in agreement.errors.values()), (layout.title, agreement.errors)
        assert_issues_what_is_lowered(layout, traces)


def assert_issues_what_is_lowered(layout, traces):
    """Compare all collectives of the second step in number and bytes; a row is data-dependent only if routing or a threshold decides."""
    rows = [(trace.rank, row) for trace in traces for row in trace.traffic]
    assert bool(rows) == (layout.plan.world > 1)
    assert [(rank, row) for rank, row in rows if row.unexplained or row.lowered != pytest.approx(row.observed)] == []
    assert {name for trace in traces if trace.observed for name in trace.observed.unknown} == set()
    decided = {reason: {(row.axis, row.operation) for _, row in rows if reason in row.explained} for reason in DATA}
    assert {reason for _, row in rows for reason in row.explained} <= set(DATA)
    for reason, here in decided.items():
        assert not here or data_decides(layout)[reason], here
        assert {operation for _, operation in here} <= DATA[reason]


# Collectives whose bytes are the data's to say: copies of tokens on their way to experts and back, and, of a split expert in
# fp8, the scales of its rows; (value, place) pairs above a threshold.
DATA = {
    traffic.ROUTED: {"all_to_all", "all_gather", "reduce_scatter", "all_reduce"},
    traffic.PASSED: {"all_to_all", "all_gather"},
}


def data_decides(layout):
    plan, model = layout.plan, layouts.MODELS[layout.model]
    return {
        traffic.ROUTED: bool(model.experts) and plan.ep * plan.etp > 1,
        traffic.PASSED: COMPRESSIONS[plan.wire].counts_values,
    }


def in_sets(every):
    """Traces by layout; layouts of one world size train in the same processes, at most `TOGETHER` at a time."""
    traces = {}
    for world in sorted({layout.plan.world for layout in every}):
        same, size = [layout for layout in every if layout.plan.world == world], TOGETHER[world]
        for i in range(0, len(same), size):
            together = same[i : i + size]
            by_rank = train(world, [layout.job() for layout in together])
            traces |= {layout: [rank[i] for rank in by_rank] for i, layout in enumerate(together)}
    return traces


def lossy_set(layout):
    """Lossy layouts of one world size, of the daily run or of the soak."""

    def key(layout):
        return layout.plan.world, layout in DAILY

    return tuple(other for other in LOSSY if key(other) == key(layout) and other not in REFUSED)


@cache
def lossy(every):
    """Traces of one device and of the ranks. Ranks train first, because they report to the one device how they cut their gradients."""
    traces = in_sets(every)
    jobs = [proof.one_device(layout.job(), [{"fp64": trace} for trace in many]) for layout, many in traces.items()]
    return dict(zip(traces, train_on_one(jobs), strict=True)), traces


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", [marked(layout, f"matrix lossy {layout.plan.world}") for layout in LOSSY])
def test_a_lossy_layout_equals_its_emulation_on_one_device(layout):
    one, many = (by[layout] for by in lossy(lossy_set(layout)))
    agreement = compare(one, many)
    assert all(error < BOUND for error in agreement.errors.values()), agreement.breaks[:3]
    assert_issues_what_is_lowered(layout, many)


@cache
def narrow(dtype, daily):
    """Traces by layout, and those of one device in float64, in the same 16 bits, and in these with moved weights."""
    traces = in_sets([layout for layout in NARROW if (layout.dtype, layout in DAILY) == (dtype, daily)])
    jobs = {
        layout: [
            on_one_device(layout, dtype, many, perturbed)
            for dtype, perturbed in (("fp64", False), (layout.dtype, False), (layout.dtype, True))
        ]
        for layout, many in traces.items()
    }
    wanted = list({repr(job): job for pair in jobs.values() for job in pair}.values())
    found = dict(zip(map(repr, wanted), train_on_one(wanted), strict=True))
    return {layout: [found[repr(job)] for job in pair] for layout, pair in jobs.items()}, traces


def on_one_device(layout, dtype, many, perturbed=False):
    """One device in this dtype: the full batch in one forward, or an emulation of the ranks."""
    plan, job = layout.plan, replace(layout.job(), dtypes=(dtype,))
    one = proof.one_device(job, [{dtype: trace} for trace in many])
    size = 1 if perturbed and one.emulated is None and not job.model.resnet.stages else one.plan.microbatch
    own = one.plan.but(master=plan.master, grad_dtype=plan.grad_dtype, microbatch=size)
    return replace(one, plan=own, perturbed=perturbed)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", [marked(layout, f"matrix {layout.dtype}") for layout in NARROW])
def test_the_error_of_a_16_bit_layout_is_at_most_that_of_one_device(layout):
    (double, *others), many = (by[layout] for by in narrow(layout.dtype, layout in DAILY))
    agreement = compare(double, many, tolerance_of(double, *others))
    assert not agreement.breaks, "\n".join(map(str, agreement.breaks[:5]))
    assert agreement.errors["gradient"] > 1e-6  # it was computed in 16 bits
    assert_issues_what_is_lowered(layout, many)


def test_the_matrix_is_whole():
    """No pair is left out: each was made by the families, and nothing of what was made is refused."""
    made = [*layouts.single_strategies(), *layouts.pairs(), *layouts.TRIPLES, *layouts.EXTRAS]
    assert [(model, fields) for model, fields in made if layouts.refused(model, fields)] == []
    assert len([layout for layout in ALL if layout.plan.world <= 4]) >= 150
    assert len(layouts.TRIPLES) >= 20
    assert {layout.plan.schedule for layout in ALL} == set(SCHEDULES)
    assert {layout.plan.zero for layout in ALL} == {0, 1, 2, 3}


def test_an_older_torch_skips_the_layouts_that_it_refuses(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    refused = set()
    for layout in (layout for layout in (*ALL, *LOSSY) if layout.precision == "fp8" and layout.plan.pp > 1):
        job = layout.job()
        try:
            check_split_products(job.plan, program_of(job.plan, job.workload))
        except MeshwrightError:
            refused.add(layout)
    assert refused == {layout for layout in (*ALL, *LOSSY) if layout.splits_fp8_products}
    assert len(refused) >= 1


def test_the_daily_run_shows_every_kind_of_layout():
    """Pairs of strategies, models with axes, and compressors of each class with each strategy: none is only in the soak."""
    for every, kinds_of in ((ALL, exact_kinds), (LOSSY, lossy_kinds), (NARROW, lossy_kinds)):
        daily = [layout for layout in every if layout in DAILY]
        assert set().union(*map(kinds_of, daily)) == set().union(*map(kinds_of, every))
    assert any(min(p.tp, p.cp, p.pp, p.ep, 1 + p.zero) > 1 for p in (layout.plan for layout in DAILY))  # all five axes


STRATEGIES = {
    "ddp": lambda p: p.replicate > 1 and not p.zero, "zero1": lambda p: p.zero == 1, "zero2": lambda p: p.zero == 2,
    "zero3": lambda p: p.zero == 3, "hsdp": lambda p: p.replicate > 1 and p.shard > 1, "tp": lambda p: p.tp > 1 and not p.sp,
    "sp": lambda p: p.sp, "cp": lambda p: p.cp > 1, "pp": lambda p: p.pp > 1, "ep": lambda p: p.ep > 1,
    "recompute": lambda p: p.recompute != "none", "offload": lambda p: p.offload != "none",
    "accumulation": lambda p: p.microbatches(layouts.workload_of(p)) > 1,
}  # fmt: skip
ONLY_COMPRESSED = {"each micro-batch": lambda p: p.reduce == "microbatch"}
ONLY_PRECISE = {
    "averages": lambda p: p.average_every, "compressed": lambda p: p.lossy, "split backward": lambda p: p.schedule == "zbv",
    "selective": lambda p: p.recompute == "selective", "full": lambda p: p.recompute == "full",
    **{kind: lambda p, kind=kind: p.cp > 1 and p.cp_kind == kind for kind in ("ring", "all-gather", "ulysses")},
}  # fmt: skip


def lacking(plans, wanted):
    return [name for name, is_met in wanted.items() if not any(map(is_met, plans))]


@pytest.mark.parametrize("kind", layouts.inexact.KINDS)
def test_every_compression_is_combined_with_every_strategy(kind):
    wanted = {**STRATEGIES, **ONLY_COMPRESSED}
    assert lacking([layout.plan for layout in LOSSY if layout.plan.wire == kind], wanted) == []


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_every_precision_is_combined_with_every_strategy(precision):
    every = (*ALL, *LOSSY) if precision == "fp8" else NARROW
    plans = [layout.plan for layout in every if layout.precision == precision]
    assert lacking(plans, {**STRATEGIES, **ONLY_PRECISE}) == []
