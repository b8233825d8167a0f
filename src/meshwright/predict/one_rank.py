"""What one rank of a plan computes, and the step of all ranks composed from it.

A rank that runs without the others has no network: its collectives take no time on the device. So its prediction is that of the same plan on
links without latency and of any rate (`without_network`). The host still issues every collective.

    rank    = M · (forward + backward of its stages) + closing          M micro-batches; closing: norm, update, overhead of the step
    step    = makespan of the walked schedule + closing + exposed reductions of gradients

In the composed step the compute of every stage is the measured one: a stage's predicted times grow by what its rank measured beyond the
prediction without a network. What the network adds, and the schedule, are the model's.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from meshwright.cost.band import LEAST_DOUBT, band
from meshwright.cost.phase import RankTime
from meshwright.cost.step import StepCost, step_cost
from meshwright.cost.walked import stage_times, walk_step
from meshwright.describe.cluster import Cluster, Collectives
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.result import AXES, GIB, OVERHEAD
from meshwright.lower.program import scalar
from meshwright.lower.step import step_program
from meshwright.predict.prediction import hidden_communication, resolve_recompute
from meshwright.programs import pipelines
from meshwright.units import Json

NO_TIME, NO_LIMIT = 1e-12, 1e18  # seconds of latency, bytes per second
# Micro-batches that are measured, in units of pipeline stages: enough for all that a rank holds in flight
MOST_ROUNDS = 2


@dataclass(frozen=True)
class RankPrediction:
    """Predicted compute of one pipeline rank in a step, and its peak memory as the allocator counts it."""

    stage: int
    step_s: float
    backward_s: float  # forward and backward of all micro-batches
    closing_s: float
    allocated_gib: float
    reserved_gib: float


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank measured: seconds of the micro-batches that ran, and of the end of the step."""

    rank: int
    stage: int
    microbatches: int
    steps: int
    backward_s: float
    closing_s: float
    spread: float
    allocated_gib: float
    reserved_gib: float | None = None  # unknown on a CPU
    parts_s: dict[str, float] | None = None  # of one step: groups of kernels on a GPU, blocks on a CPU
    # Of a GPU: allocated bytes between steps, and their peaks in both parts of a step
    memory_gib: dict[str, float] | None = None
    notes: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        return self.backward_s + self.closing_s


@dataclass(frozen=True)
class ComposedStep:
    """The step of all ranks, from the compute of measured ranks and the model's network and schedule."""

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    compute_s: float  # of the busiest rank, measured
    predicted_s: float  # the step without any measurement

    def as_dict(self) -> Json:
        return asdict(self)


def without_network(cluster: Cluster) -> Cluster:
    """The cluster with links that take no time."""
    levels = tuple(
        level.but(link=level.link.but(alpha=NO_TIME, hop=0.0, bandwidth=NO_LIMIT, efficiency=1.0), oversubscription=1.0)
        for level in cluster.levels
    )
    none = Collectives(call=0, call_across=0, chunk=0, peer=0, pair_loss=0, source="no network")
    return cluster.but(levels=levels, collectives=none, measured=())


def measured_config(config: Config) -> Config:
    """The configuration with as many micro-batches as our trainer measures one rank with: more of them repeat the same work."""
    plan = config.plan
    return with_microbatches(config, min(config.workload.batch // (plan.dp * plan.microbatch), MOST_ROUNDS * plan.pp))


def with_microbatches(config: Config, count: int) -> Config:
    """The configuration with this number of micro-batches in a step."""
    return config.but(workload=config.workload.but(batch=config.plan.dp * config.plan.microbatch * count))


def cost_of_stages(config: Config) -> StepCost:
    """The cost of every pipeline rank, with the times of every stage."""
    c = config
    plan = resolve_recompute(c.model, c.plan, c.workload, c.stack, c.cluster.accelerator.memory)
    return step_cost(step_program(c.model, plan, c.workload, c.stack, every_rank=True, stages=True), c.cluster)


def alone(config: Config) -> StepCost:
    """The cost of every pipeline rank without a network."""
    return cost_of_stages(config.but(cluster=without_network(config.cluster)))


def predicted_ranks(config: Config) -> list[RankPrediction]:
    """The prediction of each pipeline rank of a plan, on its own."""
    cost = alone(config)
    rounds = max(1.0, scalar(cost.program.batch.microbatches))
    closing = sum(scalar(cost.exposed.get(part, 0.0)) for part in ("dp", "optimizer", "overhead"))
    found = []
    for stage, (rank, memory) in enumerate(zip(cost.ranks, cost.memory, strict=True)):
        parts = {part: scalar(size) / GIB for part, size in memory.items()}
        allocated = sum(size for part, size in parts.items() if part not in OVERHEAD)
        backward = rounds * scalar(rank.total)
        sizes = allocated, sum(parts.values()) - parts.get("context", 0.0)
        found.append(RankPrediction(stage, backward + closing, backward, closing, *sizes))
    return found


def predicted_beside(config: Config, measured: Sequence[RankMeasurement]) -> list[RankPrediction]:
    """The prediction of each measured rank, with the micro-batches that it ran: a framework's log has those of the whole step."""
    by_count = {n: predicted_ranks(with_microbatches(config, n)) for n in {m.microbatches for m in measured}}
    return [by_count[m.microbatches][m.stage] for m in measured]


def composed(config: Config, measured: Sequence[RankMeasurement]) -> ComposedStep:
    """The step of a plan whose pipeline ranks were measured; a stage without a measurement grows as the mean of the measured ones."""
    network, predicted = cost_of_stages(config), predicted_beside(config, measured)
    growth = {m.stage: m.backward_s / p.backward_s for m, p in zip(measured, predicted, strict=True)}
    mean = sum(growth.values()) / len(growth)
    closing = max(m.closing_s for m in measured)
    plain, plan = walk_step(network, config.plan), config.plan
    with_links, bare = stage_times(network), stage_times(alone(config))
    holders = stage_holders(plan, int(scalar(network.program.batch.rounds)))
    grown = [
        grow(time, compute, growth.get(rank, mean))
        for rank, time, compute in zip(holders, with_links, bare, strict=False)
    ]
    walked = walk_step(network, plan, times=grown)
    own = sum(walked.closing[part] for part in ("optimizer", "overhead"))
    seconds = walked.time - own + closing
    exposed = {axis: scalar(network.exposed.get(axis, 0.0)) for axis in (*AXES, "bubble")}
    modelled = {**exposed, "compute": max(seconds - sum(exposed.values()), 0.0)}
    # The measured part is as certain as a measurement; the rest has the band of the prediction.
    low, high = band(config.stack, modelled, hidden_communication(network, exposed), plan, config.cluster)
    share = sum(exposed.values()) / max(sum(modelled.values()), 1e-30)
    sure = max([m.spread for m in measured] + [LEAST_DOUBT / 2])
    low, high = ((edge - 1) * share + sign * sure * (1 - share) for edge, sign in ((low, -1), (high, 1)))
    rounds = {m.stage: max(1.0, scalar(network.program.batch.microbatches)) / m.microbatches for m in measured}
    busiest = max(rounds[m.stage] * m.backward_s + m.closing_s for m in measured)
    return ComposedStep(seconds, seconds * (1 + low), seconds * (1 + high), busiest, plain.time)


def stage_holders(plan: Plan, microbatches: int) -> list[int]:
    """The pipeline rank that holds each stage of the schedule."""
    if plan.pp == 1:
        return [0]
    schedule = "1f1b" if plan.schedule == "auto" and plan.virtual == 1 else plan.schedule
    if schedule == "auto":
        schedule = "interleaved"
    return [int(rank) for rank in pipelines.build(schedule, plan.pp, microbatches, virtual=plan.virtual).rank_of]


def grow(time: RankTime, compute: RankTime, growth: float) -> RankTime:
    """The times of a stage whose compute takes `growth` times as long."""
    f, i, w, waits = (getattr(compute, name) * (growth - 1) for name in ("f", "i", "w", "waits"))
    return replace(time, f=time.f + f, i=time.i + i, w=time.w + w, waits=time.waits + waits)
