"""A resumed training is the training that never stopped: bit for bit on the plan that was saved, within rounding on any other."""

from pathlib import Path

import numpy as np
import pytest
import torch

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.proof.tolerance import FP64_BOUND

SHAPE = {"hidden": 8, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 12, "vocab": 17}
MODELS = {
    "dense": Model(**SHAPE),
    "one KV head": Model(**SHAPE | {"kv_heads": 1}),  # under tp, ranks hold copies of it
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
    from meshwright.training.data.samples import RandomSamples
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
    from meshwright.training.checkpoint.load import resume
    from meshwright.training.checkpoint.save import Saver, checkpoint_group

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
    (2, [("dense", {**Z3, **BF16}, {}, "bfloat16"), ("tied", {"tp": 2, "sp": True}, {"optimizer": "muon"}),
         ("experts", {"replicate": 2, "ep": 2}), ("dense", {"replicate": 2, "bucket": 2000, "compression": "powersgd"}),
         ("one KV head", {"tp": 2})]),
]  # fmt: skip
MORE = [
    (2, [("dense", {"replicate": 2, "average_every": 3})]),
    (1, [("dense", {"param_dtype": "fp16"}, {}, "float16"), ("dense", {"offload": "states"}, {"optimizer": "momentum"})]),
    (1, [("dense", {}), ("tied", {"microbatch": 2}), ("experts", {}), ("dense", BF16, {}, "bfloat16"), ("dense", {}, {"optimizer": "sgd"})]),
    (2, [("tied", ZBV), ("dense", {**Z3, "compression": "top-k"}), ("dense", {"replicate": 2, "bucket": 2000})]),
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
    from meshwright.training.checkpoint.save import Saver, checkpoint_group

    trainer = trainer_of(context, case)
    trainer.train(steps)
    Saver(trainer, Path(folder), checkpoint_group()).save(wait=True)
    return [r.loss for r in trainer.train(2)]


def resume_under(context, cases, folder):
    """Resume under each plan. Returns the losses, the messages, and the keys whose boxes are not those of the checkpoint."""
    from dataclasses import replace

    from meshwright.training.checkpoint.load import open_checkpoint, resume
    from meshwright.training.checkpoint.save import checkpoint_group
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
    ("tied", Z3, {1: [{}], 2: [ZBV]}),
]
MORE_CROSSINGS = [
    ("experts", {"replicate": 2, "ep": 2}, {2: [{"tp": 2}]}),
    ("tied", Z3, {2: [{"tp": 2, "sp": True}]}),
    ("experts", {"replicate": 2, "ep": 2}, {1: [{}], 2: [{**Z3, "ep": 2}]}),
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


def save_on_a_full_disk(context, folder):
    """Save; save where rank 1 cannot write; save again. Returns the events of rank 0, the error of each rank, and the steps on the disk."""
    import resource

    from meshwright.training.checkpoint.folder import complete
    from meshwright.training.checkpoint.save import Checkpoints, Saver, checkpoint_group

    events, errors = [], []
    trainer = trainer_of(context, ("dense", {"replicate": 2}))
    saver = Saver(
        trainer,
        Path(folder),
        checkpoint_group(),
        report=lambda kind, step, text, **fields: events.append(kind),
        sync=lambda: events.append("sync"),
    )
    trainer.hooks.append(Checkpoints(saver, every=1))
    for limit in (resource.RLIM_INFINITY, 1000, resource.RLIM_INFINITY):
        if context.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        trainer.train_step()
        errors.append(getattr(saver.finish(), "code", None))
    names = sorted(path.name for path in Path(folder).iterdir())
    return events, errors, [step for step, _ in complete(Path(folder))], names


def test_a_full_disk_on_one_rank_is_an_event_and_training_goes_on(tmp_path):
    results = ranks.run(2, save_on_a_full_disk, str(tmp_path))
    for _, errors, steps, names in results:
        assert errors == [None, "MW-CKPT-007", None]
        assert steps == [1, 3]
        assert names == ["step-00000001", "step-00000003"]
    finished, failed = (["checkpoint-begun", "sync", f"checkpoint-{end}"] for end in ("finished", "failed"))
    assert results[0][0] == [*finished, *failed, *finished]
    assert results[1][0] == []


def change_the_plan(context, folder):
    """Save with compression and with local SGD, and resume each without. Returns messages, and a weight of each."""
    from meshwright.training.checkpoint.load import resume
    from meshwright.training.checkpoint.save import Saver, checkpoint_group

    out = []
    for number, fields in enumerate(({"compression": "top-k"}, {"average_every": 3})):
        root = Path(folder) / str(number)
        first = trainer_of(context, ("dense", {"replicate": 2, **fields}))
        first.train(2)
        group = checkpoint_group()
        Saver(first, root, group).save(wait=True)
        second = wiped(trainer_of(context, ("dense", {"replicate": 2})))
        found = resume(second, root, group)
        second.train_step()
        pieces = [[p.local.detach().double().numpy().copy() for p in t.parallel.pieces] for t in (first, second)]
        tokens = float(first.parallel.local.tokens) if first.parallel.local is not None else 0.0
        third = trainer_of(context, ("dense", {"replicate": 2}))
        resume(third, root, group)
        out.append(
            (found.messages, pieces[0], [p.local.detach().numpy().copy() for p in third.parallel.pieces], tokens)
        )
    return out


def test_what_belongs_to_one_plan_is_given_up_on_another_with_a_message(tmp_path):
    (compressed, averaged), (_, other) = ranks.run(2, change_the_plan, str(tmp_path))
    ((message,), saved, restored, _) = compressed
    assert "compression" in message
    assert all((a == b).all() for a, b in zip(saved, restored, strict=True))
    ((message,), mine, restored, tokens), (_, theirs, _, their_tokens) = averaged, other
    assert "2 replicas of local SGD are averaged" in message
    for a, b, mean in zip(mine, theirs, restored, strict=True):
        expected = (tokens * a + their_tokens * b) / (tokens + their_tokens)
        np.testing.assert_allclose(mean, expected, rtol=1e-12, atol=1e-15)
    assert any((a != b).any() for a, b in zip(mine, theirs, strict=True))


def resume_another(context, folder):
    """Save, then resume with another model and another optimizer. Returns the codes, and whether the weights were left as they were."""
    from meshwright.errors import MeshwrightError
    from meshwright.training.checkpoint.load import resume
    from meshwright.training.checkpoint.save import Saver, checkpoint_group

    trainer, group = trainer_of(context, ("dense", {"tp": 2})), checkpoint_group()
    trainer.train_step()
    Saver(trainer, Path(folder), group).save(wait=True)
    codes, kept = [], True
    if context.rank == 0:  # as if a process had been killed while it replaced this checkpoint
        (Path(folder) / "step-00000001").rename(Path(folder) / ".replaced-step-00000001")
    for case in (("tied", {"tp": 2}), ("dense", {"tp": 2}, {"optimizer": "momentum"})):
        other = trainer_of(context, case)
        before = bits(other)
        try:
            resume(other, Path(folder), group)
        except MeshwrightError as error:
            codes.append(error.code)
        kept &= bits(other) == before
    return codes, kept


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_before_anything_changes(tmp_path):
    for codes, kept in ranks.run(2, resume_another, str(tmp_path)):
        assert codes == ["MW-CKPT-004", "MW-CKPT-008"]
        assert kept


def test_a_save_of_host_tensors_opens_no_cuda_context(tmp_path, monkeypatch):
    """On a machine with a GPU, many ranks that train on its CPU would fill its memory with contexts."""
    from meshwright.training.checkpoint.store import BoxEntry, write

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("a CUDA stream was asked for"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: pytest.fail("a CUDA stream was made"))
    tensor = torch.arange(6.0).view(2, 3)
    entry = BoxEntry("weight/a", (2, 3), (0, 0), tensor)
    assert write([entry], tmp_path, None)[0]
