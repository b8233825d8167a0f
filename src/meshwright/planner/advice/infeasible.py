"""The errors of a question without an answer: why no plan is legal or fits, by how much, and the smallest change that gives one.

**No plan is legal.** Each constraint is dropped in turn; those without which plans exist are the ones to blame. Without constraints the sizes
are: world = replicate · shard · tp · cp · pp, where tp divides heads, pp is at most the layers, and dp divides the batch. A prime number of devices
leaves little choice. The error has the nearest batch and the nearest numbers of devices that have a plan.

**No plan fits.** The plan with the least memory is known from the search (it is proved, not guessed). Then single changes are tried in turn,
the least first: less headroom, a constraint dropped, gradients in 16 bits, states on the host, more devices, a shorter sequence.
"""

from collections.abc import Iterator

import numpy as np

from meshwright.cost.memory import minimum_gpus
from meshwright.describe.base import MOST_DEVICES
from meshwright.describe.legality import lacking_precision
from meshwright.describe.plan import divisors
from meshwright.errors import MeshwrightError, nearest_number
from meshwright.planner.search import strategies
from meshwright.planner.search.branch_and_bound import Search, SearchOutcome
from meshwright.planner.search.choices import NUMBERS, Constraint, choices
from meshwright.planner.search.space import Space
from meshwright.units import format_bytes, format_count

MOST_TIMES = 4096  # more devices than this times the given ones are not looked for


def other(space: Space, constraints: tuple[Constraint, ...] | None = None, **changes: object) -> Space:
    """The same problem with some changes."""
    config = space.config.but(**changes)
    active = space.choices.constraints if constraints is None else constraints
    return Space(config, choices(config.plan, active, tuple(space.stack.order)), space.bucket)


# No legal plan


def no_plan(space: Space) -> MeshwrightError:
    """Build the error for a problem without a legal plan: the reason, and the closest legal problem."""
    lacking = lacking_precision(space.workload, space.cluster)
    if lacking is not None:
        return lacking
    active = space.choices.constraints
    degrees, batches = possible_batches(space)
    blamed = [c for c in active if len(other(space, tuple(x for x in active if x is not c)).frames)]
    if blamed:
        return _blame(space, blamed[-1], batches)
    world, batch = space.cluster.world, space.workload.batch
    other_batch = [f"--batch {nearest_number(batch, batches)}"] if batches else []
    if active and len(other(space, ()).frames):
        return MeshwrightError(
            "MW-PLANNER-004",
            "no plan is legal under " + ", ".join(c.option for c in active),
            why="Without them there are plans; no single one of them is to blame",
            fix=" or ".join([*other_batch, "drop two of them"]),
        )
    worlds = _nearest_worlds(space)
    prime = world > 3 and len(divisors(world)) == 2
    why = f"{world} is prime, so one axis must take all devices: " if prime else "For this model "
    why += f"data parallelism may be {', '.join(map(str, degrees[:8]))}, and none divides the batch" if degrees else ""
    fixes = (
        [*other_batch, *(f"--gpus {w}" for w in worlds)]
        or [f"drop {c.option}" for c in active]
        or ["--gpus 1 --batch 1"]
    )
    return MeshwrightError(
        "MW-PLANNER-004",
        f"no plan is legal for {space.model.name} with batch {batch} on {world} GPUs",
        why=why,
        valid=[f"batch={b}" for b in batches[:6]] + [f"{w} GPUs" for w in worlds],
        fix=" or ".join(fixes),
    )


def possible_batches(space: Space) -> tuple[list[int], list[int]]:
    """Map data-parallel degrees that are illegal only because of the batch to the nearest batch that they divide."""
    unit = max(1, space.choices.least.get("microbatch", 1))
    batch = space.workload.batch
    free = other(space, workload=space.workload.but(batch=space.cluster.world * unit)).frames
    pairs = {(int(dp), int(pp)) for dp, pp in zip(free.dp, free.pp, strict=True)} if len(free) else set()
    # Some schedules need a number of micro-batches divisible by their ranks.
    near = {u * max(1, round(batch / u)) for dp, pp in pairs for u in (dp * unit, dp * unit * pp)} - {batch}
    legal = [b for b in sorted(near) if len(other(space, workload=space.workload.but(batch=b)).frames)]
    return sorted({dp for dp, _ in pairs}), legal


def _blame(space: Space, one: Constraint, batches: list[int]) -> MeshwrightError:
    """Find the constraint that rules out every plan, and the values of its field (or the batch) that would allow one."""
    rest = other(space, tuple(x for x in space.choices.constraints if x is not one))
    legal = sorted(legal_values(rest, one.field)) if one.field in NUMBERS else []
    near = nearest_number(one.value, legal) if legal and isinstance(one.value, int) else None
    option = one.option.split()[0]
    fixes = [f"{option} {one.field}={near}" if near is not None else f"drop {one.option}"]
    fixes += [f"--batch {nearest_number(space.workload.batch, batches)}"] if batches else []
    return MeshwrightError(
        "MW-PLANNER-004",
        f"no plan is legal with {one.option} for {space.model.name} on {space.cluster.world} GPUs",
        why=f"Without it there are {len(rest):,} plans",
        valid=[f"{one.field}={v}" for v in legal],
        fix=" or ".join(fixes),
    )


def legal_values(space: Space, name: str) -> set[int]:
    """Values of a field that some plan of a space has."""
    match name:
        case "replicate" | "shard" | "zero":
            rows = space.sharded(space.frames)
        case "virtual":
            rows = space.scheduled(space.shaped(space.frames))
        case "microbatch":
            rows = space.shaped(space.frames)
        case _:
            rows = space.frames
    return {int(v) for v in np.unique(rows.columns["etp" if name == "expert_tp" else name])}


def _nearest_worlds(space: Space) -> list[int]:
    """The nearest numbers of devices below and above that have a plan, whole nodes if there are any near."""
    world, node = space.cluster.world, space.cluster.node_size
    step = node if world > node else 1
    out = []
    for way in (-1, 1):
        start = world // step * step + (step if way > 0 else 0)
        for w in range(start, start + way * 64 * step, way * step):
            if 0 < w <= MOST_DEVICES and w != world and len(other(space, cluster=space.cluster.with_gpus(w)).frames):
                out.append(w)
                break
    return out


# No plan fits


def none_fits(space: Space, outcome: SearchOutcome, headroom: float) -> MeshwrightError:
    """Build the error if no plan fits: the excess, and the smallest change that fits. Exit code 3."""
    code, leanest = min(outcome.misfits.items(), key=lambda item: float(item[1].memory[0]))
    memory, device = float(leanest.memory[0]), space.cluster.accelerator
    limit = device.memory * (1 - headroom)
    plan = space.plan(leanest, 0)
    spare = f" less {headroom:.0%} headroom" if headroom else ""
    what = (
        f"no plan fits: of {outcome.legal:,} plans the leanest needs {format_bytes(memory)} on its fullest GPU, "
        f"{format_bytes(memory - limit)} more than the {format_bytes(device.memory)} of {device.name}{spare}"
    )
    trained, total = space.model.trained, space.model.total
    least = minimum_gpus(16.0 * trained + 2.0 * (total - trained), limit, 1.0)
    states = f"states of {format_count(trained)} parameters at 16 bytes each"
    frozen = f" and {format_count(total - trained)} frozen ones at 2" if trained < total else ""
    why = f"It is {strategies.NAMES[code]}: {plan.title()}; {states}{frozen} fill {least} GPU{'s' * (least > 1)}"
    changes = list(remedies(space, limit, memory))
    return MeshwrightError(
        "MW-PLANNER-005",
        what,
        why=why,
        valid=changes[1:],
        fix=changes[0] if changes else "another cluster or a smaller model",
        exit_code=3,
    )


def remedies(space: Space, limit: float, memory: float) -> Iterator[str]:
    """Return single changes with which a plan fits, the smallest first."""
    device = space.cluster.accelerator.memory
    if limit < memory <= device:
        share = int(100 * (1 - memory / device))
        yield f"--memory-headroom {share}%"
    for one in space.choices.constraints:
        rest = other(space, tuple(x for x in space.choices.constraints if x is not one))
        if fits(rest, limit):
            yield f"drop {one.option}"
    if len(space.choices.constraints) > 1 and fits(other(space, ()), limit):
        yield "drop all constraints"
    if space.base.grad_dtype == "fp32" and fits(other(space, plan=space.base.but(grad_dtype="bf16")), limit):
        yield "--fix grad_dtype=bf16"
    if space.base.offload == "none" and fits(other(space, plan=space.base.but(offload="states")), limit):
        yield "--set plan.offload=states (optimizer states on the host: slow)"
    gpus = enough_gpus(space, limit)
    if gpus:
        nodes = gpus // space.cluster.node_size
        yield f"--nodes {nodes} ({gpus} GPUs)" if gpus % space.cluster.node_size == 0 else f"--gpus {gpus}"
    seq = shorter(space, limit)
    if seq:
        yield f"--seq {seq}"


def fits(space: Space, limit: float) -> bool:
    """Whether any plan of a space keeps to a memory limit."""
    return bool(len(space.frames)) and float(Search(space, limit).leanest().memory[0]) <= limit


def enough_gpus(space: Space, limit: float) -> int:
    """Search the fewest devices on which a plan fits, by doubling and then in eighths; 0 if none."""
    cluster = space.cluster
    reach = len(cluster.levels) > 1
    start = cluster.world if reach else 0
    times = 2
    while start and times <= MOST_TIMES and start * times <= MOST_DEVICES:
        if fits(other(space, cluster=cluster.with_gpus(start * times)), limit):
            eighths = sorted({start * times * k // 8 // cluster.node_size * cluster.node_size for k in (5, 6, 7)})
            sizes = (g for g in eighths if g > start * times // 2)
            return next((g for g in sizes if fits(other(space, cluster=cluster.with_gpus(g)), limit)), start * times)
        times *= 2
    return 0


def shorter(space: Space, limit: float) -> int:
    """Return the longest sequence (a power of two below the given one) with which a plan fits; 0 if none."""
    seq = 1 << (space.workload.seq.bit_length() - (space.workload.seq.bit_count() == 1))
    while space.model.kind == "transformer" and seq > 128:
        seq //= 2
        if fits(other(space, workload=space.workload.but(seq=seq)), limit):
            return seq
    return 0
