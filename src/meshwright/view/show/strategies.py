"""`meshwright show strategies`: what each form of parallelism splits and sends, and when to use it.

Volumes are elements **sent** by one GPU in one step by bandwidth-optimal algorithms: an all-reduce of n sends
2(D−1)/D·n, an all-gather or reduce-scatter of a full buffer n sends (D−1)/D·n. N parameters, L layers; B sequences of
S tokens per GPU, hidden size H; D data-parallel, T tensor-parallel, C context-parallel, P pipeline ranks, E
expert-parallel ranks, k experts per token, M micro-batches. Bytes of state are for bf16 with Adam and fp32 master
weights: 2 + 2 + 12 = 16 per parameter.
"""

from typing import Any, NamedTuple

from rich.text import Text

from meshwright.view.tables import facts, filled, heading


class Strategy(NamedTuple):
    name: str
    splits: str
    collective: str
    when: str
    volume: str
    overlap: str
    state: str
    use: str


STRATEGIES = [Strategy(*row) for row in (
    ("data parallel (DDP)", "the batch", "all-reduce of gradients", "in backward, bucket by bucket", "2(D−1)/D · N",
     "yes, behind backward", "16N", "the state fits one GPU (5B parameters in 80 GB): start here"),
    ("ZeRO-1", "+ optimizer state", "reduce-scatter of gradients, all-gather of parameters", "in backward; after the update",
     "2(D−1)/D · N", "yes", "4N + 12N/D", "nearly always instead of DDP: same bytes, a quarter of the state"),
    ("ZeRO-2", "+ gradients", "as ZeRO-1, with a reduce-scatter per micro-batch", "in backward; after the update",
     "(M+1)(D−1)/D · N", "yes", "2N + 14N/D", "gradients do not fit; costs traffic when micro-batches accumulate"),
    ("ZeRO-3 (FSDP)", "+ parameters", "all-gather twice, reduce-scatter once", "before each layer forward and backward; after its backward",
     "3(D−1)/D · N, for each micro-batch", "mostly: the next layer is fetched early", "16N/D",
     "the model does not fit; 1.5× DDP's bytes"),
    ("HSDP", "ZeRO-3 in groups of D, replicated R times", "FSDP in a group, all-reduce of shards between groups",
     "as FSDP; the all-reduce once per step",
     "3(D−1)/D · N inside, 2(R−1)/R · N/D between", "mostly", "16N/D", "many nodes: sharding stays on fast links"),
    ("tensor parallel", "every matrix", "all-reduce of activations", "2 forward and 2 backward per layer", "8(T−1)/T · BSH per layer",
     "no: on the critical path", "16N/T", "layers too large or batch too small; inside the NVLink domain, T ≤ 8"),
    ("+ sequence parallel", "activations between the matrices", "all-gather and reduce-scatter instead", "where the all-reduce was",
     "the same", "little", "16N/T", "with tensor parallel: activations ÷ T, the same bytes forward; one more gather backward"),
    ("context parallel", "the sequence", "ring of K and V (point-to-point), or all-gather", "in every attention",
     "2(C−1)/C · BS·H_kv per layer forward, twice that backward", "yes, behind attention", "16N (shards with data)",
     "sequences above about 32k tokens; shorter ones if the batch is too small for more data parallelism"),
    ("pipeline parallel", "the layers", "point-to-point of activations", "at stage boundaries, each micro-batch",
     "2 · BSH per boundary (all micro-batches together)", "mostly", "16N/P", "across nodes; needs M well above P: bubble (P−1)/(M+P−1)"),
    ("expert parallel", "the experts", "all-to-all of tokens", "dispatch and combine, forward and backward",
     "4k(E−1)/E · BSH per MoE layer", "partly", "experts ÷ E", "mixture-of-experts models"),
)]  # fmt: skip

RULES = (
    ("fast links first", "tensor and sequence inside a node; context, then pipeline, then data across nodes"),
    (
        "start simple",
        "DDP or ZeRO-1 → FSDP → tensor parallel in the node → pipeline → expert and context where the model needs them",
    ),
    ("count the state", "16 bytes per parameter: 7B is 112 GB, 70B 1.12 TB, 175B 2.8 TB, before activations"),
    (
        "count the bubble",
        "overhead (P−1)/M, fraction (P−1)/(M+P−1): 4 stages and 16 micro-batches lose 15.8% of the step; 1F1B saves memory, not bubble",
    ),
    ("measure", "trust a plan only when a run confirms `meshwright estimate`"),
)
LETTERS = (
    "\nN parameters · B sequences of S tokens per GPU · H hidden, H_kv K or V width · D, T, C, P, E ranks · "
    "k experts per token · M micro-batches"
)


def data(topic: str = "strategies") -> list[dict[str, str]]:
    """Return what `--json` prints."""
    return [strategy._asdict() for strategy in STRATEGIES]


def page(topic: str = "strategies") -> list[Any]:
    """The tables."""
    what = [(Text(s.name, "bold"), s.splits, Text(s.collective, "cyan"), s.when, s.volume) for s in STRATEGIES]
    use = [(Text(s.name, "bold"), s.overlap, Text(s.state, "cyan"), Text(s.use, "dim")) for s in STRATEGIES]
    return [
        heading("What is split, and what is sent", "elements sent by one GPU in one step"),
        filled(["strategy", "what is split", "collective", "when", "volume"], what),
        heading("When to use it", "bytes of state on one GPU: bf16, Adam, fp32 master weights"),
        filled(["strategy", "overlaps", "state", "when to use"], use),
        facts(RULES),
        Text(LETTERS, "dim"),
    ]
