"""Check the arguments of a schedule's builder against the table `describe.schedules.SCHEDULES`."""

from numbers import Integral

from meshwright.describe.schedules import MOST_ACTIONS, SCHEDULES, action_count
from meshwright.errors import MeshwrightError, unknown


def name_of(schedule: str) -> str:
    """The name of a schedule, from the name or an alias."""
    name = schedule.lower().replace("_", "-")
    if name in SCHEDULES:
        return name
    for known in SCHEDULES.values():
        if name in known.aliases:
            return known.name
    raise unknown("MW-PIPE-002", "pipeline schedule", schedule, SCHEDULES)


def refusal(schedule: str, ranks: int, microbatches: int, virtual: int) -> MeshwrightError | None:
    """The error for a request that the schedule does not accept, or None."""
    rule = SCHEDULES[schedule]
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("virtual", virtual)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            return MeshwrightError("MW-PIPE-003", f"{schedule}: {what} = {value!r} is not a whole number of at least 1")
    least = rule.least_virtual
    if not least <= virtual <= rule.most_virtual:
        near = least if virtual < least else rule.most_virtual
        valid = [least] if least == rule.most_virtual else [f"{least} to {rule.most_virtual}"]
        return MeshwrightError(
            "MW-PIPE-004",
            f"{schedule} does not take {virtual} stages per rank",
            why=rule.about,
            valid=valid,
            fix="1f1b" if schedule == "interleaved" and virtual == 1 else f"virtual={near}",
        )
    if microbatches < rule.least_microbatches_per_rank * ranks:
        needed = rule.least_microbatches_per_rank * ranks
        return MeshwrightError(
            "MW-PIPE-005",
            f"{schedule} on {ranks} ranks needs {needed} micro-batches, not {microbatches}",
            why="Both stages of every rank must be filled",
            valid=[f"{needed} or more"],
            fix=f"microbatches={needed}",
        )
    if action_count(ranks, microbatches, virtual) > MOST_ACTIONS:
        problem = f"{ranks} ranks × {microbatches} micro-batches × {virtual} stages per rank is too large"
        return MeshwrightError("MW-PIPE-006", problem, why=f"A program holds at most {MOST_ACTIONS:,} actions")
    return None


def require(schedule: str, ranks: int, microbatches: int, virtual: int) -> None:
    """Raise if the schedule does not accept the request."""
    problem = refusal(schedule, ranks, microbatches, virtual)
    if problem is not None:
        raise problem
