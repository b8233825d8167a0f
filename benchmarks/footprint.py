"""Memory and traffic of the plans of the parity matrix: what the cost model predicts for a rank, and what a training step takes and sends.

    python benchmarks/footprint.py [WORD …]        plans whose title has all of the words; default: all with at most four ranks

Every strategy, schedule, legal pair and triple of `tests/proof/layouts.py` trains two steps of a model of the demo's size on CPU processes. The second
one is observed: bytes of live tensors, and the collectives with the sizes of their groups. Both are of the fullest rank, as in the report of `train`.
Nothing is fitted: the stack is `gloo-cpu`, and the prediction reads neither run.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.training.launch import local

RANKS = 4
TOGETHER = 30  # plans that train one after the other in the same processes
SMALL: Model = catalog.load("models", "nano")
EXPERTS = SMALL.but(experts=4, top_k=2, expert_ffn=96)
WORKLOAD = {"batch": 16, "seq": 64, "precision": "fp32"}
FP32 = {"param_dtype": "fp32", "master": False}
AIM = 0.10


def plans(words: list[str]) -> list[Config]:
    """The layouts of the parity matrix on the demo's model; a layout that this model cannot have is left out."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "proof"))
    import layouts

    out: dict[str, Config] = {}
    for model, fields in [*layouts.single_strategies(), *layouts.pairs(), *layouts.TRIPLES]:
        if layouts.MODELS[model].kind != "transformer" or "layers_per_stage" in fields:
            continue
        demo = EXPERTS if layouts.MODELS[model].experts else SMALL
        fields = {key: value for key, value in fields.items() if key != "bucket"}
        try:
            config = Config.from_parts(demo, "laptop", "gloo-cpu", WORKLOAD, {"microbatch": 2, **FP32, **fields})
            config.check_trainable()
        except MeshwrightError:
            continue
        title = config.plan.title().replace(" · parameters kept in fp32", "")
        title += f" · virtual {config.plan.virtual}" if config.plan.virtual > 1 else ""
        title = f"{'experts' if demo is EXPERTS else 'dense'} · {title}"
        if 1 < config.plan.world <= RANKS and all(word in title for word in words):
            out[title] = config
    return [config for _, config in sorted(out.items())], sorted(out)  # type: ignore[return-value]


def measure(context: Any, configs: list[Config]) -> list[tuple[int, int, dict[str, float], float | None]]:
    """Run on every rank: the pipeline rank, peak bytes, bytes sent by axis, and the share of token copies kept, for each plan."""
    from torch import distributed

    from meshwright.parallel.apply import apply
    from meshwright.training.data.random_tokens import RandomSamples
    from meshwright.training.loop import Trainer
    from meshwright.training.measure.rank_report import kept_share, observe, sent_by_axis

    out = []
    for config in configs:
        parallel = apply(config.model, config.plan, config.workload, context.rank)
        trainer = Trainer(parallel, RandomSamples(config.model, config.workload.seq, 0))
        trainer.train(1)
        seen = observe(trainer)
        sent = sent_by_axis(trainer, seen)
        out.append((parallel.mesh.index("pp"), seen.peak_bytes, sent, kept_share(trainer)))
        distributed.barrier()
        for group in list(distributed.distributed_c10d._world.pg_map):
            if group is not distributed.group.WORLD:
                distributed.destroy_process_group(group)
    return out


def main(words: list[str]) -> None:
    from meshwright.training.measure.measurement import predicted

    configs, titles = plans(words)  # type: ignore[misc]
    errors = []
    print(f"{'plan':<74}{'predicted':>11}{'measured':>11}{'error':>7}   traffic")
    for world in range(2, RANKS + 1):
        same = [(c, t) for c, t in zip(configs, titles, strict=True) if c.plan.world == world]
        for start in range(0, len(same), TOGETHER):
            some = same[start : start + TOGETHER]
            by_rank = local.run("footprint:measure", world, [config for config, _ in some])
            for i, (config, title) in enumerate(some):
                ranks = [rank[i] for rank in by_rank]
                found = predicted(config)
                memory = max(found.tensors_gib) * 2**30
                peak = max(rank[1] for rank in ranks)
                errors.append(memory / peak - 1)
                axes = sorted({axis for rank in ranks for axis in rank[2]} | set(found.traffic_bytes))
                sent = {axis: max(rank[2].get(axis, 0.0) for rank in ranks) for axis in axes}
                traffic = [
                    f"{axis} {found.traffic_bytes.get(axis, 0.0) / 1e3:.4g}/{size / 1e3:.4g} kB"
                    + (f" ({found.traffic_bytes.get(axis, 0.0) / size - 1:+.1%})" if size else "")
                    for axis, size in sent.items()
                ]
                print(
                    f"{title[:73]:<74}{memory / 2**20:7.3f} MiB{peak / 2**20:7.3f} MiB{errors[-1]:+7.1%}   {', '.join(traffic)}"
                )
                sys.stdout.flush()
    within = sum(abs(error) <= AIM for error in errors)
    print(
        f"{len(errors)} plans: {within} within {AIM:.0%} of the measured memory, median {statistics.median(map(abs, errors)):.1%}, largest {max(errors, key=abs):+.0%}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
