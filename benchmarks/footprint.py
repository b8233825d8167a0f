"""Memory and traffic of the plans of the parity matrix: what the cost model predicts for a rank, and what a training step takes and sends.

    python benchmarks/footprint.py [WORD …]        plans whose title has all of the words; default: all with at most four ranks

Every strategy, schedule, legal pair and triple of `tests/proof/layouts.py` trains two steps of a model of the demo's size on CPU processes.
The second one is observed: bytes of live tensors, and bytes sent in the group of each collective. Both are of the fullest rank, as in the report
of `train`. Nothing is fitted: the stack is `gloo-cpu`, and the prediction does not read the run.
"""

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


def plans(words: list[str]) -> dict[str, Config]:
    """The layouts of the parity matrix on the demo's model, by title; a layout that this model cannot have is left out."""
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
    return dict(sorted(out.items()))


def measure(context: Any, configs: list[Config]) -> list[tuple[int, int, dict[str, float]]]:
    """Run on every rank: the pipeline rank, peak bytes and bytes sent by axis, for each plan."""
    from torch import distributed

    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer
    from meshwright.training.measure.reports import observe, sent_by_axis

    out = []
    for config in configs:
        parallel = apply(config.model, config.plan, config.workload, context.rank)
        trainer = Trainer(parallel, RandomSamples(config.model, config.workload.seq, 0))
        trainer.train(1)
        seen = observe(trainer)
        sent = sent_by_axis(trainer, seen)
        out.append((parallel.mesh.index("pp"), seen.peak_bytes, sent))
        distributed.barrier()
        for group in list(distributed.distributed_c10d._world.pg_map):
            if group is not distributed.group.WORLD:
                distributed.destroy_process_group(group)
    return out


def traffic(predicted: dict[str, float], measured: dict[str, float]) -> str:
    """Predicted and measured kB of each axis, with the error."""
    sizes = [(axis, predicted.get(axis, 0.0), measured.get(axis, 0.0)) for axis in sorted({*predicted, *measured})]
    return ", ".join(
        f"{axis} {p / 1e3:.4g}/{m / 1e3:.4g} kB" + (f" ({p / m - 1:+.1%})" if p and m else "") for axis, p, m in sizes
    )


def main(words: list[str]) -> None:
    from meshwright.predict.prediction import predict

    configs, errors = plans(words), []
    print(f"{'plan':<74}{'predicted':>11}{'measured':>11}{'error':>7}   traffic, predicted/measured")
    for world in range(2, RANKS + 1):
        same = [title for title, config in configs.items() if config.plan.world == world]
        for start in range(0, len(same), TOGETHER):
            titles = same[start : start + TOGETHER]
            by_rank = local.run("footprint:measure", world, [configs[title] for title in titles])
            for title, *ranks in zip(titles, *by_rank, strict=True):
                result = predict(configs[title])
                memory, peak = max(result.tensors_gib) * 2**30, max(peak for _, peak, _ in ranks)
                axes = {axis for _, _, sent in ranks for axis in sent}
                sent = {axis: max(sent.get(axis, 0.0) for _, _, sent in ranks) for axis in axes}
                errors.append(memory / peak - 1)
                sizes = f"{memory / 2**20:7.3f} MiB{peak / 2**20:7.3f} MiB{errors[-1]:+7.1%}"
                print(f"{title[:73]:<74}{sizes}   {traffic(result.traffic_bytes, sent)}", flush=True)
    within, middle = sum(abs(error) <= AIM for error in errors), statistics.median(map(abs, errors))
    summary = f"median {middle:.1%}, largest {max(errors, key=abs):+.0%}"
    print(f"{len(errors)} plans: {within} within {AIM:.0%} of the measured memory, {summary}")


if __name__ == "__main__":
    main(sys.argv[1:])
