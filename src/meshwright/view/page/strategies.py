"""The strategies' table: what each form of parallelism splits and sends, and when to use it; those of this plan are marked."""

from typing import Any

from meshwright.describe.plan import Plan
from meshwright.view.page.subject import Subject
from meshwright.view.show.strategies import LETTERS, RULES, STRATEGIES


def data(subject: Subject) -> dict[str, Any]:
    """The rows of `meshwright show strategies --json`, with `used` where this plan has the strategy."""
    used = names_of(subject.plan)
    return {
        "rows": [{**one._asdict(), "used": one.name in used} for one in STRATEGIES],
        "rules": [{"name": name, "text": text} for name, text in RULES],
        "letters": LETTERS.strip(),
        "title": subject.plan.title(),
    }


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
