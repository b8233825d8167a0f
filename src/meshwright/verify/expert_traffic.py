"""What expert parallelism sends beside the lowered program, to the byte.

The lowering sends the mean: each rank t·k copies out and as many in. Real routing is uneven, so an all-to-all back carries
what came, and an all-gather over expert_tp is padded to its fullest rank. The layers' `Spread` wrote down, for every
journey of the step, the rows sent, received and padded to; counts and statistics travel in small messages of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.apply import Parallel
from meshwright.parallel.expert import Spread
from meshwright.train.observe import canonical
from meshwright.verify.records import Explanation

COUNT_BYTES = 8
UNEVEN = "real routing is uneven"
COUNTS = "how many copies go where is told first"


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to a routed expert."""
    return ".moe.experts." in name


def expert_parallel(parallel: Parallel) -> Iterator[Explanation]:
    layers = [m for stage in parallel.stages.values() for m in stage.modules() if isinstance(m, MixtureOfExperts)]
    if parallel.model.experts and parallel.plan.pp > 1:
        yield Explanation("the worst load of all stages is told", canonical(parallel.mesh, "pp"), "all_reduce", 1, 32)
    if not layers:
        return
    model, mesh = parallel.model, parallel.mesh
    places = {id(layer.place): layer.place for layer in layers}.values()  # one a stage, and a rank may hold several
    made = [journey for place in places if isinstance(place, Spread) for journey in place.made]
    plan, size = parallel.plan, parallel.pieces[0].local.element_size()
    own = plan.microbatch * parallel.workload.seq // plan.cp // plan.tp
    copies, runs = own * model.top_k * model.router.travelling, len(made)
    row = model.hidden * size
    if mesh.size("ep") > 1:
        ep = canonical(mesh, "ep")
        # Forward and backward make the journey; a layer made again makes it once more, and writes that down.
        more = sum((1 if again else 2) * (sent + received - 2 * copies) for sent, received, _, again in made) * row
        yield Explanation(UNEVEN, ep, "all_to_all", 0, more)
        yield Explanation(COUNTS, ep, "all_to_all", runs, runs * model.experts * COUNT_BYTES)
    if mesh.size("expert_tp") > 1:
        etp, ranks = canonical(mesh, "expert_tp"), mesh.size("expert_tp")
        more = sum((1 if again else 2) * (fullest - copies) for *_, fullest, again in made) * row * ranks
        yield Explanation(UNEVEN, etp, "all_gather", 0, more)
        yield Explanation(UNEVEN, etp, "reduce_scatter", 0, more)
        yield Explanation(COUNTS, etp, "all_gather", runs, runs * model.experts * ranks * COUNT_BYTES)
        partial = [p.local.nbytes for p in parallel.pieces if p.partial == "expert_tp"]
        if partial:
            yield Explanation("biases of split experts are summed", etp, "all_reduce", 1, sum(partial))
    if mesh.size("stage") > 1:
        yield from statistics(parallel, layers, runs)


def statistics(parallel: Parallel, layers: list[MixtureOfExperts], runs: int) -> Iterator[Explanation]:
    """Sums over all tokens of the stage: the load once a step, and what the router's options ask for in each layer."""
    stage, experts = canonical(parallel.mesh, "stage"), parallel.model.experts
    options, wide = layers[0].router.options, max(4, parallel.pieces[0].local.element_size())
    yield Explanation("the routers' load is summed", stage, "all_reduce", 1, len(layers) * 2 * experts * COUNT_BYTES)
    if options.aux or options.z:
        yield Explanation("the balancing loss is of all tokens", stage, "all_reduce", runs, runs * (experts + 1) * wide)
