"""The step with other overlap than the plan's, and what is hidden of the communication of each axis."""

from meshwright.cost.step import step_cost
from meshwright.describe.result import COMMUNICATION, part_name
from meshwright.lower.step import step_program
from meshwright.planner.advice.alternatives import changed
from meshwright.units import format_seconds
from meshwright.view.page.sheet import Part, panel, part, piece, view
from meshwright.view.page.subject import Subject
from meshwright.view.page.waterfall import by_axis, grouped

WORDS = (
    "This plan overlaps {} with compute. Double buffering transfers the next piece while the present one is computed: “no overlap” is the step "
    "without it, “double buffering” with it on every axis."
)


def data(subject: Subject) -> Part:
    """The step without overlap, as planned, and with double buffering on every axis; and for each axis what is hidden now."""
    e, axes = subject.estimate, tuple(COMMUNICATION)
    now = e.plan.overlapped(e.stack, e.cluster.node_size)
    prefetch = {"prefetch": False} if e.plan.zero == 3 else {}
    ways = {"no overlap": changed(e.plan, overlap=(), **prefetch), "this plan": e.plan}
    ways["double buffering"] = changed(e.plan, overlap=axes)
    legal = {name: p for name, p in ways.items() if p and p.is_legal(e.model, e.workload, e.cluster, e.stack)}
    program = step_program(e.model, list(legal.values()), e.workload, e.stack, every_rank=True)
    cost, rows, hidden = step_cost(program, e.cluster), list[Part](), list[Part]()
    for k, name in enumerate(legal):
        parts = grouped({key: float(program.batch.full(seconds)[k]) for key, seconds in cost.exposed.items()})
        named = ((key, s, part_name(key)) for key, s in parts.items())
        pieces = [piece(s, key, f"{name}: {words} {format_seconds(s)}", name=words) for key, s, words in named]
        rows.append({"label": name, "text": format_seconds(float(cost.time[k])), "parts": pieces})
    for one in by_axis(e):
        sides = (
            ("exposed", one["exposed_s"], dict[str, str]()),
            ("hidden behind compute", one["hidden_s"], {"pattern": "hatch"}),
        )
        formula = f"{one['name']}, {{}}: {{}}\n{one['formula']}".format
        pieces = [piece(s, one["axis"], formula(words, format_seconds(s)), **look) for words, s, look in sides]
        hidden.append({"label": one["name"], "text": f"{one['hidden_s'] / one['total_s']:.0%} hidden", "parts": pieces})
    return view(
        panel("", WORDS.format(", ".join(now) or "nothing")),
        part("bars", rows=rows, tall=34, x={"label": "step time", "unit": "s"}),
        part("bars", rows=hidden, x={"label": "communication", "unit": "s"}) if hidden else None,
    )  # fmt: skip
