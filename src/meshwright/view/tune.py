"""The pages of `meshwright tune`: a line before and after each run, and the table at the end."""

from rich.console import Group, RenderableType
from rich.markup import escape

from meshwright.planner.tune.run import MEASURED, TuneRun
from meshwright.planner.tune.session import BEST, STACK, Tuning
from meshwright.units import counted, format_seconds
from meshwright.view.tables import table

SHOWN = 5  # candidates that were not run
LARGE_SPREAD = 0.5  # of the steps of a run: other programs used the machine, or steps are unequal
AGAIN = "To tell the plans apart: more --steps on a machine without other programs, and another --out."


def before(tuning: Tuning, candidate: int, gain: float) -> str:
    """What is run next, and why."""
    seconds, low, high = (format_seconds(s) for s in tuning.expected_s(candidate))
    why = f", expected gain {gain:.1%}" if tuning.best else ""
    return f"run {len(tuning.trials) + 1}: {escape(tuning.plans[candidate].title())}: expected {seconds} ({low} to {high}){why}"


def after(trial: TuneRun) -> str:
    """What a run said."""
    if trial.outcome == MEASURED and trial.seconds:
        return f"  measured {format_seconds(trial.seconds)}" + (f", spread {trial.spread:.0%}" if trial.spread else "")
    return f"  {trial.outcome}: {escape(trial.why)}"


def page(tuning: Tuning, reason: str) -> RenderableType:
    """All runs, the fastest first; then the candidates with the largest expected gain."""
    best = tuning.best
    rows = table("!plan", ">predicted", ">measured", ">slower")
    for trial in sorted(tuning.trials, key=lambda t: t.seconds or float("inf")):
        seconds = format_seconds(trial.seconds) if trial.seconds else trial.outcome
        above = f"{trial.seconds / best.seconds - 1:+.1%}" if best and best.seconds and trial.seconds else ""
        predicted = format_seconds(tuning.predictions[trial.candidate].step_time_s)
        rows.add_row(escape(tuning.plans[trial.candidate].title()), predicted, seconds, above)
    gains = tuning.gains()
    left = [i for i in gains.argsort()[::-1] if i not in tuning.tried][:SHOWN]
    others = table("!not run", ">expected", ">expected gain")
    for i in left:
        seconds, low, high = (format_seconds(s) for s in tuning.expected_s(int(i)))
        others.add_row(escape(tuning.plans[int(i)].title()), f"{seconds} ({low} to {high})", f"{gains[i]:.2%}")
    closing = [f"Stopped: {reason}."]
    if best and best.seconds:
        title = escape(tuning.plans[best.candidate].title())
        closing.append(
            f"Fastest: [bold]{title}[/], {format_seconds(best.seconds)}; written to {escape(str(tuning.folder / BEST))}"
        )
        if tuning.as_fast:
            titles = ", ".join(escape(tuning.plans[trial.candidate].title()) for trial in tuning.as_fast)
            closing.append(f"As fast within the spread of the steps: {titles}. {AGAIN}")
        elif noisy := [trial for trial in tuning.trials if (trial.spread or 0.0) > LARGE_SPREAD]:
            closing.append(f"The steps of {counted(len(noisy), 'run')} differ by more than {LARGE_SPREAD:.0%}. {AGAIN}")
        closing.append(f"Predictions centred on these runs: --stack {escape(str(tuning.folder / STACK))}")
    return Group(rows, *([others] if left else []), *closing)
