"""Rules about the fields of a plan only: they must not contradict each other."""

from meshwright.describe.legality.case import Case, Problem, Reading, divisors, lookup, rule, values
from meshwright.describe.plan_fields import AXES, NO_ORDER, RECOMPUTES, TP_FORMS, encode
from meshwright.describe.schedules import SCHEDULES, virtual_schedules
from meshwright.describe.variants import COMPRESSIONS

FULL, AUTO = RECOMPUTES.index("full"), RECOMPUTES.index("auto")
ACTIVATIONS, BOTH = encode("offload", "activations"), encode("offload", "both")
ALWAYS_THERE = ("fp64", "fp32")  # every device computes in these, if slowly
GATHERED = TP_FORMS.index("all-gather")
UNCOMPRESSED = COMPRESSIONS.names.index("none")


@rule("MW-PLAN-001")
def shard_needs_zero(p: Case) -> Reading:
    yield (p.shard > 1) & (p.zero == 0)
    yield Problem(
        f"shard={p.shard} with zero=0 shards nothing",
        why="The ZeRO stage (1, 2 or 3) says what is sharded; plain data parallelism is `replicate`",
        valid=["zero=1", "zero=2", "zero=3", "shard=1"],
        fixes=[{"plan.zero": 3}, {"plan.zero": 1}, {"plan.shard": 1, "plan.replicate": p.dp}, {"plan.shard": 1}],
    )


@rule("MW-PLAN-002")
def order_names_each_axis(p: Case) -> Reading:
    yield p.order == NO_ORDER
    yield Problem("order must name each axis once", valid=AXES, fixes=[{"plan.order": AXES}])


@rule("MW-PLAN-013")
def sequence_parallel_needs_megatron_form(p: Case) -> Reading:
    yield p.sp & (p.tp_form == GATHERED)
    yield Problem(
        "sp with tp_form=all-gather",
        why="Sequence parallelism gathers before and scatters after the products of tp_form=megatron",
        fixes=[{"plan.sp": False}, {"plan.tp_form": "megatron"}],
    )


@rule("MW-PLAN-014")
def chosen_layers_need_full(p: Case) -> Reading:
    yield ((p.recompute_every > 1) | (p.recompute_layers > 0)) & (p.recompute != FULL)
    field = "recompute_every" if p.recompute_every > 1 else "recompute_layers"
    yield Problem(
        f"{field}={p.setting(f'plan.{field}')} with recompute={p.word('recompute')}",
        why="recompute_every and recompute_layers need recompute = full",
        fixes=[
            {"plan.recompute": "full", "plan.recompute_budget": 0.0},
            {"plan.recompute_every": 1, "plan.recompute_layers": 0},
        ],
    )


@rule("MW-PLAN-014")
def offloaded_layers_need_activations(p: Case) -> Reading:
    yield (p.offload_layers > 0) & (p.offload != ACTIVATIONS) & (p.offload != BOTH)
    yield Problem(
        f"offload_layers={p.offload_layers} with offload={p.word('offload')}",
        why="offload_layers counts layers whose activations are kept in host memory",
        fixes=[{"plan.offload": "activations"}, {"plan.offload": "both"}, {"plan.offload_layers": 0}],
    )


@rule("MW-PLAN-014")
def budget_needs_auto(p: Case) -> Reading:
    yield (p.recompute_budget > 0) & (p.recompute != AUTO)
    yield Problem(
        f"recompute={p.word('recompute')} with recompute_budget={p.recompute_budget:g}",
        why="recompute_budget needs recompute = auto",
        valid=["recompute=auto with recompute_budget=20GiB"],
        fixes=[
            {"plan.recompute": "auto", "plan.recompute_every": 1, "plan.recompute_layers": 0},
            {"plan.recompute_budget": 0.0},
        ],
    )


@rule("MW-PLAN-015")
def local_sgd_needs_whole_replicas(p: Case) -> Reading:
    divided = (p.zero > 0) | (p.cp > 1) | (p.ep > 1) | (p.compression != UNCOMPRESSED)
    yield (p.average_every > 0) & (divided | (p.replicate == 1))
    neutral = {"plan.zero": 0, "plan.cp": 1, "plan.ep": 1, "plan.compression": "none"}
    present = [{path: value} for path, value in neutral.items() if p.setting(path) != value][:1]
    named = [f"{path.removeprefix('plan.')}={p.setting(path)}" for reset in present for path in reset] or [
        "replicate=1"
    ]
    yield Problem(
        f"average_every={p.average_every} with {named[0]}",
        why="Local SGD averages the weights of several full replicas, which reduce no gradients",
        fixes=[*present, {"plan.average_every": 0}],
    )


@rule("MW-PLAN-003")
def stages_per_rank(p: Case) -> Reading:
    few = (p.pp > 1) & (p.virtual < lookup(SCHEDULES.column("least_virtual"), p.schedule))
    yield few | (p.virtual > lookup(SCHEDULES.column("most_virtual"), p.schedule))
    name = p.word("schedule")
    about, least, most = SCHEDULES[name].about, SCHEDULES[name].least_virtual, SCHEDULES[name].most_virtual
    takes = f"{least}" if least == most else f"{least} to {most}"
    looped = [{"plan.schedule": s} for s in virtual_schedules()[:2]] if most == 1 else []
    one_stage = [{"plan.schedule": "1f1b"}] if p.virtual == 1 else []
    yield Problem(
        f"schedule {name} takes virtual={takes} stages per rank, not virtual={p.virtual}",
        why=about[:1].upper() + about[1:],
        valid=virtual_schedules() if most == 1 else [f"virtual={takes}"],
        fixes=[
            *looped,
            *one_stage,
            {"plan.virtual": least if p.virtual < least else most},
            {"plan.virtual": 1, "plan.schedule": "1f1b"},
            {"plan.virtual": 1, "plan.schedule": "1f1b", "plan.layers_per_stage": ()},
        ],
    )


@rule("MW-PLAN-007")
def one_entry_per_stage(p: Case) -> Reading:
    yield (p.stage_entries > 0) & (p.stage_entries != p.stages)
    yield Problem(
        f"layers_per_stage has {p.stage_entries} entries for pp × virtual = {p.pp} × {p.virtual} = {p.stages} stages",
        why="It names the layers of every stage, in order",
        fixes=[{"plan.layers_per_stage": ()}],
    )


# The machine


@rule("MW-CLUS-003", "workload", "cluster")
def device_has_precision(p: Case) -> Reading:
    yield p.workload.precision not in (*p.cluster.accelerator.peak, *ALWAYS_THERE)
    device = p.cluster.accelerator
    likely = [d for d in ("fp8", "bf16", "fp16", "fp32") if d in device.peak]
    yield Problem(
        f"workload.precision={p.workload.precision}, and {device.name} has no {p.workload.precision} units",
        why="No peak rate is known for that dtype on this accelerator",
        valid=[d for d in device.peak if not d.startswith("int")],
        fixes=[
            {"workload.precision": dtype, **more}
            for more in ({}, {"plan.gather_dtype": "same"}, {"workload.scaling": "tensor"})
            for dtype in likely
        ],
    )


@rule("MW-PLAN-005", "cluster")
def degrees_multiply_to_devices(p: Case) -> Reading:
    yield p.world != p.cluster.world
    sizes = {axis: p.setting(f"plan.{axis}") for axis in ("replicate", "shard", "tp", "cp", "pp")}
    shown = {k: v for k, v in sizes.items() if v > 1} or {"tp": 1}
    devices = p.cluster.world
    product = " × ".join(shown) + " = " + " × ".join(str(v) for v in shown.values())
    total = f" = {p.world}" if len(shown) > 1 else ""
    divides = devices % p.rest == 0
    axes = sorted(("tp", "pp", "cp"), key=lambda axis: -sizes[axis])
    yield Problem(
        f"{product}{total} ≠ {devices} GPUs",
        why=f"The degrees must multiply to the devices of {p.cluster.name}",
        valid=[] if divides else [f"tp·cp·pp = {d}" for d in divisors(devices)][:12],
        fixes=[{}, *(change for axis in axes for change in values(f"plan.{axis}", divisors(devices), sizes[axis]))],
    )
