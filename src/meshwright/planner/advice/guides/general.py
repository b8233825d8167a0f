"""Textbook decision guides: each is a function from a problem to a recommendation.

The guides come from two texts, "Distributed Training Basics" and "A Guide to Distributed Training"; each recommendation names its section. Where a
figure in a text is wrong, the function uses the correct figure and the recommendation says so:

    state          16 bytes per parameter (2 + 2 + 12), so 7B needs 112 GB and DDP ends at 2.5B on 40 GB and 5B on 80 GB
    ZeRO at P = 8  7B: ZeRO-1 38.5, ZeRO-2 26.25, ZeRO-3 14 GB
    bubble         overhead (P−1)/M, fraction (P−1)/(M+P−1): M ≥ 4·P keeps the fraction below 20%; the guide shows the walked
                   fraction, as `estimate` does
"""

from meshwright.errors import MeshwrightError
from meshwright.planner.advice.guides.problem import Advice, GuideProblem, guide
from meshwright.planner.search.common_plans import first_that_fits
from meshwright.units import format_count, format_decimal_bytes, format_rate

SMALL, LARGE = 10e9, 100e9  # parameters: where the guides change their advice
LONG = 65_536  # tokens: "long context 64K–1M"
VERY_LONG = 100_000  # tokens: "sequences of 100K+"
LIMITS = (
    "16 bytes a parameter: 7B needs 112 GB (not 84 or 140) and 70B 1,120 GB; DDP ends at 2.5B on 40 GB and 5B on 80 GB"
)


@guide("size vs memory", "Distributed Training Basics, Strategy Selection; A Guide to Distributed Training, 7.7")
def size_against_memory(s: GuideProblem) -> Advice:
    """Replicate a model whose state fits one device; shard a larger one."""
    fits_one = s.state < s.memory
    ddp = s.shaped() if fits_one else None
    plan = ddp if s.fits(ddp) else s.shaped(zero=3)
    compares = "below" if fits_one else "above"
    verdict = "replicate it" if plan == ddp and plan else "shard it over all devices"
    reason = f"{format_decimal_bytes(s.state)} of state is {compares} the {format_decimal_bytes(s.memory)} of one device: {verdict}{s.aside(plan)}"
    return Advice(plan, reason, "7B: 80 GB is sufficient → DDP; 70B: model parallelism required", LIMITS)


@guide("topology", "Distributed Training Basics, Strategy Selection")
def topology(s: GuideProblem) -> Advice:
    """Place the axis with the most traffic on the fastest level."""
    if s.model.kind != "transformer":
        return Advice(s.shaped(), "no heads to split: data parallel on every level")
    if s.nodes == 1:
        plan = s.first_fitting(s.shaped(tp=t, zero=1) for t in (2, 4, s.node))
        node = f"one node of {s.node}" + (
            " on NVLink" if s.fast_inside else f" at {format_rate(s.cluster.device_bandwidth(0))}"
        )
        return Advice(
            plan,
            f"{node}: as much tensor parallelism as memory needs, data parallelism over the other ranks",
            "single node 8 GPU NVLink: TP=8 or TP=2–4 + DP",
            "" if s.fast_inside else "without NVLink this advice is wrong: see the tensor guide",
        )
    if s.slow_between:
        wished = [s.shaped(zero=3), s.first_fitting(s.shaped(tp=1, pp=p, zero=1) for p in (2, 4, 8, 16, 32))]
        plan = s.fastest(wished)
        kind = "pipeline" if plan and plan.pp > 1 else "FSDP"
        return Advice(
            plan,
            f"{format_rate(s.between)} a device between nodes: {kind} is the faster of FSDP and pipeline",
            "cloud Ethernet: FSDP or pipeline",
        )
    plan = s.first_fitting(s.shaped(tp=s.node, pp=p, zero=1) for p in (1, 2, 4, 8, 16, 32))
    return Advice(
        plan,
        f"{s.nodes} nodes at {format_rate(s.between)} a device: tensor parallel inside, "
        "as many pipeline stages between nodes as memory needs, data parallel over the other ranks",
        "multiple nodes InfiniBand: TP intra-node, DP/PP inter-node",
        "TP=8 is not always needed: small models lose more to its communication than they gain",
    )


@guide("batch (training)", "Distributed Training Basics, Strategy Selection")
def batch_size(s: GuideProblem) -> Advice:
    """Use large batches and many micro-batches; a bubble of 10 to 20% is acceptable."""
    base = practical_tree(s).plan
    plan = s.with_recompute(base) if base else None
    if plan is not None and plan.pp > 1 and (small := plan.but(microbatch=1)) and s.fits(small):
        plan = small
    reason = "no pipeline: accumulate only if the batch does not fit in memory"
    if plan is not None and plan.pp > 1 and (e := s.trial.of(plan)):
        m = plan.microbatches(s.workload)
        verdict = "acceptable" if e.bubble_fraction <= 0.2 else "too much: raise the batch"
        reason = f"{m} micro-batches through {plan.pp} stages: bubble fraction {e.bubble_fraction:.0%}, {verdict}"
    return Advice(
        plan,
        reason,
        "large batches, aggressive accumulation, pipeline bubble 10–20% acceptable",
        "accumulation helps a pipeline; without one it only adds kernel launches (the same text lists it as an anti-pattern)",
    )


@guide("architecture", "Distributed Training Basics, Strategy Selection; A Guide to Distributed Training, 11")
def architecture(s: GuideProblem) -> Advice:
    """Choose by the kind of model: long sequences, experts, or dense."""
    if s.model.kind != "transformer":
        return Advice(s.shaped(), "not a transformer: only data parallelism is planned")
    if s.workload.seq >= VERY_LONG:
        plan = s.first_fitting(s.shaped(tp=s.node, cp=c, zero=1) for c in (2, 4, 8, 16, 32))
        return Advice(
            plan,
            f"sequences of {s.workload.seq:,} tokens: split them by context parallelism",
            "long sequences 100K+: sequence parallelism",
            "transfers are hidden only if the attention of a block takes longer than its transfer; the guide's µs should be ms",
        )
    if s.moe:
        tries = [s.shaped(tp=t, pp=p, ep=s.model.experts, zero=1) for p in (1, 2, 4, 8, 16) for t in (1, s.node)]
        return Advice(
            s.first_fitting(tries),
            f"{s.model.experts} experts: expert parallelism, tensor or pipeline parallelism for the dense layers if memory needs it",
            "MoE: expert parallelism + TP/PP for dense layers",
            "expert parallelism re-uses the data-parallel ranks and adds no GPUs; its traffic grows with top-k",
        )
    plan = s.first_fitting(s.shaped(tp=s.node, pp=p, zero=1) for p in (1, 2, 4, 8, 16))
    return Advice(
        plan, "a dense transformer can be split by heads and by layers", "transformer: suitable for tensor and pipeline"
    )


@guide("typical configuration", "Distributed Training Basics, Typical Configurations")
def typical_configuration(s: GuideProblem) -> Advice:
    """Choose degrees by the size of the model."""
    n = s.model.total
    size = f"{format_count(n)} parameters"
    if s.workload.seq >= LONG:
        return Advice(
            s.shaped(tp=8, cp=4, zero=1),
            f"{s.workload.seq:,} tokens of context: cp 4, tp 8, dp over the other ranks",
            "long context 64K–1M: SP=4 × TP=8 × DP=8 = 256 GPUs",
        )
    if s.moe and n >= LARGE:
        plan = s.first_fitting(s.shaped(tp=4, pp=p, ep=64, zero=1) for p in (1, 2, 4, 8, 16))
        return Advice(
            plan,
            f"a mixture of experts of {size}: experts over up to 64 ranks, tp 4 for the dense layers",
            "MoE: 64 experts on 64 GPUs + TP=4 = 256 GPUs",
            "the 64 ranks of the experts are among the 256",
        )
    if n < SMALL:
        plan, is_ddp = s.replicated()
        kind = "DDP" if is_ddp else "FSDP, since memory is tight"
        return Advice(
            plan, f"{size}: {kind}{s.aside(plan)}", "1–10B: pure DDP on 8–64 GPUs; FSDP if memory is tight", LIMITS
        )
    if n < LARGE:
        return Advice(
            s.fastest([s.shaped(zero=3), s.shaped(tp=min(8, s.node), zero=1)]),
            f"{size}: the faster of FSDP and tp {min(8, s.node)} + dp that fits",
            "10–70B: FSDP (ZeRO-3) or TP=4–8 intra-node + DP inter-node",
            "the text gives no advice from 70B to 100B; we apply this up to 100B",
        )
    plan = s.first_fitting(s.shaped(tp=8, pp=p, zero=1) for p in (8, 16))
    return Advice(plan, f"{size}: tp 8, pp 8 to 16, dp over the other ranks", "100B–1T: TP=8 × PP=8–16 × DP=16+")


@guide("practical tree", "A Guide to Distributed Training, 12.5")
def practical_tree(s: GuideProblem) -> Advice:
    """Choose by size, then by whether the state fits one node, then by dense or mixture of experts."""
    n = s.model.total
    size = format_count(n)
    if n < SMALL:
        plan, is_ddp = s.replicated()
        kind = "DDP" if is_ddp else "FSDP"
        return Advice(plan, f"{size} is below 10B: {kind}{s.aside(plan)}", "< 10B: use DDP or FSDP")
    if n < LARGE:
        wished, advice = [s.shaped(tp=8, pp=p, zero=3) for p in (2, 4)], "it does not fit one node: add a pipeline"
        if s.state < s.node * s.memory:
            wished = [s.shaped(tp=t, zero=3) for t in (2, 4, 8)]
            advice = "it fits one node: tensor parallel inside, FSDP across"
        return Advice(
            s.first_fitting(wished),
            f"{size} is between 10B and 100B; {advice}",
            "10B–100B: single node fit? TP=2–8 + FSDP; else TP=8 + PP=2–4 + FSDP",
            "FSDP with a pipeline gathers every layer once per micro-batch; ZeRO-1 is the usual choice",
        )
    wished = [s.shaped(tp=8, pp=p, zero=1, ep=s.model.experts if s.moe else 1) for p in (8, 16)]
    kind = "MoE: 3D + expert parallel" if s.moe else "dense: full 3D"
    return Advice(
        s.first_fitting(wished),
        f"{size} is above 100B, {kind}",
        "> 100B: dense TP=8 + PP=8–16 + DP; MoE: EP + TP + PP + DP",
    )


@guide(
    "start simple",
    "Distributed Training Basics, Key Takeaways; A Guide to Distributed Training, 13",
    "DDP → FSDP → tensor → pipeline → 3D: each step adds complexity",
)
def start_simple(s: GuideProblem) -> Advice:
    """The first strategy that fits, from simple to complex: DDP → FSDP → tensor → pipeline → 3D."""
    try:
        plan = first_that_fits(s.config)
    except MeshwrightError as error:
        return Advice(None, f"no strategy is legal: {error.what}")
    plan = plan.but(bucket=s.bucket(plan.dp * plan.cp))
    verdict = "the simplest strategy that fits" if s.fits(plan) else "no strategy fits; the closest"
    return Advice(
        plan,
        f"{verdict}: {plan.title()}",
        correction="ZeRO-1 belongs between DDP and FSDP: it saves most of the state for the same bytes",
    )
