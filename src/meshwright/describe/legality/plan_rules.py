"""Rules about the fields of a plan only: they must not contradict each other."""

from meshwright.describe.legality.case import Case, Flag, LegalityRule, Problem, divisors, lookup, values
from meshwright.describe.plan_fields import AXES, NO_ORDER, RECOMPUTES, TP_FORMS
from meshwright.describe.schedules import SCHEDULES, virtual_schedules
from meshwright.describe.variants import COMPRESSIONS

FULL, AUTO = RECOMPUTES.index("full"), RECOMPUTES.index("auto")
ALWAYS_THERE = ("fp64", "fp32")  # every device computes in these, if slowly
GATHERED = TP_FORMS.index("all-gather")
UNCOMPRESSED = COMPRESSIONS.names.index("none")


class ShardNeedsZero(LegalityRule, code="MW-PLAN-001"):
    def broken(self, p: Case) -> Flag:
        return (p.shard > 1) & (p.zero == 0)

    def explain(self, p: Case) -> Problem:
        return Problem(
            f"shard={p.shard} with zero=0 shards nothing",
            why="The ZeRO stage (1, 2 or 3) says what is sharded; plain data parallelism is `replicate`",
            valid=["zero=1", "zero=2", "zero=3", "shard=1"],
            fixes=[
                {"plan.zero": 3},
                {"plan.zero": 1},
                {"plan.shard": 1, "plan.replicate": p.replicate * p.shard},
                {"plan.shard": 1},
            ],
        )


class OrderNamesEachAxis(LegalityRule, code="MW-PLAN-002"):
    def broken(self, p: Case) -> Flag:
        return p.order == NO_ORDER

    def explain(self, p: Case) -> Problem:
        return Problem("order must name each axis once", valid=AXES, fixes=[{"plan.order": AXES}])


class SequenceParallelNeedsMegatronForm(LegalityRule, code="MW-PLAN-013"):
    def broken(self, p: Case) -> Flag:
        return p.sp & (p.tp_form == GATHERED)

    def explain(self, p: Case) -> Problem:
        return Problem(
            "sp with tp_form=all-gather",
            why="Sequence parallelism gathers before and scatters after the products of tp_form=megatron",
            fixes=[{"plan.sp": False}, {"plan.tp_form": "megatron"}],
        )


class ChosenLayersNeedFull(LegalityRule, code="MW-PLAN-014"):
    def broken(self, p: Case) -> Flag:
        return ((p.recompute_every > 1) | (p.recompute_layers > 0)) & (p.recompute != FULL)

    def explain(self, p: Case) -> Problem:
        field = "recompute_every" if p.recompute_every > 1 else "recompute_layers"
        return Problem(
            f"{field}={p.setting(f'plan.{field}')} with recompute={p.word('recompute')}",
            why="recompute_every and recompute_layers need recompute = full",
            fixes=[
                {"plan.recompute": "full", "plan.recompute_budget": 0.0},
                {"plan.recompute_every": 1, "plan.recompute_layers": 0},
            ],
        )


class BudgetNeedsAuto(LegalityRule, code="MW-PLAN-014"):
    def broken(self, p: Case) -> Flag:
        return (p.recompute_budget > 0) & (p.recompute != AUTO)

    def explain(self, p: Case) -> Problem:
        return Problem(
            f"recompute={p.word('recompute')} with recompute_budget={p.recompute_budget:g}",
            why="recompute_budget needs recompute = auto",
            valid=["recompute=auto with recompute_budget=20GiB"],
            fixes=[
                {"plan.recompute": "auto", "plan.recompute_every": 1, "plan.recompute_layers": 0},
                {"plan.recompute_budget": 0.0},
            ],
        )


class LocalSgdNeedsWholeReplicas(LegalityRule, code="MW-PLAN-015"):
    def broken(self, p: Case) -> Flag:
        divided = (p.zero > 0) | (p.cp > 1) | (p.ep > 1) | (p.compression != UNCOMPRESSED)
        return (p.average_every > 0) & (divided | (p.replicate == 1))

    def explain(self, p: Case) -> Problem:
        together = {
            "zero": (p.zero > 0, 0),
            "cp": (p.cp > 1, 1),
            "ep": (p.ep > 1, 1),
            "compression": (p.compression != UNCOMPRESSED, "none"),
        }
        present = [field for field, (there, _) in together.items() if there]
        named = f"{present[0]}={p.setting(f'plan.{present[0]}')}" if present else "replicate=1"
        return Problem(
            f"average_every={p.average_every} with {named}",
            why="Local SGD averages the weights of several full replicas, which reduce no gradients",
            fixes=[
                *({f"plan.{field}": together[field][1]} for field in present[:1]),
                {"plan.average_every": 0},
            ],
        )


class StagesPerRank(LegalityRule, code="MW-PLAN-003"):
    def broken(self, p: Case) -> Flag:
        few = (p.pp > 1) & (p.virtual < lookup(SCHEDULES.column("least_virtual"), p.schedule))
        return few | (p.virtual > lookup(SCHEDULES.column("most_virtual"), p.schedule))

    def explain(self, p: Case) -> Problem:
        name = p.word("schedule")
        least, most = SCHEDULES[name].least_virtual, SCHEDULES[name].most_virtual
        takes = f"{least}" if least == most else f"{least} to {most}"
        what = f"schedule {name} takes virtual={takes} stages per rank, not virtual={p.virtual}"
        looped = [{"plan.schedule": s} for s in ("interleaved", "looped-bfs")] if most == 1 else []
        one_stage = [{"plan.schedule": "1f1b"}] if p.virtual == 1 else []
        return Problem(
            what,
            why=SCHEDULES[name].about[:1].upper() + SCHEDULES[name].about[1:],
            valid=virtual_schedules() if most == 1 else [f"virtual={takes}"],
            fixes=[
                *looped,
                *one_stage,
                {"plan.virtual": least if p.virtual < least else most},
                {"plan.virtual": 1, "plan.schedule": "1f1b"},
                {"plan.virtual": 1, "plan.schedule": "1f1b", "plan.layers_per_stage": ()},
            ],
        )


class OneEntryPerStage(LegalityRule, code="MW-PLAN-007"):
    def broken(self, p: Case) -> Flag:
        return (p.stage_entries > 0) & (p.stage_entries != p.stages)

    def explain(self, p: Case) -> Problem:
        return Problem(
            f"layers_per_stage has {p.stage_entries} entries for pp × virtual = {p.pp} × {p.virtual} = {p.stages} stages",
            why="It names the layers of every stage, in order",
            fixes=[{"plan.layers_per_stage": ()}],
        )


# The machine


class DeviceHasPrecision(LegalityRule, code="MW-CLUS-003", needs=("workload", "cluster")):
    def broken(self, p: Case) -> Flag:
        return p.workload.precision not in (*p.cluster.accelerator.peak, *ALWAYS_THERE)

    def explain(self, p: Case) -> Problem:
        device = p.cluster.accelerator
        likely = [d for d in ("fp8", "bf16", "fp16", "fp32") if d in device.peak]
        return Problem(
            f"workload.precision={p.workload.precision}, and {device.name} has no {p.workload.precision} units",
            why="No peak rate is known for that dtype on this accelerator",
            valid=[d for d in device.peak if not d.startswith("int")],
            fixes=[
                *({"workload.precision": dtype} for dtype in likely),
                *({"workload.precision": dtype, "plan.gather_dtype": "same"} for dtype in likely),
                *({"workload.precision": dtype, "workload.scaling": "tensor"} for dtype in likely),
            ],
        )


class DegreesMultiplyToDevices(LegalityRule, code="MW-PLAN-005", needs=("cluster",)):
    def broken(self, p: Case) -> Flag:
        return p.world != p.cluster.world

    def explain(self, p: Case) -> Problem:
        sizes = {axis: p.setting(f"plan.{axis}") for axis in ("replicate", "shard", "tp", "cp", "pp")}
        shown = {k: v for k, v in sizes.items() if v > 1} or {"tp": 1}
        devices = p.cluster.world
        product = " × ".join(shown) + " = " + " × ".join(str(v) for v in shown.values())
        total = f" = {p.world}" if len(shown) > 1 else ""
        divides = devices % p.rest == 0
        axes = sorted(("tp", "pp", "cp"), key=lambda axis: -sizes[axis])
        return Problem(
            f"{product}{total} ≠ {devices} GPUs",
            why=f"The degrees must multiply to the devices of {p.cluster.name}",
            valid=[] if divides else [f"tp·cp·pp = {d}" for d in divisors(devices)][:12],
            fixes=[{}, *(change for axis in axes for change in values(f"plan.{axis}", divisors(devices), sizes[axis]))],
        )
