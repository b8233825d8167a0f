"""A resumed training is the training that never stopped: bit for bit on the plan that was saved, within rounding on any other."""

from pathlib import Path

import numpy as np
import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.proof.compare import FP64_BOUND

SHAPE = {"hidden": 16, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 33}
DENSE = Model(**SHAPE)
TIED = Model(**SHAPE, tied=True, qk_norm=True, qkv_bias=True, dropout=0.1)
EXPERTS = Model(**{**SHAPE, "layers": 2}, experts=4, top_k=2, expert_ffn=12, balance_bias=True)
MODELS = {"dense": DENSE, "tied": TIED, "experts": EXPERTS}
WORKLOAD = Workload(batch=8, seq=8)
Z3 = {"shard": 2, "zero": 3}
ZBV = {"pp": 2, "schedule": "zbv", "virtual": 2}


def trainer_of(context, case):
    """A new trainer of a case: (model, fields of the plan, fields of the workload, dtype)."""
    from meshwright.parallel.apply import apply
    from meshwright.training.data.random_tokens import RandomSamples
    from meshwright.training.loop import Trainer

    model, plan, fields, dtype = (*case, {}, "float64")[:4] if len(case) == 2 else (*case, "float64")[:4]
    model, workload = MODELS[model], WORKLOAD.but(**fields)
    parallel = apply(model, Plan(**plan), workload, context.rank, dtype=getattr(torch, dtype))
    return Trainer(parallel, RandomSamples(model, workload.seq, 0))


def wiped(trainer):
    """The trainer with other weights: what is right after a resume came from the checkpoint."""
    with torch.no_grad():
        for piece in (*trainer.parallel.pieces, *(trainer.masters.pieces if trainer.masters else ())):
            piece.local.fill_(0.5)
    return trainer


def bits(trainer):
    """The content of the whole state of this rank, and the numbers beside the tensors."""
    from meshwright.training.checkpoint.state import state_of

    state = state_of(trainer)
    content = {e.key: e.tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for e in state.entries}
    pieces = [p.local.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in trainer.parallel.pieces]
    return {"step": state.step, "numbers": state.numbers, "pieces": pieces, **content}


def stop_and_resume(context, cases, folder):
    """For each case: train, save in between, resume from it in a new trainer. Returns what differs, and the steps' losses."""
    from meshwright.training.checkpoint.background import Saver, checkpoint_group
    from meshwright.training.checkpoint.resume import resume

    out = []
    for number, case in enumerate(cases):
        root = Path(folder) / str(number)
        trainer = trainer_of(context, case)
        group = checkpoint_group()
        saver = Saver(trainer, root, group)
        trainer.train(3)
        torch.manual_seed(context.rank)
        saver.save()
        saved = bits(trainer)
        losses = [r.loss for r in trainer.train(3)]
        assert saver.finish() is None, saver.finish()
        second = wiped(trainer_of(context, case))
        found = resume(second, root, group)
        restored = bits(second)
        resumed = [r.loss for r in second.train(3)]
        ended, went_on = bits(trainer), bits(second)
        differences = [key for key in saved if saved[key] != restored.get(key)]
        differences += [f"later {key}" for key in ended if ended[key] != went_on.get(key)]
        out.append((case, differences, losses, resumed, found.messages, sorted(saved.keys() ^ restored.keys())))
    return out


BF16 = {"param_dtype": "bf16"}
CASES = {
    1: [("dense", {}), ("tied", {"microbatch": 4}), ("experts", {}), ("dense", {"offload": "states"}),
        ("dense", BF16, {}, "bfloat16"), ("dense", {"param_dtype": "fp16"}, {}, "float16"),
        ("dense", {}, {"optimizer": "momentum"}), ("dense", {}, {"optimizer": "sgd"})],
    2: [("dense", {"replicate": 2, "bucket": 2000}), ("tied", {"shard": 2, "zero": 1}), ("dense", Z3), ("tied", {"tp": 2, "sp": True}),
        ("tied", ZBV), ("dense", {"pp": 2}), ("dense", {"cp": 2}), ("experts", {"replicate": 2, "ep": 2}),
        ("dense", {"replicate": 2, "average_every": 2}), ("dense", {"replicate": 2, "compression": "top-k"}),
        ("dense", {"replicate": 2, "compression": "powersgd"}), ("dense", {**Z3, "compression": "int8"}),
        ("dense", {**Z3, **BF16}, {}, "bfloat16"), ("dense", {"replicate": 2, "compression": "random-k"})],
    4: [("tied", {**Z3, "tp": 2}), ("experts", {**Z3, "pp": 2, "ep": 2}), ("dense", {**Z3, "replicate": 2}), ("tied", {"tp": 2, "pp": 2})],
}  # fmt: skip


@pytest.mark.parametrize("world", CASES)
def test_a_resumed_training_continues_bit_for_bit(world, tmp_path):
    for found in zip(*ranks.run(world, stop_and_resume, CASES[world], str(tmp_path)), strict=True):
        for case, differences, losses, resumed, messages, keys in found:
            assert not differences, f"{case}: {differences[:5]}"
            assert losses == resumed, case
            assert (messages, keys) == ([], []), case


def save_after(context, case, steps, folder):
    """Train and save. Returns the losses of later steps, and this rank's boxes."""
    from meshwright.training.checkpoint.background import Saver, checkpoint_group
    from meshwright.training.checkpoint.state import state_of

    trainer = trainer_of(context, case)
    trainer.train(steps)
    Saver(trainer, Path(folder), checkpoint_group()).save(wait=True)
    boxes = [
        (e.key, e.start, e.tensor.detach().float().numpy().copy())
        for e in state_of(trainer).entries
        if not e.key.startswith("rank-")
    ]
    return [r.loss for r in trainer.train(3)], boxes


def resume_under(context, cases, folder):
    """Resume under each plan. Returns the losses, the messages, and the keys whose boxes are not those of the checkpoint."""
    from dataclasses import replace

    from meshwright.training.checkpoint.background import checkpoint_group
    from meshwright.training.checkpoint.resume import open_checkpoint, resume
    from meshwright.training.checkpoint.state import state_of
    from meshwright.training.checkpoint.store import read

    out = []
    for case in cases:
        trainer = wiped(trainer_of(context, case))
        found = resume(trainer, Path(folder), checkpoint_group())
        again = open_checkpoint(Path(folder))
        wrong = []
        for entry in state_of(trainer).entries:
            if not entry.key.startswith("rank-"):
                copy = replace(entry, tensor=torch.zeros_like(entry.tensor))
                read(again.path, again.manifest, [copy])
                if not torch.equal(copy.tensor, entry.tensor):
                    wrong.append(entry.key)
        out.append((case, [r.loss for r in trainer.train(3)], found.messages, wrong))
    return out


CROSSINGS = [
    ("tied", {**Z3, "tp": 2}, {1: [{}], 2: [{"tp": 2, "sp": True}, ZBV, {"cp": 2, "zero": 3}, {"shard": 2, "zero": 1}]}),
    ("experts", {"replicate": 2, "ep": 2}, {1: [{}], 2: [{"tp": 2}, {**Z3, "ep": 2}, {"pp": 2}]}),
    ("dense", {}, {2: [Z3, {"tp": 2}]}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "plan", "others"), CROSSINGS)
def test_a_checkpoint_opens_under_any_other_plan(model, plan, others, tmp_path):
    """Losses after the change of plan agree to the bound of parity in float64; the order of the data is that of the first run."""
    saved = ranks.run(Plan(**plan).world, save_after, (model, plan), 3, str(tmp_path))
    losses = saved[0][0]
    for world, plans in others.items():
        for results in zip(*ranks.run(world, resume_under, [(model, p) for p in plans], str(tmp_path)), strict=True):
            for case, found, messages, wrong in results:
                assert not wrong, (case, wrong[:4])
                assert not messages, case
                np.testing.assert_allclose(found, losses, rtol=FP64_BOUND, atol=0, err_msg=str(case))
