"""Adapters of a run: saved alone, resumed on another plan, exported for PEFT, merged into their base, and read again."""

import json
from pathlib import Path

import pytest
import torch

import ranks
from hf_folders import IDS, logits, our_network, saved
from meshwright.cli import main
from meshwright.describe import hf, legality
from meshwright.describe.adapter import Adapter
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import parameters
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.models.hf.peft import PeftFolder, PeftWeights, export_adapter
from meshwright.models.hf.weights import FolderWeights, fingerprint
from meshwright.models.initialise import DrawnWeights, WithDrawnAdapters
from meshwright.training.checkpoint.convert import to_huggingface, to_peft
from meshwright.training.checkpoint.folder import checkpoints_in
from meshwright.training.checkpoint.manifest import read_manifest
from meshwright.training.start import check_start

BOUND = 64 * 2**-24  # as in test_hf_weights
ADAPTER = Adapter(rank=3, alpha=6, targets=("all-linear",))
FIRST = {"shard": 2, "zero": 3}
SECOND = {"tp": 2, "sp": True}


def model_of(folder, adapter=ADAPTER):
    return hf.read(folder).but(adapter=adapter, dropout_rate=0.0, attention_dropout=0.0, dropout=False)


def work(context, folder, out):
    """Two steps and a save on the first plan, then two more; the same two more on the second plan, and in one run with a quantised base."""
    from meshwright.describe.optimizer import Optimizer
    from meshwright.parallel.apply import apply
    from meshwright.training.checkpoint.load import resume
    from meshwright.training.checkpoint.save import Saver, checkpoint_group
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    group, workload = checkpoint_group(), Workload(batch=4, seq=8)

    def trainer(plan, adapter=ADAPTER):
        model = model_of(folder, adapter)
        weights = WithDrawnAdapters(FolderWeights(folder, model), DrawnWeights(model, 0))
        parallel = apply(model, Plan(**plan, param_dtype="fp32"), workload, context.rank, weights=weights)
        parallel.base = {"folder": folder, "fingerprint": fingerprint(Path(folder))}
        return Trainer(parallel, RandomSamples(model, 8, 0), Optimizer(learning_rate=0.05))

    losses = {}
    for name, adapter in (("plain", ADAPTER), ("nf4", ADAPTER.but(base="nf4"))):
        one = trainer(FIRST, adapter)
        one.train(2)
        saver = Saver(one, Path(out) / name / "checkpoints", group)
        saver.save(wait=True)
        losses[name] = [record.loss for record in one.train(2)]
    other = trainer(SECOND)
    assert resume(other, Path(out) / "plain", group) is not None
    losses["resumed"] = [record.loss for record in other.train(2)]
    return losses


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("adapters")
    folder = saved("llama", out / "base")
    return out, folder, ranks.run(2, work, str(folder), str(out))[0]


def test_a_checkpoint_has_the_adapters_alone_and_another_plan_resumes_it(run):
    out, folder, losses = run
    assert losses["resumed"] == pytest.approx(losses["plain"], rel=1e-6)
    manifest = read_manifest(checkpoints_in(out / "plain")[-1])
    model = model_of(folder)
    trained = {p.name for p in parameters(model, range(model.layers)) if p.is_adapter}
    assert {key.partition("/")[2] for key in manifest.tensors if key.startswith("weight/")} == trained
    assert manifest.base == {"folder": str(folder), "fingerprint": fingerprint(folder)}


@pytest.mark.parametrize("base", ["plain", "nf4"])
def test_the_merged_folder_computes_what_base_and_adapters_do(run, base, tmp_path, capsys):
    out, folder, _ = run
    merged = to_huggingface(out / base, tmp_path / "merged").folder
    adapters = to_peft(out / base, tmp_path / "adapters").folder
    one = our_network(FolderWeights(merged, hf.read(merged)))
    if base == "plain":
        model = model_of(folder)
        weights = PeftWeights(adapters, model, "llama", FolderWeights(folder, model))
        weights.check()
        with torch.no_grad():
            both, alone = our_network(weights)(IDS), our_network(FolderWeights(folder, hf.read(folder)))(IDS)
            torch.testing.assert_close(one(IDS), both, rtol=BOUND, atol=BOUND * float(both.abs().max()))
            assert float((both - alone).abs().max()) > 1e-3
    else:  # the quantised numbers that the adapters were trained beside
        plain = FolderWeights(folder, hf.read(folder)).read("layers.0.attention.k.weight", (16, 32), (0, 0), (16, 32))
        stored = one.layers["0"].attention.k.weight.detach()
        assert 0.001 < float((stored - plain).abs().mean() / plain.abs().mean()) < 0.3
    with pytest.raises(MeshwrightError, match="MW-ADPT-012"):
        to_huggingface(out / base, tmp_path / "again", like=merged)
    again = ["--to", "huggingface", "--out", str(tmp_path / "again"), "--like", str(merged)]
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoint", "convert", str(out / base), *again])
    assert "MW-ADPT-012" in capsys.readouterr().err


def test_peft_computes_the_same_logits(run, tmp_path):
    peft = pytest.importorskip("peft")
    from hf_folders import loaded

    out, folder, _ = run
    adapters = to_peft(out / "plain", tmp_path / "adapters").folder
    merged = to_huggingface(out / "plain", tmp_path / "merged").folder
    theirs = logits(peft.PeftModel.from_pretrained(loaded(folder), adapters).eval())
    torch.testing.assert_close(theirs, logits(loaded(merged)), rtol=BOUND, atol=BOUND * float(theirs.abs().max()))


@pytest.mark.parametrize("case", ["llama", "gpt2", "phi3", "gpt_neox", "mixtral", "deepseek_v3", "gpt_oss"])
def test_a_folder_of_peft_has_every_adapter_in_its_place(case, tmp_path):
    """Written and read again: fused projections in blocks, experts stacked; rank, alpha and targets are found in the files."""
    folder = saved(case, tmp_path / "base")
    model = model_of(folder)
    drawn, family = DrawnWeights(model, 5, scatter=True), hf.family_of(json.loads((folder / "config.json").read_text()))
    export_adapter(tmp_path / "out", model, drawn, family, torch.float32, str(folder))
    found = PeftFolder(tmp_path / "out").adapter(model, family)
    read = PeftWeights(tmp_path / "out", model_of(folder, found), family, drawn)
    read.check()
    for p in parameters(model, range(model.layers)):
        if p.is_adapter:
            whole = (p.name, p.shape, [0] * len(p.shape), p.shape)
            torch.testing.assert_close(read.read(*whole), drawn.read(*whole), rtol=1e-6, atol=1e-9)


def config_of(folder, *words):
    sets = [f"run.start_from={folder}", "adapter.rank=3", "adapter.alpha=6", "adapter.targets=all-linear", *words]
    return Config.from_parts(cluster="laptop", overrides=sets)


def changed(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("change", "words", "code"),
    [
        ({}, ["adapter.rank=2"], "MW-ADPT-011"),
        ({}, ["adapter.targets=q_proj"], "MW-ADPT-011"),
        ({"use_dora": True}, [], "MW-ADPT-010"),
        ({"peft_type": "IA3"}, [], "MW-ADPT-010"),
        ({"r": -1}, [], "MW-ADPT-010"),
        ({"other": "model"}, [], "MW-ADPT-011"),
        ({"weights": "adapter_model.bin"}, [], "MW-ADPT-010"),
        ({}, [], ""),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(change, words, code, tmp_path):
    folder = saved("llama", tmp_path / "base")
    written = saved("gpt2", tmp_path / "gpt2") if "other" in change else folder
    model, family = model_of(written), "gpt2" if "other" in change else "llama"
    out = export_adapter(tmp_path / "out", model, DrawnWeights(model, 5), family, torch.float32).folder
    if "weights" in change:
        (out / "adapter_model.safetensors").rename(out / change["weights"])
    else:
        changed(out, **change)
    config = config_of(folder, f"adapter.start_from={out}", *words)
    if not code:
        check_start(config)
        return
    with pytest.raises(MeshwrightError, match=code):
        check_start(config)


RUN = 'cluster = "laptop"\n[plan]\nreplicate = 1\n[workload]\nbatch = 4\nseq = 16\n'


@pytest.mark.parametrize(
    ("base", "settings", "message", "fix"),
    [
        ({}, ["targets=qury_proj"], "MW-ADPT-002: adapter.targets: 'qury_proj' matches no matrix", "adapter.targets=q"),
        ({}, ["rank=17"], "MW-ADPT-004: adapter.rank=17 exceeds the 32 × 16 matrix attention.k", "adapter.rank=16"),
        ({}, ["start_from=PEFT"], "is not one of this model: none of its tensors", "--from FOLDER"),
        ({"quant_method": "fp8"}, ["base=nf4"], "are quantised already (fp8)", "adapter.base=plain"),
        ({"quant_method": "bitsandbytes"}, [], "MW-HF-015: the weights are quantised with 'bitsandbytes'", "--from a folder"),
    ],
)  # fmt: skip
def test_what_a_user_types_wrongly_is_one_clear_error(base, settings, message, fix, tmp_path, capsys):
    folder, other = saved("llama", tmp_path / "base"), saved("gpt2", tmp_path / "gpt2")
    model = model_of(other)
    export_adapter(tmp_path / "peft", model, DrawnWeights(model, 5), "gpt2", torch.float32)
    if base:
        changed_config = json.loads((folder / "config.json").read_text()) | {"quantization_config": base}
        (folder / "config.json").write_text(json.dumps(changed_config))
    (tmp_path / "run.toml").write_text(RUN)
    words = ["rank=3", "alpha=6", "targets=all-linear", *settings]
    sets = [w for word in words for w in ("--set", f"adapter.{word}".replace("PEFT", str(tmp_path / "peft")))]
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(tmp_path / "run.toml"), "--from", str(folder), "--out", str(tmp_path / "out"), *sets])
    error = capsys.readouterr().err
    assert message in error
    assert f"Fix: {fix}" in error or f"Fix: --set {fix}" in error
    assert "Traceback" not in error


def test_a_quantised_base_is_not_quantised_again(tmp_path):
    folder = saved("llama", tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    check_start(config_of(folder))
    with pytest.raises(MeshwrightError, match="MW-ADPT-013"):
        check_start(config_of(folder, "adapter.base=nf4"))


@pytest.mark.parametrize(
    ("adapter", "plan", "workload"),
    [
        ({"rank": 3}, {}, {"precision": "fp8"}),
        ({"rank": 3, "targets": ("all-linear",), "dropout": 0.1}, {}, {}),
        ({"trains": ("lm_head",)}, {"pp": 2}, {}),
    ],
)
def test_what_is_not_run_is_refused(adapter, plan, workload):
    model = Model(hidden=16, layers=2, heads=4, ffn=24, vocab=32, experts=4, top_k=2, adapter=Adapter(**adapter))
    with pytest.raises(MeshwrightError, match="MW-ADPT-015"):
        legality.check(Plan(**plan), model, Workload(batch=4, seq=8, **workload), trainer=True)
