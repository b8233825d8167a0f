"""The strategies' table: what each form of parallelism splits and sends, and when to use it; those of this plan are marked."""

from meshwright.describe.plan import Plan
from meshwright.view.page.sheet import Part, panel, part, row, table, view
from meshwright.view.page.subject import Subject
from meshwright.view.show.strategies import LETTERS, RULES, STRATEGIES

SENT = "strategy, what is split, collective, when, elements sent by one GPU per step"
STATE = "State in bytes on one GPU: bf16, Adam, fp32 master weights."


def data(subject: Subject) -> Part:
    """The tables of `meshwright show strategies`, with the strategies of this plan marked, and its rules of thumb."""
    used = names_of(subject.plan)
    marked = [(one, f"{one.name}{' ✓' * (one.name in used)}", one.name in used) for one in STRATEGIES]
    sent = [row(name, s.splits, s.collective, s.when, s.volume, chosen=mine) for s, name, mine in marked]
    use = [row(name, s.overlap, s.state, s.use, chosen=mine) for s, name, mine in marked]
    return view(
        panel("What is split, and what is sent", LETTERS.strip()),
        table("Traffic of each strategy", SENT, sent),
        panel("When to use it", f"This plan: {subject.plan.title()}. {STATE}"),
        table("Use of each strategy", "strategy, overlaps, state, when to use", use),
        panel("Rules of thumb"),
        part("terms", pairs=[list(rule) for rule in RULES]),
    )


def names_of(plan: Plan) -> set[str]:
    """Names of the strategies that a plan combines."""
    data_parallel = {0: "data parallel (DDP)", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3 (FSDP)"}[plan.zero]
    if plan.zero == 3 and plan.replicate > 1 and plan.shard > 1:
        data_parallel = "HSDP"
    names = {
        data_parallel: plan.dp > 1,
        "tensor parallel": plan.tp > 1,
        "+ sequence parallel": plan.tp > 1 and plan.sp,
        "context parallel": plan.cp > 1,
        "pipeline parallel": plan.pp > 1,
        "expert parallel": plan.ep > 1,
    }
    return {name for name, on in names.items() if on}
