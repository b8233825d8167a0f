"""Runs that start from a Transformers folder: the first loss is that of Transformers, and a folder that does not fit is refused."""

import json
import shutil

import pytest
import torch
from torch.nn import functional

from hf_folders import original, rewritten, saved, tensors_of
from meshwright import api
from meshwright.describe.config import load
from meshwright.errors import MeshwrightError
from meshwright.training.data.samples import batch_of, training_samples
from meshwright.training.start import check_start, largest_token

RUN = """
cluster = "laptop"
stack = "gloo-cpu"
[workload]
batch = 4
seq = 8
precision = "fp32"
[plan]
tp = 2
param_dtype = "fp32"
master = false
"""
TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 299}}, "added_tokens": [{"id": 300, "content": "<s>"}]}


@pytest.fixture
def folder(tmp_path):
    return saved("bytes", tmp_path / "theirs")


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN + '[run]\nstart_from = "theirs"\n')
    return path


def refused(config):
    with pytest.raises(MeshwrightError) as found:
        check_start(config)
    return found.value.code


def test_the_folder_gives_the_model_too(folder, run_file):
    config = load(run_file)
    assert (config.model.hidden, config.model.vocab, config.run.start_from) == (32, 300, str(folder))
    assert config.origin("model.name") == "run.start_from"
    check_start(config)


def test_the_first_loss_is_that_of_transformers(folder, run_file, tmp_path):
    run = api.train(run_file, steps=1, calibrate=False, device="cpu", out=tmp_path / "run")
    copied = sorted(path.name for path in (tmp_path / "run" / "huggingface").iterdir())
    assert copied == ["config.json", "generation_config.json"]  # for the export
    batch = batch_of(training_samples(load(run_file), 0), 0, range(4), "cpu", torch.float32)
    with torch.no_grad():
        scores = original("bytes")(input_ids=batch.inputs).logits
    expected = functional.cross_entropy(scores.flatten(0, 1), batch.targets.flatten()).item()
    assert run.steps[0].loss == pytest.approx(expected, rel=64 * 2**-24)
    shutil.rmtree(folder)  # a run with a checkpoint needs it no more
    resumed = api.train(None, resume=tmp_path / "run", steps=2, calibrate=False, device="cpu")
    assert resumed.steps[0].loss == run.steps[0].loss
    assert len(resumed.steps) == 2


def test_a_run_file_of_another_model_is_refused(folder, run_file):
    assert refused(load(run_file, ["model=nano"])) == "MW-HF-021"
    changed = load(run_file, ["model.dropout_rate=0.1", "model.vocab_multiple=64"])  # what training may choose
    check_start(changed)
    assert refused(load(run_file, ["model.rope_theta=5000.0"])) == "MW-HF-021"


def test_a_model_that_is_computed_in_another_way_is_refused(folder, run_file, tmp_path):
    rewritten(folder, tensors_of(folder), final_logit_softcapping=30.0)
    with pytest.raises(MeshwrightError, match=r"MW-BUILD-005.*final_logit_softcapping"):
        api.train(run_file, steps=1, calibrate=False, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_tensor_is_refused_before_a_rank_starts(folder, run_file, tmp_path):
    tensors = tensors_of(folder)
    del tensors["model.norm.weight"]
    rewritten(folder, tensors)
    with pytest.raises(MeshwrightError) as found:
        api.train(run_file, steps=1, calibrate=False, out=tmp_path / "run")
    assert found.value.code == "MW-HF-013"
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(folder, run_file):
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    assert refused(load(run_file)) == "MW-HF-022"
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER | {"added_tokens": []}))
    check_start(load(run_file))
    (folder / "tokenizer.json").write_text("{}")
    assert refused(load(run_file)) == "MW-DATA-013"


def test_the_largest_token_of_a_list():
    assert largest_token({"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}) == 1


def test_a_small_copy_cannot_have_the_weights(folder, run_file):
    with pytest.raises(MeshwrightError) as found:
        api.train(run_file, steps=1, shrink=True)
    assert found.value.code == "MW-HF-021"
