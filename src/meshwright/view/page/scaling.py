"""Scaling over GPU counts: how much faster this plan trains with more data-parallel replicas, and where the network between nodes takes over.

Strong scaling keeps the batch; weak scaling lets it grow with the GPUs. With a fixed batch the compute of a GPU shrinks as 1/GPUs while its gradient
traffic stays, so beyond some count the transfer between nodes takes longer than the compute that could hide it: there inter-node bandwidth
takes over. The complete view adds the best common plan of each size (`planner.search.common_plans`).
"""

import math

from meshwright.describe.result import values_of
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.sensitivity import resized
from meshwright.planner.search.common_plans import best_common_plan
from meshwright.predict.estimate import Estimate, estimate
from meshwright.predict.prediction import samples_per_step
from meshwright.units import Json, format_seconds
from meshwright.view.page.subject import Subject

SMALLER, LARGER = 3, 5  # halvings and doublings of the data-parallel ranks
BEST = (-1, 0, 1)  # doublings at which the best common plan is searched


def data(subject: Subject) -> Json:
    """Both curves of this plan, the best plans of some sizes, and the count at which the network between nodes takes over."""
    e = subject.estimate
    strong, weak = subject.shared.once("scaling", lambda: [curve(e, grows) for grows in (False, True)])
    takes_over, best = crossing(strong), [] if subject.is_provisional else best_plans(subject)
    curves = {"unit": e.model.unit, "strong": strong, "weak": weak, "best": best}
    return curves | {"takes_over": takes_over, "note": note(strong, takes_over)}


def curve(e: Estimate, grows: bool) -> list[Json]:
    """This plan on fewer and more data-parallel ranks: throughput, and seconds of compute and of transfers inside and between nodes. `grows`:
    with a batch in proportion."""
    counts = [e.plan.dp * 2**k if k >= 0 else e.plan.dp / 2**-k for k in range(-SMALLER, LARGER + 1)]
    out: list[Json] = []
    for dp in [int(n) for n in counts if n >= 1 and n == int(n)]:
        if (found := at_size(e, dp, grows)) is not None:
            p, (inside, *between) = found.prediction, [c.seconds for c in found.roofline.ceilings]
            seconds = {"compute_s": p.busy_s.get("compute", 0.0), "inside_s": inside, "between_s": sum(between)}
            size = {"gpus": found.plan.world, "batch": found.workload.batch}
            out.append(size | values_of(p, "step_time_s", "tokens_per_s", "fits") | seconds)
    fewest = next((row for row in out if row["fits"]), out[0] if out else {})
    for row in out:
        per_gpu, first = row["tokens_per_s"] / row["gpus"], fewest["tokens_per_s"] / fewest["gpus"]
        row["efficiency"] = per_gpu / first
        row["formula"] = (
            f"{row['gpus']:,} GPUs, batch {row['batch']:,}: {row['tokens_per_s']:,.0f} {e.model.unit}/s / {row['gpus']:,} = {per_gpu:,.0f} per GPU; "
            f"{per_gpu:,.0f} / {first:,.0f} on {fewest['gpus']:,} GPUs = {row['efficiency']:.0%}"
        )
    return out


def at_size(e: Estimate, dp: int, grows: bool) -> Estimate | None:
    """The plan on `dp` data-parallel ranks; None where it is not legal."""
    plan = resized(e.plan, dp)
    batch = e.workload.batch * dp / e.plan.dp if grows else e.workload.batch
    if plan is None or batch != int(batch):
        return None
    try:
        cluster = e.cluster.with_gpus(plan.world) if plan.world != e.cluster.world else e.cluster
        return estimate(e.config.but(cluster=cluster, plan=plan, workload=e.workload.but(batch=int(batch))))
    except MeshwrightError:
        return None


def best_plans(subject: Subject) -> list[Json]:
    """The best common plan of the plan's size, its half and its double."""
    out = []
    space = subject.shared.space
    for k in BEST:
        gpus = space.cluster.world * 2**k if k >= 0 else space.cluster.world // 2**-k
        if gpus < 1 or (k > 0 and len(space.cluster.levels) == 1):
            continue
        try:
            other = subject.shared.planner_question.space(space.cluster.with_gpus(gpus))
            best, _ = best_common_plan(other, subject.shared.planner_question.headroom)
        except MeshwrightError:
            continue
        if best is not None:
            per_second = samples_per_step(space.config) / best.time
            rate = f"{format_seconds(best.time)} per step = {per_second:,.0f} {space.model.unit}/s"
            title, speed = best.plan.title(), {"gpus": gpus, "step_time_s": best.time, "tokens_per_s": per_second}
            out.append({**speed, "title": title, "formula": f"best common plan on {gpus:,} GPUs: {title}\n{rate}"})
    return out


def crossing(rows: list[Json]) -> Json | None:
    """GPUs at which transfers between nodes take as long as the compute, on straight lines through the logarithms of neighbouring sizes."""
    known = [row for row in rows if row["between_s"] > 0 and row["compute_s"] > 0]
    ratios = [math.log(row["between_s"] / row["compute_s"]) for row in known]
    for k in range(1, len(known)):
        if ratios[k - 1] < 0 <= ratios[k]:
            share = -ratios[k - 1] / (ratios[k] - ratios[k - 1])
            low, high = (math.log(known[j]["gpus"]) for j in (k - 1, k))
            gpus = math.exp(low + share * (high - low))
            words = f"transfers between nodes take as long as compute at about {gpus:,.0f} GPUs"
            return {"gpus": gpus, "formula": f"{words}: inter-node bandwidth takes over"}
    return None


def note(rows: list[Json], takes_over: Json | None) -> str:
    if len(rows) < 2:
        return "This plan is legal on one size only with this batch."
    last = rows[-1]
    words = f"With the same batch, {last['gpus']:,} GPUs keep {last['efficiency']:.0%} of the throughput per GPU"
    if takes_over:
        from_size = f"from about {takes_over['gpus']:,.0f} GPUs on"
        return f"{words}; {from_size}, transfers between nodes take longer than compute."
    across = any(row["between_s"] > 0 for row in rows)
    return f"{words}; {'transfers between nodes stay shorter than compute' if across else 'nothing crosses nodes'}."
