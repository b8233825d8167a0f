"""The planner's result as a page for the terminal: the best plan, the leaders, reasons, slower strategies, sensitivities."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshwright.cost.checkpoint import checkpoint_words
from meshwright.describe.plan import Plan
from meshwright.describe.result import MEMORY_BAND
from meshwright.planner.advice import explain as why
from meshwright.planner.advice.sensitivity import Sensitivity
from meshwright.planner.result import PlanComparison, Result
from meshwright.planner.sizing import Sizing
from meshwright.units import counted, format_count, format_decimal_bytes, format_seconds
from meshwright.view import estimate as view
from meshwright.view import goodput
from meshwright.view.estimate import on_own_trainer, uncalibrated
from meshwright.view.tables import facts, titled

BAR = 16
CHOSEN = "; of plans within 1% of the fastest, the one with the most free memory and the simplest layout comes first"


def page(r: Result) -> RenderableType:
    """Return the full page."""
    return Group(*sections(r))


def sections(r: Result) -> Iterator[RenderableType]:
    yield header(r)
    yield leaders(r)
    yield reasons(r)
    if r.near_misses:
        yield near_misses(r)
    if survival := list(goodput.rows(r)):
        yield Group(Text("Failures and sites", "bold"), facts(survival))
    yield view.breakdown(r.estimate)
    yield view.memory(r.estimate)
    if r.why_not:
        yield strategies(r)
    if len(r.ranking.front) > 1:
        yield front(r)
    yield sensitivities(r.explanation.sensitivities)
    yield notes(r)


def short(plan: Plan) -> str:
    """Return the title of a plan in short form, with the options of ZeRO-3 that the title omits."""
    text = plan.title().replace("micro-batch", "mb").replace(" · ", " ")
    flags = {"weights kept": not plan.reshard, "reduced once": plan.reduce == "step"}
    options = [name for name, on in flags.items() if on and plan.zero == 3]
    return text.replace("(ZeRO-3)", f"(ZeRO-3, {', '.join(options)})") if options else text


def header(r: Result) -> Panel:
    e, p = r.estimate, r.prediction
    count = format_count(e.model.total)
    work = f"{e.model.describe_batch(e.workload)}, {e.workload.precision}"
    where = f"  {e.cluster.name}, stack {e.stack.name}; for {r.runs_in}"
    lines: list[RenderableType] = [
        Text.assemble((e.model.name, "bold"), (f"  {count} parameters{e.model.describe_trained()}; {work}", "dim")),
        Text.assemble((f"{e.plan.world:,} × {e.cluster.accelerator.name}", "bold"), (where, "dim")),
        *(Text(""), Text(e.plan.title(), "bold green"), view.main_numbers(e)),
        *(Text(checkpoint_words(p, e.stack), "dim"), *on_own_trainer(e), *uncalibrated(e)),
        *(Text(words, "dim") for words in (searched(r), r.choice) if words),
    ]
    return Panel(Group(*lines), title="plan", title_align="left", border_style="green")


def searched(r: Result) -> str:
    """Return the number of candidates, the number that was costed, and the time of the search."""
    others = ", some of them with offload, compression or unequal stages" if r.found.costed > r.searched else ""
    how = f"{r.found.costed:,} costed{others}, all others proved slower or too large, in {format_seconds(r.seconds)}"
    return f"{r.chosen_from}; {how}"


def leaders(r: Result) -> Table:
    rows = []
    best = r.prediction.step_time_s
    for k, ((c, p), tie) in enumerate(zip(r.leaders, r.ties, strict=True), 1):
        style = "bold" if k == 1 else ""
        slower = f"{100 * (p.step_time_s / best - 1):+.1f}%{'≈' if tie and k > 1 else ' '}"
        plan, step = Text(short(c.plan), style), Text(format_seconds(p.step_time_s, 4), style)
        rows.append((str(k), plan, step, slower, f"{100 * (p.mfu or 0):.1f}%", f"{p.memory_gib:.1f}"))
    memory = " to ".join(f"{100 * x - 100:+.0f}%" for x in MEMORY_BAND)
    caption = f"{step_bands(r)}, memory {memory}"
    if any(r.ties[1:]):
        caption += "; ≈: as fast as the first within the accuracy of the model"
    if r.choice and not r.worst_case:
        caption += CHOSEN
    return titled("Leaders, by simulated step", (">", "plan", ">step", ">", ">MFU", ">GiB"), rows, caption)


def step_bands(r: Result) -> str:
    """The band of all leaders; of the winner and the widest one, where they differ: plans that communicate more are less certain."""
    edges = [[100 * x / p.step_time_s - 100 for x in (p.step_time_low_s, p.step_time_high_s)] for _, p in r.leaders]
    first, widest = (f"{low:+.0f}% to {high:+.0f}%" for low, high in (edges[0], max(edges, key=lambda edge: edge[1])))
    return f"every step {first}" if first == widest else f"the first step {first}, others at most {widest}"


def reasons(r: Result) -> Group:
    x, p = r.explanation, r.prediction
    rows: list[tuple[str, object]] = [("bound by", x.bound), ("batch", x.batch)]
    rows += [(name, words) for name, words in x.reasons.items() if name not in ("microbatch",)]
    rows.append(("memory", why.memory_words(p)))
    if x.training:
        rows.append(("training", training_words(r)))
    rows.append(("scaling", scaling_words(r)))
    rows.append(("critical batch", x.critical))
    rows.append(("MFU over", p.mfu_denominator))
    return Group(Text("Why", "bold"), facts(rows))


def near_misses(r: Result) -> Table:
    """Return sizes close to the given ones with which training is faster."""
    rows = []
    for m in r.near_misses:
        rate = f"{r.estimate.model.unit}/s"
        unit = {"GPUs": f"{rate} per GPU", "sequence": "FLOP/s"}.get(m.what, rate)
        gain = f"{100 * m.gain:+.1f}% {unit}" if abs(m.gain) >= 5e-4 else "not modelled"
        rows.append((m.what, f"{m.given:,}", f"{m.offered:,}", gain, m.setting, Text(m.note, "dim")))
    return titled("Near misses: another size is faster", ("", ">given", ">better", ">gain", "type", ""), rows)


def training_words(r: Result) -> str:
    t = r.explanation.training
    assert t is not None
    cost = f"${t.dollars:,.0f} at ${t.price:g} per GPU-hour" if t.price else "no price known (--set cluster.price=2.5)"
    days = f"{t.days:,.1f} days ({t.days_low:,.1f} to {t.days_high:,.1f})"
    return f"{format_count(t.tokens)} {r.estimate.model.unit}: {days}, {t.gpu_hours:,.0f} GPU-hours, {cost}"


def scaling_words(r: Result) -> str:
    s, world = r.explanation.scaling, r.plan.world
    if s.weak is not None:
        few = counted(s.fewest, "GPU")
        weak = f"{100 * s.weak:.0f}% of the rate per GPU on {few}, the fewest on which this plan fits, with the same work per GPU"
    else:
        weak = f"this plan does not fit on fewer than {world:,} GPUs" if world > 1 else "one GPU: no scaling to report"
    doubled = f"; twice the GPUs on the same batch: {s.doubled:.2f}× as fast" if s.doubled else ""
    return weak + doubled


def strategies(r: Result) -> Table:
    rows = []
    for w in r.why_not:
        slower = f"{'' if w.proved else '≤'}{100 * w.slower:+.1f}%" if w.fits else "✗"
        rows.append((w.strategy, Text(short(w.plan), "dim"), Text(slower, "" if w.fits else "red"), w.words))
    unproved = any(not w.proved for w in r.why_not)
    caption = "≤: the best plan found; not proved to be the best of its strategy" if unproved else ""
    return titled("Why not …", ("!strategy", "its best", ">", "what it costs"), rows, caption)


def front(r: Result) -> Table:
    rows = []
    memory, fastest = r.space.cluster.accelerator.memory, r.ranking.front[0].time
    for c in r.ranking.front:
        free, slower = f"{100 * (1 - c.memory / memory):.0f}%", f"{100 * (c.time / fastest - 1):+.1f}%"
        gib, step = f"{why.gib(c.memory):.1f}", format_seconds(c.time, 4)
        rows.append((free, gib, step, slower, Text(short(c.plan), "dim")))
    return titled("Step time by free memory", (">free", ">GiB", ">step", ">", "plan"), rows)


def sensitivities(rows: list[Sensitivity]) -> Table:
    lines = []
    most = max(row.swing for row in rows) or 1.0
    for row in rows:
        cells = ["not possible" if x is None else f"{100 * x:+.1f}%" for x in (row.less, row.more)]
        lines.append((row.what, *cells, Text("█" * round(BAR * row.swing / most), "cyan"), Text(row.note, "dim")))
    title = "What to change first: throughput with 20% less and 20% more"
    return titled(title, ("", ">−20%", ">+20%", "", ""), lines)


def notes(r: Result) -> Group:
    x = r.explanation
    lines = [Text(f"constants: {x.calibrated}", "dim")]
    lines += [Text(f"assumed: {item}", "dim") for item in x.assumed]
    return Group(*lines)


# The user's plan


def comparison(r: Result, c: PlanComparison, name: str) -> RenderableType:
    """Compare the user's plan with the best plan: fields, step time, memory, and the parts of the difference."""
    if c.user is None:
        return Panel(Text(c.refused, "red"), title=f"{name} is not legal here", title_align="left", border_style="red")
    return Group(compared(c, name), Text(verdict(c, r.headroom), "bold"))


def compared(c: PlanComparison, name: str) -> Table:
    """The fields in which a legal plan differs from the winner, and the main numbers of both."""
    assert c.user is not None
    user, best = c.user.prediction, c.best.prediction
    fields = [(field, *(show(value, field) for value in pair)) for field, pair in c.fields.items()]
    table = titled(f"{name} versus the winner", ("", ">yours", ">winner"), fields)
    table.add_section()
    table.add_row("step", format_seconds(user.step_time_s, 4), format_seconds(best.step_time_s, 4))
    table.add_row("MFU", f"{100 * (user.mfu or 0):.1f}%", f"{100 * (best.mfu or 0):.1f}%")
    table.add_row("memory, GiB", Text(f"{user.memory_gib:.1f}", "" if user.fits else "red"), f"{best.memory_gib:.1f}")
    return table


def verdict(c: PlanComparison, headroom: float) -> str:
    assert c.user is not None
    user, best = c.user.prediction, c.best.prediction
    if not user.fits:
        over = (user.memory_gib or 0) - user.memory_limit_gib
        return f"yours {user.memory_fit}: {over:.1f} GiB over the limit on its fullest GPU"
    if c.slower <= 0:
        too_full = (user.memory_gib or 0) > (1 - headroom) * user.memory_limit_gib
        full = f": it leaves less than {100 * headroom:g}% of the memory free"
        near = ", within the 1% in which free memory and simplicity decide"
        return f"yours is {-100 * c.slower:.1f}% faster{full if too_full else near}"
    return f"yours is {100 * c.slower:.1f}% slower: {why.itemised(c.parts, best.step_time_s, most=5)}"


def show(value: object, field: str = "") -> str:
    if field == "bucket" and isinstance(value, float):
        return format_decimal_bytes(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def sizes_page(sizing: Sizing) -> RenderableType:
    """Return the recommended size in one sentence and the table of sizes."""
    columns = (">GPUs", ">days", ">low", ">high", ">MFU", ">GPU-hours", ">cost", "", "plan")
    table = titled("Days and cost over GPU counts", columns, [])
    chosen = sizing.result.plan.world
    for one in sizing.curve:
        style = "bold" if one.gpus == chosen else "" if one.meets else "dim"
        cost = f"${one.dollars:,.0f}" if one.dollars else "no price"
        days = [f"{x:,.1f}" for x in (one.days, one.days_low, one.days_high)]
        used = f"{100 * one.mfu:.1f}%", f"{one.gpu_hours:,.0f}", cost, "✓" if one.meets else ""
        table.add_row(f"{one.gpus:,}", *days, *used, short(one.plan), style=style)
    note = (
        f"✓ within {sizing.target}; each size with its best common plan. The recommended size below has a full search."
    )
    return Group(Text(sizing.answer, "bold green"), table, Text(note, "dim"))
