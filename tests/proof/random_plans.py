"""Random legal plans of the planner's space: each folds to a small copy, and the copy is proved.

A plan is drawn level by level of the space, degrees first, so that rare combinations are as frequent as common ones. Fields
that the space does not search are drawn too: the precision of products, a compression or a narrower dtype of gradient messages for every
second plan, documents, dropout and the optimizer.
Every legal plan must fold, and every folded plan must be proved or be refused for a known reason. A failed proof is either a
bug in `parallel` or a false alarm of `verify`; both are failures.

    python tests/proof/random_plans.py --plans 200 --shard 0/16 --failures DIR

proves draws 0, 16, 32, … of the seed, and prints one line for each. Draw i of a seed is always the same plan. The configuration of a failed
draw is written to DIR/SEED-DRAW.toml.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import inexact
import numpy as np

from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.planner.search.space import Space
from meshwright.proof.prove import prove
from meshwright.proof.result import Proof

PROBLEMS = [  # model, GPUs of dgx-h100, batch, sequence
    ("llama3-8b", 16, 32, 2048), ("llama3-70b", 64, 128, 8192), ("qwen2.5-7b", 8, 16, 2048), ("gemma2-9b", 32, 64, 4096),
    ("gpt3-13b", 32, 64, 2048), ("bert-large", 8, 32, 512), ("lecture-mlp", 16, 64, 1), ("mixtral-8x7b", 32, 64, 4096),
    ("qwen1.5-moe-a2.7b", 16, 32, 2048), ("deepseek-v2-lite", 32, 64, 4096), ("deepseek-v3", 256, 512, 4096),
    ("gpt-oss-20b", 16, 32, 4096), ("mistral-7b", 16, 32, 8192),
]  # fmt: skip
PRECISIONS = ("bf16", "fp16", "fp8")
WIRES = [*inexact.KINDS.values(), {"comm_dtype": "bf16"}, {"comm_dtype": "fp16"}, {"comm_dtype": "fp8"}]
REFUSED = {
    "MW-VERIFY-001": "axes at 2 each need more ranks than there are",
    "MW-PAR-001": "planned and costed only",
    "MW-PIPE-041": "fp8 between the halves of a backward, before torch 2.13",
}
RANKS = 8
STEPS = 2


@cache
def space_of(problem: tuple[str, int, int, int]) -> tuple[Config, Space]:
    model, gpus, batch, seq = problem
    config = Config.from_parts(model, "dgx-h100", workload={"batch": batch, "seq": seq})
    config = replace(config, cluster=config.cluster.with_gpus(gpus))
    return config, Space(config)


def drawn(i: int, seed: int = 0) -> Config:
    """The i-th configuration of a seed."""
    random = np.random.default_rng((seed, i))
    config, space = space_of(PROBLEMS[random.integers(len(PROBLEMS))])
    frames = space.frames
    degrees = np.unique(np.stack((frames.tp, frames.cp, frames.pp, frames.dp)), axis=1).T
    tp, cp, pp, dp = degrees[random.integers(len(degrees))]
    rows = frames.take((frames.tp == tp) & (frames.cp == cp) & (frames.pp == pp) & (frames.dp == dp))
    for layer in (lambda rows: rows, space.shaped, space.placed, space.sharded, space.scheduled):
        rows = layer(rows)
        rows = rows.take(np.array([random.integers(len(rows))]))
    plan = space.plan(rows, 0)
    if random.integers(2):
        plan = plan.but(**WIRES[random.integers(len(WIRES))])
    precision = PRECISIONS[random.integers(len(PRECISIONS))]
    workload = config.workload.but(precision=precision)
    plan = plan.but(param_dtype="fp16") if precision == "fp16" else plan
    return with_options(replace(config, plan=plan, workload=workload), random)


def with_options(config: Config, random: np.random.Generator) -> Config:
    """The configuration with documents, dropout and another optimizer, each where it is legal and for some draws only."""
    transformer = config.model.kind == "transformer"
    if random.integers(3) == 0:
        rates = {"attention_dropout": 0.2, "embedding_dropout": 0.1} if transformer else {}
        config = legal(config, model=config.model.but(dropout_rate=0.1, **rates))
    if random.integers(4) == 0:
        optimizer = ("muon", "sgd", "momentum", "adam")[random.integers(4)]
        config = legal(config, workload=config.workload.but(optimizer=optimizer))
    if transformer and random.integers(3) == 0:  # without a token file: samples are random, and have documents
        config = replace(config, data=config.data.model_copy(update={"document_mask": True}))
    return config


def legal(config: Config, **parts: object) -> Config:
    """The configuration with other parts, or itself where those are refused."""
    changed = replace(config, **parts)  # type: ignore[arg-type]
    try:
        changed.check_trainable()
    except MeshwrightError:
        return config
    return changed


def outcome(i: int, seed: int, failures: Path | None = None) -> tuple[str, str]:
    """Prove one draw: "proved", "untold", "refused" or "failed", and what there is to say of it."""
    config = drawn(i, seed)
    said = f"{config.model.name} {config.plan.title()} {config.workload.precision} {config.workload.optimizer}"
    try:
        proof = prove(config, ranks=RANKS, steps=STEPS, seed=i)
        result, why = "proved" if proof.passed else "failed", "" if proof.passed else reason(proof)
        untold = [copy.agreements[0].untold for copy in proof.copies if copy.agreements[0].untold]
        result, why = ("untold", untold[0]) if result == "proved" and untold else (result, why)
    except MeshwrightError as error:
        result = "refused" if error.code in REFUSED else "failed"
        why = error.code if result == "refused" else str(error)[-1500:]
    if result == "failed" and failures is not None:
        failures.mkdir(parents=True, exist_ok=True)
        (failures / f"{seed}-{i}.toml").write_text(config.to_toml())
    return result, f"{said} {why}".rstrip()


def reason(proof: Proof) -> str:
    breaks = [str(b) for agreement in proof.agreements for b in agreement.breaks[:2]]
    rows = [(rank, row) for rank, row in proof.rows if row.unexplained][:3]
    return str((proof.decisive.small.plan.title(), breaks, rows, proof.decisive.unknown, proof.blamed))


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prove random legal plans; exit 1 if a proof fails.")
    parser.add_argument("--plans", type=int, default=200, help="number of draws of all shards together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="0/1", help="I/N: draws I, I + N, I + 2N, …")
    parser.add_argument("--failures", type=Path, default=None, help="folder for the configurations of failed draws")
    chosen = parser.parse_args(arguments)  # type: ignore[arg-type]
    first, count = map(int, chosen.shard.split("/"))
    seen: Counter[str] = Counter()
    for i in range(first, chosen.plans, count):
        started = time.monotonic()
        result, said = outcome(i, chosen.seed, chosen.failures)
        seen[result] += 1
        print(f"{result:8} draw {i} of seed {chosen.seed}, {time.monotonic() - started:.0f} s: {said}", flush=True)
    print(f"shard {chosen.shard}: {dict(seen)}", flush=True)
    return int(seen["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
