"""How many GPUs train N tokens within D days or within a budget: the fewest for which no larger number is both faster and cheaper.

    days = tokens / (tokens per second) / 86,400          dollars = GPUs · 24 · days · price of a GPU-hour

Both depend on the plan, and the best plan changes with the number of GPUs: the batch stays, so each data-parallel rank gets fewer sequences,
pipelines get fewer micro-batches and communication hides less. More GPUs train faster, but less than in proportion: the cost rises.

The curve takes whole nodes, doubling from the fewest on which a plan fits, with the best common plan at each size (`search.common_plans`).
Between the last size that misses the target and the first that meets it, seven sizes are tried. Common plans are a little slower than the
best, so sizes that miss by less than 10% are searched in full, the smallest first, and then the first size that meets the target.

That size may need a plan that suits it badly (a number of nodes that divides neither layers nor batch). If a larger size of the curve takes fewer
days and fewer GPU-hours, it dominates the first: then the fewest GPUs that nothing dominates are recommended, and the answer names both.
"""

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.explain import TrainingCost, training, walked_estimate
from meshwright.planner.api import plan
from meshwright.planner.question import Question, read
from meshwright.planner.result import Result
from meshwright.planner.search.branch_and_bound import Progress
from meshwright.planner.search.common_plans import best_common_plan
from meshwright.units import format_count, parse_count

OPTIONS = ("mtbf", "checkpoint", "restart", "sites", "line", "top", "robust")  # of `plan`, for the chosen size alone
MOST_GPUS = 2**17
BETWEEN = 8  # parts into which the last doubling is divided
BEYOND = 1  # sizes of the curve after the first that meets the target
SLACK = 1.1  # a size whose common plan misses the target by less may meet it with its best plan
WORSE = 3  # doublings without a faster training after which larger clusters are not tried


@dataclass(frozen=True)
class Size:
    """A number of GPUs with its best common plan."""

    gpus: int
    nodes: int
    plan: Plan
    step_s: float
    mfu: float
    days: float
    days_low: float
    days_high: float
    gpu_hours: float
    dollars: float  # 0: the cluster has no price
    meets: bool


@dataclass(frozen=True)
class Sizing:
    """The answer: the plan for the fewest GPUs, and the curve of days and cost over GPU counts."""

    days: float  # 0: no limit
    budget: float  # dollars; 0: no limit
    curve: list[Size]  # common plans, fewest GPUs first
    result: Result  # of the full search on the recommended number of GPUs
    fewest: Result | None = None  # on the fewest GPUs that meet the target, if more GPUs are faster and cheaper

    @property
    def target(self) -> str:
        limits = [f"{self.days:g} days"] if self.days else []
        limits += [f"${self.budget:,.0f}"] if self.budget else []
        return " and ".join(limits)

    @property
    def answer(self) -> str:
        """One sentence: how many GPUs, what they take and cost."""
        t, gpus = training_of(self.result), self.result.plan.world
        takes = f"{t.days:,.1f} days ({t.days_low:,.1f} to {t.days_high:,.1f}){price_words(t)}"
        tokens = f"within {self.target} for {format_count(t.tokens)} tokens"
        words = f"{gpus:,} GPUs are the fewest {tokens}: {takes}"
        if self.fewest is not None:
            less, cost = training_of(self.fewest), price_words(t) or f" and {t.gpu_hours:,.0f} GPU-hours"
            before = price_words(less) or f" and {less.gpu_hours:,.0f} GPU-hours"
            takes = f"{t.days:,.1f} days ({t.days_low:,.1f} to {t.days_high:,.1f}){cost}"
            slower = f"{self.fewest.plan.world:,}, the fewest, are slower and cost more ({less.days:,.1f} days{before})"
            words = f"{gpus:,} GPUs {tokens}: {takes}; {slower}"
        fastest = min((one for one in self.curve if one.meets), key=lambda one: one.days, default=None)
        if self.days or fastest is None or fastest.gpus == gpus:
            return words
        return f"{words}; the fastest within it: {fastest.gpus:,} GPUs, {fastest.days:,.1f} days and ${fastest.dollars:,.0f}"

    def as_dict(self) -> dict[str, Any]:
        rows = [asdict(size) | {"plan": size.plan.as_dict()} for size in self.curve]
        fewest = (self.fewest or self.result).plan.world
        sizing = {
            "gpus": self.result.plan.world,
            "fewest_gpus": fewest,
            "days": self.days or None,
            "budget": self.budget or None,
        }
        return {"sizing": {**sizing, "answer": self.answer, "curve": rows}, **self.result.as_dict()}


def size(
    model: Any,
    cluster: Any = "",
    *,
    days: str | float = 0,
    budget: str | float = 0,
    nodes: int = 0,
    gpus: int = 0,
    progress: Progress | None = None,
    **question: Any,
) -> Sizing:
    """The number of GPUs of a cluster type for `tokens` within `days` or a `budget` ("2M$"); other arguments as for `plan`."""
    limits = read_days(days), read_budget(budget)
    if nodes or gpus:
        raise MeshwrightError(
            "MW-PLANNER-007",
            "--days and --budget ask for the number of GPUs, and --nodes or --gpus gives it",
            fix="drop --nodes or --gpus; or drop --days and --budget: `plan` then shows the days and the cost",
        )
    search = {name: question.pop(name) for name in OPTIONS if name in question}
    request = read(model, cluster, **question)
    check_question(request.config, limits[1])
    curve = explore(request, *limits, progress)
    for one in tried_in_full(curve, *limits):
        result = plan(model, cluster, gpus=one.gpus, **question, **search)
        t = training(result.estimate)
        if t is not None and meets(t, *limits):
            better = undominated(curve, result.plan.world, t)
            if better is None:
                return Sizing(*limits, curve, result)
            return Sizing(*limits, curve, plan(model, cluster, gpus=better.gpus, **question, **search), result)
    raise none_meets(curve, *limits, request.config)


def undominated(curve: list[Size], gpus: int, t: TrainingCost | Size) -> Size | None:
    """Return the smallest size that beats this training in days and in GPU-hours, and that no other size of the curve beats in both;
    None if there is none."""
    better = [one for one in curve if one.gpus > gpus and one.days < t.days and one.gpu_hours < t.gpu_hours]
    return next((one for one in better if undominated(curve, one.gpus, one) is None), None)


def training_of(result: Result) -> TrainingCost:
    t = result.explanation.training
    assert t is not None, "the question has a token budget"
    return t


def price_words(t: TrainingCost) -> str:
    return f" and ${t.dollars:,.0f}" if t.price else ""


def read_days(days: str | float) -> float:
    """Days from 30 or "30"; without a value (0 or "") no limit. A written "0" is no limit that a training can meet."""
    try:
        value = float(days or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6 or (isinstance(days, str) and days and not value):
        raise MeshwrightError(
            "MW-PLANNER-007", f"--days {str(days)[:40]!r} is not a number of days", valid=["30", "0.5"], fix="--days 30"
        )
    return value


def read_budget(budget: str | float) -> float:
    """Dollars from "2M$", "$2M", "2M USD" or a number; without a value (0 or "") no limit."""
    if isinstance(budget, str):
        budget = budget.strip().removeprefix("$").removesuffix("USD").strip().removesuffix("$").strip() or budget
    try:
        dollars = parse_count(budget or 0)
        if isinstance(budget, str) and budget and not dollars:
            raise MeshwrightError("MW-PLANNER-007", "Every training costs more")
        return dollars
    except MeshwrightError as error:
        raise MeshwrightError(
            "MW-PLANNER-007",
            f"--budget {str(budget)[:40]!r} is not an amount of dollars",
            why=error.what,
            valid=["2M$", "500k$", "1500000"],
            fix="--budget 2M$",
        ) from error


def check_question(config: Config, budget: float) -> None:
    """Raise where the question lacks the token budget, a price, or a cluster that can grow."""
    if not config.workload.tokens or config.model.kind != "transformer":
        what = "--days and --budget need the number of tokens to train"
        why = "Days and cost are those of the whole training run of a transformer"
        raise MeshwrightError("MW-PLANNER-007", what, why=why, fix="--tokens 1T")
    if budget and not config.cluster.price:
        what = f"--budget needs the price of a GPU-hour, and {config.cluster.name} has none"
        raise MeshwrightError("MW-PLANNER-007", what, fix="--set cluster.price=2.5")


def explore(request: Question, days: float, budget: float, progress: Progress | None = None) -> list[Size]:
    """Sizes of the curve, fewest GPUs first: doublings from one node, then sizes between the last miss and the first hit."""
    curve: list[Size] = []
    nodes, after, least, since_least = 1, 0, float("inf"), 0
    most = MOST_GPUS // request.config.cluster.node_size if len(request.config.cluster.levels) > 1 else 1
    while nodes <= most and after <= BEYOND and since_least < WORSE:
        if (one := sized(request, nodes, days, budget)) is not None:
            curve.append(one)
            since_least = 0 if one.days < least else since_least + 1
            least = min(least, one.days)
            after += passed(one, days, budget)
        if progress:
            progress(min(0.7, 0.05 * nodes.bit_length()))
        nodes *= 2
    meeting = [k for k, one in enumerate(curve) if one.meets]
    if meeting and meeting[0] > 0:
        low, high = curve[meeting[0] - 1].nodes, curve[meeting[0]].nodes
        inner = sorted({low + (high - low) * k // BETWEEN for k in range(1, BETWEEN)} - {low, high})
        curve += [one for n in inner if (one := sized(request, n, days, budget)) is not None]
    return sorted(curve, key=lambda one: one.gpus)


def passed(one: Size, days: float, budget: float) -> bool:
    """Whether larger clusters can be skipped: this one is fast enough, or (with only a budget) too expensive."""
    return one.days <= days if days else one.dollars > budget


def sized(request: Question, nodes: int, days: float, budget: float) -> Size | None:
    """The best common plan on some nodes; None: no plan is legal or fits."""
    space = request.space(request.config.cluster.with_nodes(nodes))
    best, _ = best_common_plan(space, request.headroom)
    if best is None:
        return None
    e = walked_estimate(space, best.plan, best.time)
    t = training(e)
    assert t is not None, "the question was checked to be of a transformer with a token budget"
    return Size(
        gpus=space.cluster.world,
        nodes=nodes,
        plan=best.plan,
        step_s=e.prediction.step_time_s,
        mfu=e.prediction.mfu or 0.0,
        days=t.days,
        days_low=t.days_low,
        days_high=t.days_high,
        gpu_hours=t.gpu_hours,
        dollars=t.dollars,
        meets=meets(t, days, budget),
    )


def meets(t: TrainingCost | Size, days: float, budget: float, slack: float = 1.0) -> bool:
    """Whether a training keeps to the limits, times some slack."""
    return (not days or t.days <= slack * days) and (not budget or t.dollars <= slack * budget)


def tried_in_full(curve: list[Size], days: float, budget: float) -> list[Size]:
    """Sizes to search in full, fewest GPUs first: those that may meet the target, up to the first that does."""
    first = next((k for k, one in enumerate(curve) if one.meets), len(curve) - 1)
    return [one for one in curve[: first + 1] if meets(one, days, budget, SLACK)]


def none_meets(curve: list[Size], days: float, budget: float, config: Config) -> MeshwrightError:
    """The error where no size meets the target, with the sizes that come closest."""
    if not curve:
        return MeshwrightError(
            "MW-PLANNER-008",
            f"no common plan of {config.model.name} fits on up to {MOST_GPUS:,} GPUs of {config.cluster.name}",
            fix="--seq or --batch smaller, or a cluster with more memory per GPU",
            exit_code=3,
        )
    fast, cheap = min(curve, key=lambda one: one.days), min(curve, key=lambda one: one.dollars)
    nearest = [f"{fast.gpus:,} GPUs: {fast.days:,.1f} days"]
    nearest += [f"{cheap.gpus:,} GPUs: ${cheap.dollars:,.0f}"] if budget else []
    limits = " and ".join([f"{days:g} days"] * bool(days) + [f"${budget:,.0f}"] * bool(budget))
    what = f"no number of GPUs of {config.cluster.name} trains {format_count(config.workload.tokens)} tokens within {limits}"
    why, fix = "It costs more on any size", f"--budget {cheap.dollars * 1.05:.0f}"
    if days:
        why = f"A batch of {config.workload.batch:,} sequences cannot use more GPUs well"
        fix = f"--batch {2 * config.workload.batch}" if fast.days > days else fix
    return MeshwrightError("MW-PLANNER-008", what, why=why, valid=nearest, fix=fix, exit_code=3)
