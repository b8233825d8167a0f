"""Targets of conversations: one device trains what plain float64 formulas give with the mask of the file, and layouts what one device trains."""

import json

import numpy as np
import pytest

import ranks
from meshwright.describe.config import Config
from meshwright.models.loss import IGNORED
from meshwright.proof.compare import compare
from meshwright.proof.prove import compare_with_formulas
from meshwright.proof.records import Job
from meshwright.training.data.prepare.run import prepare
from meshwright.training.data.samples import training_samples

SEQ, BATCH = 12, 4
LLAMA = {"hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 256}
LAYOUTS = {
    2: [{"cp": 2, "microbatch": 1}, {"shard": 2, "zero": 3, "microbatch": 1}, {"pp": 2, "microbatch": 1}],
    4: [{"tp": 2, "sp": True, "replicate": 2, "microbatch": 1}, {"cp": 2, "cp_kind": "all-gather", "pp": 2, "microbatch": 2}],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    random = np.random.default_rng(0)
    lengths = random.integers(1, 40, (60, 2))
    rows = [{"prompt": "ab" * int(a), "completion": "xyz" * int(1 + b // 8)} for a, b in lengths]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare([folder / "a.jsonl"], folder / "tokens", template="plain", end_token="0", workers=1)
    return str(folder / "tokens")


def config_of(tokens, plan):
    plan = {"param_dtype": "fp32", "master": False, **plan}
    workload, data = {"batch": BATCH, "seq": SEQ}, {"path": tokens, "document_mask": True}
    return Config.from_parts(LLAMA, "laptop", workload=workload, plan=plan, data=data)


def record_all(context, configs, oracle=False):
    """The traces of training each configuration on its data, on this rank."""
    from torch import distributed

    from meshwright.proof import trace

    out = []
    for config in configs:
        trace.samples_of = lambda job, reads, config=config: training_samples(config, 3)
        job = Job(config.model, config.plan, config.workload, steps=3, dtypes=("fp64",), documents=True, oracle=oracle)
        out.append(trace.record_one(context, job, "fp64"))
        distributed.barrier()
        for group in list(distributed.distributed_c10d._world.pg_map):
            if group is not distributed.group.WORLD:
                distributed.destroy_process_group(group)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_layouts_train_on_learned_tokens_what_plain_formulas_give(tokens, world):
    one = config_of(tokens, {"microbatch": BATCH})
    samples = training_samples(one, 3)
    valid = np.array([[samples.sample(step, i)[1] != IGNORED for i in range(BATCH)] for step in range(3)])
    assert (valid.sum(2) == 0).any()  # a micro-batch without a target
    assert (valid.reshape(3, BATCH, 2, -1).sum(3) == 0).any()  # and a slice of a context-parallel rank
    alone = ranks.run(1, record_all, [one], True)[0][0]
    assert [alone.oracle is not None, len(alone.oracle.losses)] == [True, 3]
    assert not [b for agreement in compare_with_formulas(alone) for b in agreement.breaks]
    assert [
        token for token in np.unique(samples.sample(0, 1)[1]) if token != IGNORED and chr(token) not in "xyz\n\0"
    ] == []
    configs = [config_of(tokens, plan) for plan in LAYOUTS[world]]
    by_rank = ranks.run(world, record_all, configs)
    for i, config in enumerate(configs):
        agreement = compare(alone, [rank[i] for rank in by_rank])
        assert not agreement.breaks, (config.plan.title(), [str(b) for b in agreement.breaks[:3]])
        assert all(error < 1e-11 for error in agreement.errors.values()), (config.plan.title(), agreement.errors)
