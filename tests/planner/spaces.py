"""Small problems whose whole space can be written down, and the name of a plan without its twins."""

from meshwright.describe import catalog
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Config
from meshwright.describe.mixer_options import LinearOptions
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.planner.search import choices as chosen
from meshwright.planner.search.space import Space

DENSE = Model(
    name="dense", hidden=512, layers=6, heads=8, kv_heads=4, ffn=1024, vocab=2048, activation="swiglu", tied=False
)
TIED = Model(name="tied", hidden=256, layers=4, heads=4, ffn=1024, vocab=4096, activation="gelu", tied=True)
MOE = Model(
    name="moe",
    hidden=256,
    layers=5,
    heads=8,
    ffn=512,
    vocab=1024,
    activation="swiglu",
    experts=4,
    top_k=2,
    expert_ffn=256,
    dense_layers=1,
)
HYBRID = Model(
    name="hybrid",
    hidden=256,
    layers=6,
    heads=8,
    ffn=512,
    vocab=1024,
    pattern="M- ME *-",
    linear=LinearOptions(kind="mamba2", heads=8, head_dim=64, groups=4, state=32, conv=4),
    experts=4,
    top_k=2,
    expert_ffn=256,
    mtp_layers=1,
)
MODELS = {m.name: m for m in (DENSE, TIED, MOE, HYBRID)}


def cluster(gpus: int, memory: str = "", name: str = "dgx-a100", node: int = 4) -> Cluster:
    """Nodes of four, so that a few devices already span levels."""
    c = catalog.load("clusters", name)
    levels = (c.levels[0].but(size=node), c.levels[1].but(size=2), c.levels[2])
    device = c.accelerator.but(memory=memory) if memory else c.accelerator
    return Cluster(**{**c.as_dict(), "levels": levels, "gpus": gpus, "accelerator": device})


def space(
    model: Model,
    gpus: int = 8,
    batch: int = 8,
    seq: int = 256,
    stack: str = "default",
    memory: str = "",
    **fields: list[str],
) -> Space:
    kit: Stack = catalog.load("stacks", stack).but(can={})  # the costs of the stack, without its framework's limits
    if stack == "default":
        # As benchmarked: with the typical host times the host would bound every plan of these small models.
        rates = {"products": 1, "attention_rate": 1, "elementwise": 1, "network": 1, "hides": 0.85}
        kit = kit.but(launch="20us", collective_launch="20us", **rates)
    base = Plan()
    options = chosen.choices(base, chosen.read(**fields), tuple(kit.order))
    return Space(
        Config(model, cluster(gpus, memory), workload=Workload(batch=batch, seq=seq), stack=kit, plan=base),
        options,
        bucket=25e6,
    )


def placement(where: Space, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The number of members of each group in each unit of the cluster: the effect of an order."""
    sizes = {"tp": plan.tp, "cp": plan.cp, "pp": plan.pp, "dp": plan.dp}
    inside, stride = {}, 1
    for axis in plan.order or where.stack.order:
        inside[axis] = tuple(min(sizes[axis], max(1, unit // stride)) for unit in where.cluster.spans[:-1])
        stride *= sizes[axis]
    return tuple(inside[axis] for axis in sizes)


def name(where: Space, plan: Plan) -> tuple[object, ...]:
    """A plan without what makes no difference: twins have one name."""
    zero = plan.zero if plan.shard * plan.cp > 1 else 0
    if zero == 2 and (plan.pp > 1 or not plan.reduces_each):  # a pipeline reduces once per step
        zero = 1
    gathers_each = zero == 3 and plan.pp == 1  # the stages of a pipeline keep weights gathered
    looped = {"looped-bfs": "gpipe", "interleaved-zb": "zb-h1"}
    schedule = looped.get(plan.schedule, plan.schedule) if plan.virtual == 1 else plan.schedule
    return (
        plan.tp,
        plan.cp,
        plan.pp,
        plan.replicate,
        plan.shard,
        plan.tp > 1 and plan.sp,
        plan.cp > 1 and plan.cp_kind,
        plan.ep,
        plan.etp,
        plan.microbatch,
        plan.recompute,
        zero,
        gathers_each and plan.reshard,
        gathers_each and plan.reduces_each,
        plan.pp > 1 and (schedule, plan.virtual),
        placement(where, plan),
    )
