"""The band of a predicted step time: how far measured times of runs that the fit has not seen are from their predictions.

    low, high = t · exp(−q_low · w),  t · exp(q_high · w)

    w² = base² · (1 + (doubt of the device / 7%)²) + (6 · share of communication between nodes)² + (share of communication inside nodes)²
       + (4 · share of the host)² + (6 · share of experts)² + (8.5 · share of an unpublished network)²

The width w grows with what is least certain: exposed communication between nodes (its overlap, its congestion, the network of a cluster), experts
(their kernels, dispatch and balance differ by stack and version), time in which the device waits for its host, and shares of peak of a device
that were assumed (`Efficiency.doubt`). Communication inside a node is as certain as compute. The base is 1, and 2 for an unknown stack: there
the compute is less certain too, on a new device most of all, so that what communication adds counts for less. The quantiles q depend on what is
known of the stack (`Stack.evidence`): nothing (`typical`), published runs of the same stack (`published`), or runs of the user of a stack of the
catalog (`calibrated`, as are stacks whose host times were measured on this machine) or of another one (`calibrated-typical`). `meshwright calibrate
--runs` computes them from the residuals of left-out sources (`calibrate.runs.accuracy`), so that each band holds 90% of the runs.
A network may be worse than its datasheet where nobody measured it: an all-reduce of 256 MB took 8 ms on 256 GPUs of a cloud, and 16 ms on 512. A
plan on more devices than the largest published run or collective of its network (`Cluster.published`), or than its calibration measured, has a
band that holds twice the time of all communication between nodes, hidden or not.
A device that was never measured has a wider band: its shares of peak may be the best or the worst of the measured ones.
"""

import math
from collections.abc import Collection, Mapping

from meshwright.describe.axes import strides
from meshwright.describe.cluster import Cluster
from meshwright.describe.files import fitted
from meshwright.describe.plan import Plan
from meshwright.describe.result import AXES
from meshwright.describe.stack import Stack

BETWEEN_DOUBT, INSIDE_DOUBT, HOST_DOUBT, EXPERT_DOUBT = 6.0, 1.0, 4.0, 6.0
FABRIC_DOUBT = 8.5  # the inverse of the quantile of a published stack: that share of the step more
LEAST_DOUBT = 0.07  # of ln seconds: a step that only computes, on a measured device
# Of two plans of one training, in ln(t_a / t_b): any two, and for what differs between them. See `difference_doubt`.
PLAN_DOUBT = 0.055
COMMUNICATION_DOUBT, WAITING_DOUBT, BUBBLE_DOUBT, COMPUTE_DOUBT = 0.60, 0.34, 0.10, 0.10
ONE_OF_TEN, NINE_INSIDE = (
    1.6,
    2.4,
)  # standard deviations: one tenth lies above the first, nine tenths between ± the second
# A device that was never measured has the median shares of the measured ones (`describe.cluster.Efficiency`). Its true shares may be
# their best in matrix products (0.79 instead of 0.66) or their worst in fused attention (0.35 instead of 0.39).
UNMEASURED = (0.66 / 0.79, 0.39 / 0.35)


def width(
    exposed: Mapping[str, float],
    inside: Collection[str],
    evidence: str = "published",
    device_doubt: float = 0.0,
    unpublished: float = 0.0,
) -> float:
    """The width of the band of a step relative to that of a step that only computes, on a measured device with a known stack. `inside` are the
    axes whose communication stays inside nodes; `unpublished` is the share of the step of communication over a network that nobody measured at this
    size."""
    total = max(sum(exposed.values()), 1e-30)
    within = sum(exposed.get(axis, 0.0) for axis in inside) / total
    communication, host, _ = shares(exposed)
    parts = (
        BETWEEN_DOUBT * (communication - within),
        INSIDE_DOUBT * within,
        HOST_DOUBT * host,
        EXPERT_DOUBT * expert_share(exposed),
        base(evidence) * device_doubt / LEAST_DOUBT,
        FABRIC_DOUBT * unpublished,
    )
    return math.hypot(base(evidence), *parts)


def beyond_published(plan: Plan, cluster: Cluster) -> bool:
    """Whether a plan has more devices than any published run, published collective or calibration of its network."""
    known = max(cluster.published, *(call.ranks for call in cluster.measured), cluster.node_size)
    return plan.world > known


def unpublished_share(
    exposed: Mapping[str, float], hidden: Mapping[str, float], inside: Collection[str], plan: Plan, cluster: Cluster
) -> float:
    """The share of a step of the communication between nodes, hidden or not, if nobody published measurements of the network at this size."""
    if not beyond_published(plan, cluster):
        return 0.0
    between = [axis for axis in AXES if axis not in inside]
    seconds = sum(exposed.get(axis, 0.0) + hidden.get(axis, 0.0) for axis in between)
    return seconds / max(sum(exposed.values()), 1e-30)


def base(evidence: str) -> float:
    """The width of a step that only computes, by what is known of its stack."""
    return 2.0 if evidence == "typical" else 1.0


def inside_nodes(plan: Plan, stack: Stack, cluster: Cluster) -> tuple[str, ...]:
    """The axes whose groups lie inside nodes: all of them on one node; on several, tp and cp if their ranks are neighbours there."""
    if plan.world <= cluster.node_size:
        return AXES
    steps = strides(plan, plan.order or stack.order)
    return tuple(axis for axis in ("tp", "cp") if steps[axis] * getattr(plan, axis) <= cluster.node_size)


def expert_share(exposed: Mapping[str, float]) -> float:
    """The share of a step in which experts and their router compute."""
    return sum(exposed.get(part, 0.0) for part in ("experts", "router")) / max(sum(exposed.values()), 1e-30)


def shares(exposed: Mapping[str, float]) -> tuple[float, float, float]:
    """Return the shares of a step: exposed communication, waiting for the host, idle in the pipeline."""
    total = max(sum(exposed.values()), 1e-30)
    communication = sum(exposed.get(axis, 0.0) for axis in AXES)
    return communication / total, exposed.get("host", 0.0) / total, exposed.get("bubble", 0.0) / total


def difference_doubt(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """Scale of the error of a predicted ln(t_a / t_b) of two plans of one training, from their exposed seconds for the same number of tokens.

        doubt² = PLAN_DOUBT² + Σ (doubt of part · (a_part − b_part) / √(t_a · t_b))²

    Errors common to both cancel, what the plans do not share has the doubt of its kind. The numbers are those under which 2,653 pairs of published
    runs are most likely (same source, model, GPUs and sequence; errors of Student's t with 4 degrees of freedom). Of the pairs of a source that the
    fit has not seen, 66 to 100% lie inside the band that should hold 90%. Idle time of a pipeline adds nothing there: its doubt is that of the fit of
    stacks."""
    scale = math.sqrt(max(sum(a.values()) * sum(b.values()), 1e-30))
    kinds = {**dict.fromkeys(AXES, COMMUNICATION_DOUBT), "host": WAITING_DOUBT, "bubble": BUBBLE_DOUBT}
    parts = {*a, *b}
    changes = (kinds.get(part, COMPUTE_DOUBT) * (a.get(part, 0.0) - b.get(part, 0.0)) / scale for part in parts)
    return math.hypot(PLAN_DOUBT, *changes)


def indistinguishable(a: Mapping[str, float], b: Mapping[str, float]) -> bool:
    """Whether two plans could swap their measured order in more than one of ten cases."""
    difference = abs(math.log(max(sum(a.values()), 1e-30) / max(sum(b.values()), 1e-30)))
    return difference < ONE_OF_TEN * difference_doubt(a, b)


def quantiles(evidence: str) -> tuple[float, float]:
    """Return the fitted quantiles q_low and q_high for this kind of evidence about the stack."""
    table = fitted()["bands"][evidence]
    return float(table["low"]), float(table["high"])


def band(
    stack: Stack, exposed: Mapping[str, float], hidden: Mapping[str, float], plan: Plan, cluster: Cluster
) -> tuple[float, float]:
    """Factors on the predicted step time: the band holds nine of ten measured times."""
    device, inside = cluster.accelerator.efficiency, inside_nodes(plan, stack, cluster)
    unpublished = unpublished_share(exposed, hidden, inside, plan, cluster)
    w = width(exposed, inside, stack.evidence, device.doubt, unpublished)
    low, high = quantiles(stack.evidence)
    edges = (1.0, 1.0) if device.measured else UNMEASURED
    return math.exp(-low * w) * edges[0], math.exp(high * w) * edges[1]
