"""Checkpoints of any plan as Transformers folders: the weights of the run, and the logits of our network."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

import ranks
from hf_folders import IDS, loaded, logits, original, our_network, saved
from meshwright.describe import hf
from meshwright.describe.model import Model
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint.convert import CheckpointWeights, to_huggingface
from meshwright.training.checkpoint.manifest import read_manifest

BOUND = 64 * 2**-24  # as in test_hf_weights
PLANS = {
    "mixtral": {"tp": 2, "replicate": 2, "ep": 2, "param_dtype": "fp32"},
    "llama-tied": {"pp": 2, "shard": 2, "zero": 3, "param_dtype": "bf16"},
    "gpt2": {"replicate": 4, "average_every": 3, "param_dtype": "fp32"},
}


def work(context, folders, out):
    from meshwright.models.hf.weights import FolderWeights
    from meshwright.parallel.apply import apply
    from meshwright.parallel.numerics.precision import DTYPES
    from meshwright.training.checkpoint.save import Saver, checkpoint_group
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    for case, folder in folders.items():
        model, plan = hf.read(folder).but(dropout_rate=0.0, attention_dropout=0.0, dropout=False), Plan(**PLANS[case])
        dtype = DTYPES[plan.param_dtype]
        workload = Workload(batch=4, seq=8)
        parallel = apply(model, plan, workload, context.rank, dtype=dtype, weights=FolderWeights(folder, model))
        trainer = Trainer(parallel, RandomSamples(model, 8, 0), Optimizer(ema=0.5))
        group = checkpoint_group()
        saver = Saver(trainer, Path(out) / case / "checkpoints", group)
        saver.save()
        trainer.train(2)
        saver.save()
        assert saver.finish() is None
        context.send(case)  # this rank is alive


@cache
def runs(out):
    folders = {case: str(saved(case, out / "theirs" / case)) for case in PLANS}
    ranks.run(4, work, folders, str(out))
    return out


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return runs(tmp_path_factory.mktemp("runs"))


def checkpoint(out, case, step):
    return out / case / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize("case", PLANS)
def test_weights_that_no_step_changed_come_back_bit_for_bit(case, out, tmp_path):
    done = to_huggingface(checkpoint(out, case, 0), tmp_path / "hf", dtype="fp32", like=out / "theirs" / case)
    assert torch.equal(logits(loaded(done.folder)), logits(original(case)))


@pytest.mark.parametrize("case", PLANS)
def test_trained_weights_have_the_logits_of_our_network(case, out, tmp_path):
    path = checkpoint(out, case, 2)
    done = to_huggingface(
        out / case, tmp_path / "hf", dtype="fp32"
    )  # the newest checkpoint; config from the model alone
    manifest = read_manifest(path)
    weights = CheckpointWeights(path, manifest)
    weights = type("Weights", (), {"model": Model(**manifest.model), "read": staticmethod(weights.read)})
    with torch.no_grad():
        got = our_network(weights)(IDS)
    expected = logits(loaded(done.folder))
    assert float((got - expected).abs().max() / expected.abs().max()) < BOUND
    assert not torch.allclose(expected, logits(original(case)))


def test_the_moving_average_is_exported(out, tmp_path):
    folders = [tmp_path / name for name in ("weights", "average")]
    for folder, average in zip(folders, (False, True), strict=True):
        to_huggingface(out / "mixtral", folder, dtype="fp32", average=average)
    assert not torch.equal(*(logits(loaded(folder)) for folder in folders))


def test_an_average_that_was_not_kept_is_refused(out, tmp_path):
    from meshwright.training.checkpoint.convert import read_full, write_checkpoint

    path = checkpoint(out, "mixtral", 0)
    manifest = read_manifest(path)
    keys = [key for key in manifest.tensors if key.startswith("weight/")]
    fields = {name: getattr(manifest, name) for name in ("step", "model", "plan", "workload", "order", "ranks")}
    write_checkpoint(tmp_path / "step-00000000", ((key, read_full(path, manifest, key)) for key in keys), fields)
    with pytest.raises(MeshwrightError) as found:
        to_huggingface(tmp_path / "step-00000000", tmp_path / "hf", average=True)
    assert found.value.code == "MW-CKPT-016"


def test_the_dtype_is_that_of_the_original_or_of_the_plan(out, tmp_path):
    assert to_huggingface(out / "llama-tied", tmp_path / "plan").dtype == "bfloat16"
    like = out / "theirs" / "llama-tied"
    assert to_huggingface(out / "llama-tied", tmp_path / "original", like=like).dtype == "float32"
    config = json.loads((tmp_path / "plan" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    with pytest.raises(MeshwrightError) as found:
        to_huggingface(out / "llama-tied", tmp_path / "none", dtype="fp8")
    assert found.value.code == "MW-CKPT-017"


def test_the_copy_in_the_run_folder_gives_config_and_tokenizer(out, tmp_path):
    copy = out / "mixtral" / "huggingface"
    copy.mkdir()
    (copy / "config.json").write_text((out / "theirs" / "mixtral" / "config.json").read_text())
    (copy / "tokenizer.json").write_text("{}")
    done = to_huggingface(out / "mixtral", tmp_path / "hf")
    assert (done.folder / "tokenizer.json").read_text() == "{}"
    assert done.dtype == "float32"
