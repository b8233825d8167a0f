"""The page of `mw.formulas`: every function with its formula, and an example that is computed. `python -m formulas_page` writes it."""

import inspect
from pathlib import Path
from typing import Any, NamedTuple

from meshwright import formulas
from meshwright.units import format_bytes, format_count, format_decimal_bytes, format_rate, format_seconds

PAGE = Path(__file__).parents[1] / "formulas.md"


class Example(NamedTuple):
    call: str  # of a function of mw.formulas
    formula: str
    unit: str = ""  # bytes, decimal (bytes), s, rate, flops, count or "": how the result is shown


INTRODUCTION = """# Formulas on your own numbers

`mw.formulas` has the closed forms of distributed training as functions: they are pure, need no torch, and check their arguments.

```python
import meshwright as mw

star = mw.formulas.crossover_size("1us", "450GB/s")
assert round(star) == 450_000  # bytes
```

Values are seconds, bytes, bytes per second, FLOPs and FLOP per second. Wherever a number is taken, a text with its unit is too: `"25MB"`,
`"64MiB"`, `"1.5us"`, `"400Gb/s"`, `"989TFLOP/s"`, `"175B"`. Case matters: `b` is a bit, `B` a byte. A size of zero, ranks that do not divide into
the nodes or a name that does not exist raises a `MeshwrightError` (codes MW-FORM-001 and 002). The functions are the ones that the cost model,
the commands and the page use: no formula stands a second time. `n` is always the full, unsharded buffer. Most of these are also commands:
`meshwright show crossover`, `roofline`, `zero`, `buckets`, `ranks` and `modeler`.

The formulas are bounds and first estimates. [`estimate`](planner.md) counts what they leave out: host time, measured rates, what overlaps,
stages that are not equal.

The names and arguments of this module change only with a [deprecation](stability.md). `make pages` computes this page, and a test compares it.
"""

SECTIONS: dict[str, tuple[str, list[Example]]] = {
    "One message": (
        "α is the latency in seconds, B = 1/β the bandwidth in one direction.",
        [
            Example('message_time("1GB", "1us", "450GB/s")', "α + n·β", "s"),
            Example('crossover_size("1us", "450GB/s")', "n* = α/β = α·B", "decimal"),
            Example('message_regime("100kB", "1us", "450GB/s").name', "latency-bound below n*, else bandwidth-bound"),
            Example(
                'alpha_beta(["1kB", "1MB", "1GB"], ["1.002us", "3.22us", "2.22ms"]).latency_s',
                "robust fit of α + n·β by relative error; also `bandwidth`, `crossover_bytes`, `residual`, `deviation`",
                "s",
            ),
        ],
    ),
    "Collectives": (
        "P ranks, N nodes of g ranks. `formula(operation, algorithm)` returns each formula as text; `meshwright show` lists all. Without an "
        "algorithm the fastest is taken; `segments` defaults to the best number.",
        [
            Example('algorithms("all-reduce")', "those with a closed form"),
            Example('formula("all-reduce", "ring")', "as text"),
            Example('collective_time("all-reduce", "1GB", 8, "1.5us", "450GB/s", "ring")', "2(P−1)α + 2(P−1)/P·nβ", "s"),
            Example('collective_time("all-reduce", "1GB", 8, "1.5us", "450GB/s", "tree")', "2⌈log₂P⌉(α + nβ)", "s"),
            Example(
                'collective_time("all-reduce", "1GB", 64, "1.5us", "450GB/s", "two-level", nodes=8, latency_between="5us", '
                'bandwidth_between="50GB/s")',
                "2(g−1)(α + n/g·β) + 2(N−1)(α' + n/P·β')",
                "s",
            ),
            Example('list(collective_times("all-gather", "1MB", 8, "1.5us", "450GB/s"))', "fastest first"),
            Example('equal_time_size("all-reduce", "tree", "ring", 8, "1.5us", "450GB/s")', "where both take equally long", "decimal"),
            Example('bytes_sent("all-reduce", "10GB", 8)', "2(P−1)/P·n; all-gather, reduce-scatter, all-to-all (P−1)/P·n", "decimal"),
        ],
    ),
    "Roofline": (
        "CCR: FLOPs per byte that a device sends. Use the dense peak and one direction of the link.",
        [
            Example('compute_to_communication("175B", 32 * 2048)', "6·N·tokens / (2·N·bytes) = 3·tokens/bytes"),
            Example('ridge("989TFLOP/s", "450GB/s")', "CCR* = peak / B"),
            Example('[(r.level, round(r.ridge)) for r in cluster_ridges("dgx-h100")]', "for every level, at the achieved rate of a device"),
            Example(
                'roofline_point(1e15, "1GB", "989TFLOP/s", "450GB/s").efficiency',
                "min(1, CCR/CCR*); also `regime`, `advice`, `critical_factor`",
            ),
            Example('roofline_point(1e12, "1GB", "989TFLOP/s", "450GB/s").regime', "below 0.2, 0.8, 1.2 of the ridge, or above"),
            Example('critical_batch("989TFLOP/s", "50GB/s", seq=2048)', "CCR*·2·bytes / (6·seq) sequences per device"),
            Example("tensor_parallel_traffic(1, 2048, 12288, tp=8)", "4 · 2(T−1)/T · b·s·h·bytes, per layer", "decimal"),
        ],
    ),
    "Overlap": (
        "",
        [
            Example('communication_share("10s", "5.6s")', "T_comm / (T_comp + T_comm)"),
            Example('overlap_ratio("3.44ms", "200ms")', "R = T_comm / T_comp: hidden if R ≤ 1"),
            Example('overlapped_step("1s", "200ms")', "T_comp + max(0, T_comm − hideable·T_comp)", "s"),
            Example('optimal_chunks("3.33ms", "5us").chunks', "k* = √(t/o)"),
            Example('chunked_time(16, "3.33ms", "5us")', "k·o + t/k", "s"),
            Example('bucket_count("500MB", "5us", "300GB/s", backward="200ms")', "k* = √(min(nβ, window)/α), none below n*"),
            Example('smallest_bucket("5us", "50GB/s", ranks=8)', "P·α/β", "decimal"),
            Example(
                'ring_attention_step(131072, 8, 32, 128, 8, "400TFLOP/s", "50GB/s")',
                "seconds of one block: 4·a·d·(s/P)²·c / F, and 2·(s/P)·kv·d·bytes / B (c = ½ if causal)",
            ),
        ],
    ),
    "Pipelines": (
        "P stages, M micro-batches, V stages per rank, equal stages. Every schedule of `meshwright show` is accepted.",
        [
            Example('bubble_fraction("1f1b", 4, 8)', "idle / total: (P−1)/(M+P−1)"),
            Example('bubble_overhead("1f1b", 4, 8)', "idle / busy: (P−1)/M"),
            Example('bubble_fraction("interleaved", 4, 8, virtual=2)', "(P−1)/(M·V+P−1)"),
            Example('bubble_fraction("zb-h1", 4, 8)', "the longest chain of the schedule (`programs.pipelines.formulas`)"),
            Example('pipeline_time("1f1b", 4, 8, "10ms", "20ms")', "(M+P−1)(t_f + t_b)", "s"),
            Example('microbatches_in_flight("1f1b", 4, 8)', "P − rank; GPipe: M"),
            Example('microbatches_for_efficiency("1f1b", 4, 0.8)', "M ≥ (P−1)·e/(1−e)"),
            Example('stages_for_efficiency("1f1b", 8, 8, 0.8)', "the most stages with 1 − bubble ≥ e"),
            Example('stage_bandwidth("64MiB", "10.24ms")', "2·message / t", "rate"),
            Example('pipeline_traffic("64MiB", 8, 4)', "2·M·(P−1)·message", "bytes"),
        ],
    ),
    "Memory": (
        "N parameters, P data-parallel ranks; s tokens, b sequences, h hidden, a heads, t tensor-parallel ranks. Korthikanti's six forms per layer: "
        "sbh(34 + 5as/h); with tensor parallelism sbh(10 + 24/t + 5as/(ht)); with sequence parallelism sbh/t·(34 + 5as/h); selective recompute drops "
        "5as/h; full recompute keeps 2sbh, or 2sbh/t. `model_activations` counts the tensors of a model instead.",
        [
            Example('state_memory("7B", ranks=8, stage=0).total', "DDP: 2N + 2N + 12N", "decimal"),
            Example('state_memory("7B", ranks=8, stage=1).total', "ZeRO-1: 4N + 12N/P", "decimal"),
            Example('state_memory("7B", ranks=8, stage=2).total', "ZeRO-2: 2N + 14N/P", "decimal"),
            Example('state_memory("7B", ranks=8, stage=3).total', "ZeRO-3: 16N/P", "decimal"),
            Example('gpus_for_state("175B", "80GB")', "⌈16N / memory⌉"),
            Example('largest_model("80GB")', "memory / 16 parameters", "count"),
            Example("activation_memory(2048, 1, 12288, 96, layers=96)", "L·sbh(34 + 5as/h)", "decimal"),
            Example('activation_memory(2048, 1, 12288, 96, layers=96, tp=8, sequence_parallel=True, recompute="selective")', "L·34sbh/t", "decimal"),
            Example('model_activations("llama2-7b", 4096)', "our tensors of the model, with flash attention", "decimal"),
            Example("kv_cache(4096, layers=80, kv_heads=8, head_dim=128)", "2·kv·d·bytes per token and layer", "bytes"),
            Example("kv_cache(4096, layers=60, latent=512, rope_dim=64)", "MLA: (latent + rope)·bytes", "bytes"),
            Example("kv_cache(32768, layers=32, kv_heads=8, head_dim=128, window=4096)", "min(s, window) positions", "bytes"),
            Example('model_kv_cache("deepseek-v2", 131072)', "layer by layer, states of linear mixers too", "bytes"),
            Example("ring_attention_buffer(131072, 64, 8192, dtype_bytes=1)", "K and V, twice each: 4·(s/P)·width·bytes", "bytes"),
        ],
    ),
    "Scaling laws": (
        "N parameters, D tokens, C FLOPs; losses in nats per token of the authors' data and tokenizer. Constants of Kaplan et al. 2020 (arXiv "
        "2001.08361); Hoffmann et al. 2022 (arXiv 2203.15556), approach 3, as printed; Besiroglu et al. 2024 (arXiv 2404.10102), who fitted the "
        "same data again and agree with the 20 tokens per parameter of Hoffmann's other approaches: the default.",
        [
            Example("kaplan_size_factor(0.5)", "2^(1/0.076): the parameters times this halve the loss"),
            Example('kaplan_loss("175B")', "(8.8·10¹³/N)^0.076"),
            Example('kaplan_loss(tokens="300B")', "(5.4·10¹³/D)^0.095"),
            Example('chinchilla_loss("70B", "1.4T")', "E + A/N^α + B/D^β"),
            Example('chinchilla_loss("70B", "1.4T", fit="hoffmann")', "1.69 + 406.4/N^0.34 + 410.7/D^0.28"),
            Example('optimal_tokens("70B")', "(βB/αA)^(1/β)·N^(α/β)", "count"),
            Example('optimal_tokens("70B", fit="hoffmann")', "the same with the printed constants", "count"),
            Example("compute_optimal(5.76e23).parameters", "G·(C/6)^(β/(α+β)); also `tokens`, `loss`, `source`", "count"),
            Example('training_flops("70B", "1.4T")', "6·N·D"),
        ],
    ),
}  # fmt: skip


NAMES = {name: getattr(formulas, name) for name in formulas.__all__}


def value_of(example: Example) -> Any:
    return eval(example.call, dict(NAMES))


def shown(value: Any, unit: str) -> str:
    match unit:
        case "s":
            return format_seconds(value)
        case "decimal":
            return format_decimal_bytes(value)
        case "bytes":
            return format_bytes(value)
        case "rate":
            return format_rate(value)
        case "count":
            return format_count(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 or abs(value) >= 1e7 else f"{value:,.0f}"
    if isinstance(value, tuple) and all(isinstance(x, float) for x in value):
        return ", ".join(f"{x:.3g}" for x in value)
    if isinstance(value, list | tuple):
        return ", ".join(str(x) for x in value)
    return str(value)


def markdown() -> str:
    parts = [INTRODUCTION]
    for title, (words, examples) in SECTIONS.items():
        lines = ["| call | formula | result |", "| --- | --- | --- |"]
        lines += [f"| `{e.call}` | {e.formula} | {shown(value_of(e), e.unit)} |" for e in examples]
        parts.append("\n\n".join(filter(None, (f"## {title}", words, "\n".join(lines)))) + "\n")
    return "\n".join(parts)


def functions() -> set[str]:
    return {name for name in formulas.__all__ if inspect.isfunction(getattr(formulas, name))}


if __name__ == "__main__":
    PAGE.write_text(markdown(), "utf-8")
