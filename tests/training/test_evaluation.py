"""Evaluation during training: the same validation loss under every layout, and a training that it does not change."""

import numpy as np
import pytest

import ranks
from meshwright.describe.config import Config
from meshwright.training.data.prepare.run import prepare

LLAMA = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 32, "vocab": 256, "dropout_rate": 0.1}
MIXTRAL = {**LLAMA, "experts": 4, "top_k": 2, "dropout_rate": 0.0, "balance_bias": True}
LAYOUTS = [
    {"cp": 2, "microbatch": 2},
    {"tp": 2, "sp": True, "microbatch": 2},
    {"pp": 2, "microbatch": 2},
    {"pp": 2, "virtual": 1, "schedule": "zb-h1", "microbatch": 2, "shard": 2, "zero": 3},
    {"shard": 2, "zero": 3, "microbatch": 2, "recompute": "full"},
    {"replicate": 2, "ep": 2, "microbatch": 2},
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    lines = ["".join(random.choice(list("abcdef "), size=random.integers(5, 40))) for _ in range(200)]
    (folder / "a.txt").write_text("\n".join(lines))
    prepare([folder / "a.txt"], folder / "tokens", document="line", end_token="0", workers=1)
    return str(folder / "tokens")


def losses(context, made):
    """Training and validation losses of each configuration, with and without evaluation."""
    import torch
    from torch import distributed

    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import training_samples, validation_samples
    from meshwright.training.loop import Trainer
    from meshwright.training.measure.record_comm import CommRecorder
    from meshwright.training.worker import Evaluation

    out = []
    for config, evaluated in made:
        parts = config.model, config.plan, config.workload, context.rank
        trainer = Trainer(apply(*parts, dtype=torch.float64, seed=1), training_samples(config, 3), ahead=1)
        if evaluated:
            trainer.hooks.append(Evaluation(trainer, validation_samples(config), config.data.eval_every))
        with CommRecorder(trainer) as recorder:
            records = trainer.train(4)
        counts = [len(step.events) for step in recorder.steps][1:]
        # Evaluation belongs to no step. After it, torch's prefetch of ZeRO-3 gathers one unit more in one step.
        assert len(set(counts)) == 1 or config.plan.zero == 3, (config.plan.title(), counts)
        out.append(([r.loss for r in records], [r.validation_loss for r in records], [r.router for r in records]))
        trainer.loader.close()
        distributed.barrier()
        for group in list(distributed.distributed_c10d._world.pg_map):
            if group is not distributed.group.WORLD:
                distributed.destroy_process_group(group)
    return out


def config(tokens, plan, model=LLAMA):
    data = {"path": tokens, "validation": 0.2, "eval_every": 2, "eval_batches": 3, "document_mask": True}
    plan = {"param_dtype": "fp32", "master": False, **plan}
    return Config.from_parts(model, "laptop", workload={"batch": 8, "seq": 16}, plan=plan, data=data)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_reports_the_validation_loss_of_one_device_and_trains_the_same_without_it(tokens, world):
    references = [
        (config(tokens, {"microbatch": 8}, m), evaluated) for m in (LLAMA, MIXTRAL) for evaluated in (True, False)
    ]
    one, plain, expert, plain_expert = ranks.run(1, losses, references)[0]
    assert [v is not None for v in one[1]] == [False, True, False, True]
    assert one[0] == plain[0]
    assert expert == (plain_expert[0], expert[1], plain_expert[2])
    assert one[1][3] != one[1][1]
    chosen = [p for p in LAYOUTS if config(tokens, p).plan.world == world]
    made = [(config(tokens, plan, MIXTRAL if "ep" in plan else LLAMA), True) for plan in chosen]
    for plan, (trained, validated, _) in zip(chosen, ranks.run(world, losses, made)[0], strict=True):
        expected = expert if "ep" in plan else one
        np.testing.assert_allclose(trained, expected[0], rtol=1e-11, err_msg=str(plan))
        np.testing.assert_allclose(
            [v for v in validated if v], [v for v in expected[1] if v], rtol=1e-11, err_msg=str(plan)
        )
