"""The closed forms of distributed training on your own numbers: `mw.formulas`.

    import meshwright as mw
    mw.formulas.crossover_size("1us", "450GB/s")                                   # 450000.0 bytes
    mw.formulas.collective_time("all-reduce", "1GB", 8, "1.5us", "450GB/s")        # seconds of the fastest algorithm

Every function is pure and needs no torch. Values are seconds, bytes, bytes/s, FLOPs and FLOP/s; texts with a unit ("25MB", "1.5us", "400Gb/s",
"989TFLOP/s", "175B") are taken wherever numbers are. A number that cannot be (a size of zero, more nodes than ranks) raises a `MeshwrightError`. What
is computed here is computed nowhere else: these functions check their arguments and call the ones that the cost model and the page use.
docs/formulas.md lists all of them with their formulas.
"""

from meshwright.formulas.collectives import (
    algorithms,
    bytes_sent,
    collective_time,
    collective_times,
    equal_time_size,
    formula,
)
from meshwright.formulas.links import AlphaBeta, MessageRegime, alpha_beta, crossover_size, message_regime, message_time
from meshwright.formulas.memory import (
    StateMemory,
    activation_memory,
    gpus_for_state,
    kv_cache,
    largest_model,
    model_activations,
    model_kv_cache,
    ring_attention_buffer,
    state_memory,
)
from meshwright.formulas.overlap import (
    ChunkChoice,
    bucket_count,
    chunked_time,
    communication_share,
    optimal_chunks,
    overlap_ratio,
    overlapped_step,
    ring_attention_step,
    smallest_bucket,
)
from meshwright.formulas.pipelines import (
    bubble_fraction,
    bubble_overhead,
    microbatches_for_efficiency,
    microbatches_in_flight,
    pipeline_time,
    pipeline_traffic,
    stage_bandwidth,
    stages_for_efficiency,
)
from meshwright.formulas.rooflines import (
    LevelRidge,
    RooflinePoint,
    cluster_ridges,
    compute_to_communication,
    critical_batch,
    ridge,
    roofline_point,
    tensor_parallel_traffic,
)
from meshwright.formulas.scaling import (
    ComputeOptimal,
    chinchilla_loss,
    compute_optimal,
    kaplan_loss,
    kaplan_size_factor,
    optimal_tokens,
    training_flops,
)

__all__ = [
    "AlphaBeta",
    "ChunkChoice",
    "ComputeOptimal",
    "LevelRidge",
    "MessageRegime",
    "RooflinePoint",
    "StateMemory",
    "activation_memory",
    "algorithms",
    "alpha_beta",
    "bubble_fraction",
    "bubble_overhead",
    "bucket_count",
    "bytes_sent",
    "chinchilla_loss",
    "chunked_time",
    "cluster_ridges",
    "collective_time",
    "collective_times",
    "communication_share",
    "compute_optimal",
    "compute_to_communication",
    "critical_batch",
    "crossover_size",
    "equal_time_size",
    "formula",
    "gpus_for_state",
    "kaplan_loss",
    "kaplan_size_factor",
    "kv_cache",
    "largest_model",
    "message_regime",
    "message_time",
    "microbatches_for_efficiency",
    "microbatches_in_flight",
    "model_activations",
    "model_kv_cache",
    "optimal_chunks",
    "optimal_tokens",
    "overlap_ratio",
    "overlapped_step",
    "pipeline_time",
    "pipeline_traffic",
    "ridge",
    "ring_attention_buffer",
    "ring_attention_step",
    "roofline_point",
    "smallest_bucket",
    "stage_bandwidth",
    "stages_for_efficiency",
    "state_memory",
    "tensor_parallel_traffic",
    "training_flops",
]
