"""The step times that llm-analysis predicts for a table of runs, as a file for `meshwright validate --beside`.

    pip install llm-analysis
    python benchmarks/llm_analysis_times.py OUT.csv [RUNS.csv]      default: the published runs of dense models that come with Meshwright

Its rates are those that its own page recommends where nothing was measured: half of the peak FLOP/s, nine tenths of the memory bandwidth. Runs
that it cannot describe are left out: cards that it does not have, experts, context parallelism, and batches that do not divide.
"""

import csv
import logging
import sys

from meshwright.calibrate.runs import accuracy, rows
from meshwright.calibrate.runs.row_model import PublishedRun
from meshwright.calibrate.runs.rows import apply_readings, case
from meshwright.calibrate.runs.validate import NOT_FOR_TIME

CARDS = {
    "a100-80gb": "a100-sxm-80gb",
    "a100-40gb": "a100-sxm-40gb",
    "h100-sxm": "h100-sxm-80gb",
    "v100-sxm2-16gb": "v100-sxm-16gb",
}
FLOPS, BANDWIDTH = 0.5, 0.9
RECOMPUTES = {"none": "NONE", "selective": "ATTN_COMPUTE", "full": "FULL"}


def seconds(c: PublishedRun) -> float | None:
    """The predicted seconds of a step; None if it cannot describe the run."""
    from llm_analysis import analysis, config

    m, p, card = c.model, c.plan, CARDS.get(c.cluster.accelerator.name)
    if card is None or m.experts or p.cp > 1 or m.kind != "transformer" or m.attention != "gqa":
        return None
    model = config.ModelConfig(
        name=m.name, num_layers=m.layers, n_head=m.heads, hidden_dim=m.hidden, vocab_size=m.vocab, max_seq_len=int(c.workload.seq),
        num_key_value_heads=m.kv_heads, ffn_embed_dim=m.ffn, mlp_gated_linear_units=m.gated,
    )  # fmt: skip
    sharded = p.shard if p.zero == 3 else 1  # its sharded ranks gather weights for every micro-batch
    bits = 8 if c.workload.precision == "fp8" else 16
    ranks = config.ParallelismConfig(
        tp_size=p.tp, pp_size=p.pp, dp_size=sharded, rdp_size=p.dp // sharded, sp_size=p.tp if p.sp else 1
    )
    tool = analysis.LLMAnalysis(
        model,
        config.get_gpu_config_by_name(card),
        config.DtypeConfig(f"w{bits}a{bits}e16", bits, bits, 16),
        ranks,
        flops_efficiency=FLOPS,
        hbm_memory_efficiency=BANDWIDTH,
    )
    return float(
        tool.training(
            batch_size_per_gpu=p.microbatch,
            global_batch_size=int(c.workload.batch),
            seq_len=int(c.workload.seq),
            activation_recomputation=analysis.ActivationRecomputation[RECOMPUTES[p.recompute]],
            ds_zero=analysis.DSZeRO(p.zero),
            flash_attn=c.stack.attention != "stored",
        )["latency_per_iter"]
    )


def main(out: str, table: str = "") -> None:
    logging.disable(logging.CRITICAL)
    runs = list(rows.read(table)) if table else accuracy.runs()
    cases = [apply_readings(case(row)) for row in runs if row["file"] not in NOT_FOR_TIME and row["recompute_mode"]]
    with open(out, "w", newline="", encoding="utf-8") as file:
        write = csv.writer(file, lineterminator="\n")
        write.writerow(("row_id", "tool", "step_time_s"))
        for c in (c for c in cases if not c.refused and c.step_time):
            try:
                found = seconds(c)
            except (AssertionError, KeyError, ValueError):
                continue
            if found:
                write.writerow((c.row_id, "llm-analysis", f"{found:.4g}"))


if __name__ == "__main__":
    main(*sys.argv[1:3])
