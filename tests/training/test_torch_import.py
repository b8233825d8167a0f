"""Checkpoints of torch's distributed checkpoint with pickled metadata: read exactly, and nothing in a hostile file runs."""

import io
import os
import pickle
import pickletools
import random
import sys
import zipfile

import pytest
import torch
from torch.distributed import checkpoint as dcp

from meshwright.cli import exit_code_of, run_command
from meshwright.describe.model import Model
from meshwright.describe.sharding import parameters
from meshwright.errors import MeshwrightError
from meshwright.pickle_data import parse
from meshwright.training.checkpoint.convert import NAMES, convert, read_full
from meshwright.training.checkpoint.manifest import read_manifest
from meshwright.training.checkpoint.torch_import import METADATA, METADATA_NAMES, TorchCheckpoint, read_archive
from meshwright.training.run import check_resume

MODEL = Model(hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, vocab=33)


def theirs_of(name):
    """torchtitan's name for one of our parameters."""
    layer = name.split(".")[1] if name.startswith("layers.") else ""
    for theirs, ours in NAMES.items():
        for suffix in ("", ".weight"):
            if ours.replace("*", layer) + suffix == name:
                return theirs.replace("*", layer) + suffix
    raise KeyError(name)


def titan_state():
    """The state of a torchtitan run with random content: model, AdamW, and what is not converted."""
    generator = torch.Generator().manual_seed(0)
    out, states = {}, {}
    for p in parameters(MODEL, range(MODEL.layers)):
        name = theirs_of(p.name)
        out[name] = torch.randn(p.shape, generator=generator)
        for state in ("exp_avg", "exp_avg_sq"):
            states[f"state.{name}.{state}"] = torch.randn(p.shape, generator=generator).to(torch.bfloat16)
        states[f"state.{name}.step"] = torch.tensor(7.0)
        states[f"param_groups.{name}.lr"] = 1e-3
    extra = {"train_state": {"step": torch.tensor(7, dtype=torch.int32)}, "lr_scheduler": {"last_epoch": 7}}
    return {**out, "optimizer": states, **extra}


@pytest.fixture(scope="module")
def titan(tmp_path_factory):
    path = tmp_path_factory.mktemp("titan")
    dcp.save(titan_state(), checkpoint_id=str(path), no_dist=True)
    return path


def rotated(heads_SD, interleaved):
    """Rotary positions by torchtitan's convention (neighbours) or by ours (halves)."""
    length, width = heads_SD.shape[-2:]
    angle = torch.outer(torch.arange(length, dtype=torch.float64), 1e4 ** (-torch.arange(0, width, 2) / width))
    if interleaved:
        a, b = heads_SD[..., 0::2], heads_SD[..., 1::2]
        return torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).flatten(-2)
    a, b = heads_SD.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


def test_the_documented_command_converts_with_a_model_alone(titan, tmp_path, capsys):
    """A run file without a cluster, a catalog name, and the resume that follows."""
    names = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab")
    table = "".join(f"{name} = {getattr(MODEL, name)}\n" for name in names)
    (tmp_path / "run.toml").write_text(f"[model]\n{table}")
    out = tmp_path / "run" / "checkpoints" / "step-00000007"

    def convert_to(path, model):
        words = ["convert", str(titan), "--out", str(path), "--model", model]
        return exit_code_of(lambda: sys.exit(run_command("checkpoint", words)), False)

    assert convert_to(out, str(tmp_path / "run.toml")) == 0
    assert read_manifest(out).step == 7
    assert convert_to(tmp_path / "other", "llama3-8b") == 2
    assert "MW-CKPT-012" in capsys.readouterr().err  # another model, and not a missing cluster
    check_resume(tmp_path / "run", False)  # there is no plan.toml yet
    with pytest.raises(MeshwrightError, match="MW-TRAIN-005"):
        check_resume(tmp_path, False)


def test_every_tensor_of_a_torch_checkpoint_is_read_exactly(titan):
    state, found = titan_state(), TorchCheckpoint(titan)
    flat = {**{k: v for k, v in state.items() if isinstance(v, torch.Tensor)}}
    flat |= {f"optimizer.{k}": v for k, v in state["optimizer"].items() if isinstance(v, torch.Tensor)}
    flat["train_state.step"] = state["train_state"]["step"]
    assert set(found.tensors) == set(flat)
    for key, value in flat.items():
        assert torch.equal(found.read(key), value), key


def test_a_torchtitan_checkpoint_becomes_ours_with_the_same_attention(titan, tmp_path):
    out = convert(titan, tmp_path / "out", MODEL)
    manifest, state = read_manifest(out), titan_state()
    assert manifest.step == 7
    for p in parameters(MODEL, range(MODEL.layers)):
        ours = read_full(out, manifest, f"weight/{p.name}")
        if not p.name.endswith(("attention.q.weight", "attention.k.weight")):
            assert torch.equal(ours, state[theirs_of(p.name)]), p.name
        assert read_full(out, manifest, f"optimizer-number.step/{p.name}").item() == 7.0
    x = torch.randn(5, MODEL.hidden, dtype=torch.float64)
    scores = []
    for interleaved in (True, False):
        heads = []
        for letter, count in (("q", MODEL.heads), ("k", MODEL.kv_groups)):
            name = f"layers.1.attention.{letter}.weight"
            weight = state[theirs_of(name)] if interleaved else read_full(out, manifest, f"weight/{name}")
            heads.append(rotated((x @ weight.double().T).view(5, count, -1).transpose(0, 1), interleaved))
        scores.append(heads[0] @ heads[1].repeat_interleave(2, 0).transpose(1, 2))
    torch.testing.assert_close(*scores, rtol=1e-12, atol=1e-12)
    moment = read_full(out, manifest, "optimizer.exp_avg/layers.0.attention.q.weight")
    theirs = state["optimizer"]["state.layers.0.attention.wq.weight.exp_avg"]
    assert not torch.equal(moment, theirs)
    assert torch.equal(moment.view(4, 2, 2, 16).transpose(1, 2).reshape(16, 16), theirs)


@pytest.mark.parametrize(
    ("change", "code"), [({"layers": 3}, "MW-CKPT-012"), ({"ffn": 32}, "MW-CKPT-012"), (None, "MW-CKPT-012")]
)
def test_a_model_that_does_not_fit_is_refused(change, code, titan, tmp_path):
    with pytest.raises(MeshwrightError, match=code):
        convert(titan, tmp_path / "out", None if change is None else MODEL.but(**change))
    assert not (tmp_path / "out").exists()


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


BOMBS = {
    "system": lambda mark: pickle.dumps(Call(os.system, f"touch {mark}")),
    "exec": lambda mark: pickle.dumps({"a": [Call(exec, f"open({str(mark)!r}, 'w')")]}, protocol=2),
    "open": lambda mark: pickle.dumps(Call(io.open, str(mark), "w")),
    "old protocol": lambda mark: f"cos\nsystem\n(S'touch {mark}'\ntR.".encode(),
    "getattr of a module": lambda mark: b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x02os\x8c\x06system\x86R.",
    "large memo": lambda mark: b"\x80\x04Nr\xff\xff\xff\xff.",
    "deep key": lambda mark: b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"Ns.",
    "deep value": lambda mark: b"\x80\x04)" + b"\x85" * 200_000 + b".",
    "empty": lambda mark: b"",
    "no stop": lambda mark: b"\x80\x04N",
    "stack underflow": lambda mark: b"\x80\x04\x86.",
    "extension": lambda mark: b"\x80\x02\x82\x01.",
    "huge length": lambda mark: b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0fa.",
    "other type": lambda mark: pickle.dumps([1, 2, 3]),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_hostile_metadata_file_is_refused_and_runs_nothing(kind, tmp_path):
    mark = tmp_path / "mark"
    (tmp_path / METADATA).write_bytes(BOMBS[kind](mark))
    with pytest.raises(MeshwrightError, match="MW-CKPT-011"):
        TorchCheckpoint(tmp_path)
    assert not mark.exists()


def test_a_hostile_archive_is_refused(tmp_path):
    def archive(data, compression=zipfile.ZIP_STORED):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", compression) as made:
            made.writestr("archive/data.pkl", data)
            made.writestr("archive/data/0", bytes(64))
        return file.getvalue()

    mark = tmp_path / "mark"
    good = io.BytesIO()
    torch.save(torch.arange(16.0), good)
    assert torch.equal(read_archive(good.getvalue()), torch.arange(16.0))
    pickled = zipfile.ZipFile(good).read("archive/data.pkl")
    hostile = [
        archive(BOMBS["system"](mark)),
        archive(pickled, zipfile.ZIP_DEFLATED),
        archive(pickled.replace(b"K\x10", b"K\x7f")),  # larger than its storage
        archive(pickled.replace(b"FloatStorage", b"LongsStorage")),
        b"PK\x03\x04 not an archive",
    ]
    for data in hostile:
        with pytest.raises(MeshwrightError, match="MW-CKPT-011"):
            read_archive(data)
    assert not mark.exists()


def test_random_changes_of_metadata_raise_one_error_or_change_nothing_else(titan, tmp_path):
    """Seeded bit flips and cuts: an error in our shape, or a checkpoint whose places still lie inside its files."""
    content, draw = (titan / METADATA).read_bytes(), random.Random(0)
    for file in titan.iterdir():
        if file.name != METADATA:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    refused = 0
    for _ in range(40):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 4))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        cut = draw.randrange(len(changed)) if draw.random() < 0.1 else len(changed)
        (tmp_path / METADATA).write_bytes(changed[:cut])
        try:
            found = TorchCheckpoint(tmp_path)
            for key in found.tensors:
                found.read(key)
        except MeshwrightError as error:
            refused += error.code == "MW-CKPT-011"
    assert refused > 12


def test_the_metadata_that_torch_writes_uses_only_allowed_names(titan):
    """Fails with the new name if a later torch writes another one."""
    parse((titan / METADATA).read_bytes(), METADATA_NAMES)
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops((titan / METADATA).read_bytes())}
    assert "REDUCE" in opcodes
