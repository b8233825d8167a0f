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

SHAPE = {"hidden": 8, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 12, "vocab": 17}
MODELS = {
    "dense": Model(**SHAPE),
    "tied": Model(**{**SHAPE, "layers": 4}, tied=True, qk_norm=True, qkv_bias=True, dropout_rate=0.1),
    "experts": Model(**SHAPE, experts=4, top_k=2, expert_ffn=6, balance_bias=True),
}
WORKLOAD = Workload(batch=4, seq=4)
Z3 = {"shard": 2, "zero": 3}
ZBV = {"pp": 2, "schedule": "zbv", "virtual": 2}
BF16 = {"param_dtype": "bf16"}


def trainer_of(context, case):
    """A new trainer of a case: (model, fields of the plan, fields of the workload, dtype). Every trainer averages its weights."""
    from meshwright.describe.optimizer import Optimizer
    from meshwright.parallel.apply import apply
    from meshwright.training.data.random_tokens import RandomSamples
    from meshwright.training.loop import Trainer

    model, plan, fields, dtype = (*case, *({}, "float64")[len(case) - 2 :])
    model, workload = MODELS[model], WORKLOAD.but(**fields)
    parallel = apply(model, Plan(**plan), workload, context.rank, dtype=getattr(torch, dtype))
    return Trainer(
        parallel, RandomSamples(model, workload.seq, 0), Optimizer(ema=0.9, schedule="cosine", decay_steps=9, warmup=1)
    )


def wiped(trainer):
    """The trainer with other weights: what is right after a resume came from the checkpoint."""
    with torch.no_grad():
        for value in trainer.average.values:
            value.fill_(0.5)
        for piece in (*trainer.parallel.pieces, *(trainer.masters.pieces if trainer.masters else ())):
            piece.local.fill_(0.5)
    return trainer


def bits(trainer):
    """The content of the whole state of this rank, and its numbers."""
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
        trainer.train(2)
        torch.manual_seed(context.rank)
        saver.save()
        saved = bits(trainer)
        losses = [r.loss for r in trainer.train(2)]
        assert saver.finish() is None, saver.finish()
        second = wiped(trainer_of(context, case))
        found = resume(second, root, group)
        restored = bits(second)
        resumed = [r.loss for r in second.train(2)]
        ended, went_on = bits(trainer), bits(second)
        differences = [key for key in saved if saved[key] != restored.get(key)]
        differences += [f"later {key}" for key in ended if ended[key] != went_on.get(key)]
        context.send(number)  # this rank is alive
        out.append((case, differences, losses, resumed, found.messages, sorted(saved.keys() ^ restored.keys())))
    return out


CASES = [
    (1, [("dense", {"param_dtype": "fp16"}, {}, "float16"), ("dense", {"offload": "states"}, {"optimizer": "momentum"})]),
    (2, [("dense", {"replicate": 2, "bucket": 2000}), ("dense", {**Z3, **BF16}, {}, "bfloat16"), ("tied", ZBV),
         ("tied", {"tp": 2, "sp": True}, {"optimizer": "muon"}), ("experts", {"replicate": 2, "ep": 2}),
         ("dense", {"replicate": 2, "average_every": 3}),
         ("dense", {"replicate": 2, "compression": "powersgd"}), ("dense", {**Z3, "compression": "top-k"})]),
]  # fmt: skip
MORE = [
    (1, [("dense", {}), ("tied", {"microbatch": 2}), ("experts", {}), ("dense", BF16, {}, "bfloat16"), ("dense", {}, {"optimizer": "sgd"})]),
    (2, [("tied", {"shard": 2, "zero": 1}), ("dense", {"pp": 2}), ("dense", {"cp": 2}), ("dense", {"replicate": 2, "compression": "random-k"}),
         ("dense", {**Z3, "compression": "int8"}), ("dense", {"replicate": 2, "compression": "int4"}),
         ("experts", {**Z3, "ep": 2}, {"optimizer": "muon"}), ("dense", {"replicate": 2, "param_dtype": "fp16"}, {}, "float16")]),
    (4, [("tied", {**Z3, "tp": 2}), ("experts", {**Z3, "pp": 2, "ep": 2}), ("dense", {**Z3, "replicate": 2}), ("tied", {"tp": 2, "pp": 2}),
         ("dense", {"replicate": 2, "tp": 2, "average_every": 3})]),
]  # fmt: skip


@pytest.mark.parametrize(("world", "cases"), [*CASES, *ranks.soak(MORE)])
def test_a_resumed_training_continues_bit_for_bit(world, cases, tmp_path):
    for found in zip(*ranks.run(world, stop_and_resume, cases, str(tmp_path)), strict=True):
        for case, differences, losses, resumed, messages, keys in found:
            assert not differences, f"{case}: {differences[:5]}"
            assert losses == resumed, case
            assert (messages, keys) == ([], []), case


def save_after(context, case, steps, folder):
    """Train and save. Returns the losses of later steps."""
    from meshwright.training.checkpoint.background import Saver, checkpoint_group

    trainer = trainer_of(context, case)
    trainer.train(steps)
    Saver(trainer, Path(folder), checkpoint_group()).save(wait=True)
    return [r.loss for r in trainer.train(2)]


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
        out.append((case, [r.loss for r in trainer.train(2)], found.messages, wrong))
        context.send(case)  # this rank is alive
    return out


CROSSINGS = [
    ("tied", {"shard": 2, "zero": 3}, {1: [{}], 2: [{"tp": 2, "sp": True}, ZBV]}),
    ("experts", {"replicate": 2, "ep": 2}, {1: [{}], 2: [{"tp": 2}, {**Z3, "ep": 2}]}),
]  # fmt: skip
MORE_CROSSINGS = [
    ("tied", {**Z3, "tp": 2}, {1: [{}], 2: [{"cp": 2, "zero": 3}, {"shard": 2, "zero": 1}, {"pp": 2}], 4: [{"tp": 2, "pp": 2}]}),
    ("experts", {"pp": 2, "ep": 2, "replicate": 2}, {2: [{"tp": 2}, Z3], 4: [{**Z3, "tp": 2}]}),
    ("dense", {}, {2: [Z3, {"tp": 2}, {"replicate": 2, "compression": "top-k"}]}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "plan", "others"), [*CROSSINGS, *ranks.soak(MORE_CROSSINGS)])
def test_a_checkpoint_opens_under_any_other_plan(model, plan, others, tmp_path):
    """Losses after the change of plan agree to the bound of parity in float64; the order of the data is that of the first run."""
    losses = ranks.run(Plan(**plan).world, save_after, (model, plan), 2, str(tmp_path))[0]
    for world, plans in others.items():
        for results in zip(*ranks.run(world, resume_under, [(model, p) for p in plans], str(tmp_path)), strict=True):
            for case, found, messages, wrong in results:
                assert not wrong, (case, wrong[:4])
                assert not messages, case
                if "compression" not in case[1]:
                    np.testing.assert_allclose(found, losses, rtol=FP64_BOUND, atol=0, err_msg=str(case))
