"""What expert parallelism sends beside the lowered program, to the byte.

The lowering sends the mean: each rank t·k copies out and as many in. Real routing is uneven, so an all-to-all back carries
what came, and an all-gather over expert_tp is padded to its fullest rank. The layers' `Spread` wrote down, for every
journey of the step, the rows sent, received and padded to.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.apply import Parallel
from meshwright.parallel.expert import Spread
from meshwright.train.observe import canonical
from meshwright.verify.records import Explanation

UNEVEN = "real routing is uneven"
SCALED = "an expert's fp8 operands have one scale on all ranks"


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to a routed expert."""
    return ".moe.experts." in name


def expert_parallel(parallel: Parallel) -> Iterator[Explanation]:
    layers = [m for stage in parallel.stages.values() for m in stage.modules() if isinstance(m, MixtureOfExperts)]
    if not layers:
        return
    model, mesh = parallel.model, parallel.mesh
    places = {id(layer.place): layer.place for layer in layers}.values()  # one a stage, and a rank may hold several
    made = [journey for place in places if isinstance(place, Spread) for journey in place.made]
    plan, size = parallel.plan, parallel.pieces[0].local.element_size()
    own = plan.microbatch * parallel.workload.seq // plan.cp // plan.tp
    copies = own * model.top_k * model.router.travelling
    row = model.hidden * size
    if mesh.size("ep") > 1:
        ep = canonical(mesh, "ep")
        # Forward and backward make the journey; a layer made again makes it once more, and writes that down.
        more = sum((1 if again else 2) * (sent + received - 2 * copies) for sent, received, *_, again in made) * row
        yield Explanation(UNEVEN, ep, "all_to_all", 0, more)
    if mesh.size("expert_tp") > 1:
        etp, ranks = canonical(mesh, "expert_tp"), mesh.size("expert_tp")
        more = sum((1 if again else 2) * (fullest - copies) for *_, fullest, again in made) * row * ranks
        yield Explanation(UNEVEN, etp, "all_gather", 0, more)
        yield Explanation(UNEVEN, etp, "reduce_scatter", 0, more)
        if parallel.workload.precision == "fp8":  # an expert's scale for each of its weights, a row's before `down`
            weights = 3 if model.gated else 2
            scales = sum(weights * model.experts // mesh.size("ep") + rows for _, _, rows, *_ in made)
            yield Explanation(SCALED, etp, "all_reduce", weights * len(made), 4 * scales)
