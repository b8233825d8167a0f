"""Folders that are not what they should be: a clear error before a tensor is used, and nothing is overwritten."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_folders import opened, rewritten, saved, tensors_of
from meshwright.describe import hf
from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.models import DrawnWeights
from meshwright.models.hf.folder import INDEX
from meshwright.models.hf.safetensors_file import SafetensorsFile
from meshwright.models.hf.weights import export

NAME = "model.layers.1.mlp.up_proj.weight"


def code_of(action, *arguments, **options):
    with pytest.raises(MeshwrightError) as found:
        action(*arguments, **options)
    return found.value.code, str(found.value)


@pytest.fixture
def folder(tmp_path):
    return saved("llama", tmp_path / "theirs")


def test_a_missing_tensor(folder):
    tensors = tensors_of(folder)
    del tensors[NAME]
    code, text = code_of(opened(rewritten(folder, tensors)).check)
    assert code == "MW-HF-013"
    assert NAME in text


def test_an_extra_tensor(folder):
    code, text = code_of(opened(rewritten(folder, tensors_of(folder) | {"model.extra.weight": torch.ones(2)})).check)
    assert code == "MW-HF-018"
    assert "model.extra.weight" in text


def test_a_layer_too_many(folder):
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    assert code_of(opened(folder).check)[0] == "MW-HF-018"


def test_another_shape(folder):
    tensors = tensors_of(folder)
    tensors[NAME] = tensors[NAME].t().contiguous()
    code, text = code_of(opened(rewritten(folder, tensors)).check)
    assert code == "MW-HF-014"
    assert "[32, 48]" in text
    assert "[48, 32]" in text


def test_a_foreign_architecture(folder):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "jamba"}
    (folder / "config.json").write_text(json.dumps(config))
    code, text = code_of(opened, folder)
    assert code == "MW-HF-016"
    assert "llama" in text


@pytest.mark.parametrize("method", ["gptq", "awq", None])
def test_an_unknown_quantisation(folder, method):
    assert (
        code_of(opened, rewritten(folder, tensors_of(folder), quantization_config={"quant_method": method}))[0]
        == "MW-HF-015"
    )


def test_scales_of_another_shape(folder):
    tensors = tensors_of(folder) | {f"{NAME}_scale_inv": torch.ones(2, 2)}
    tensors[NAME] = tensors[NAME].to(torch.float8_e4m3fn)
    assert (
        code_of(opened(rewritten(folder, tensors, quantization_config={"quant_method": "fp8"})).check)[0] == "MW-HF-014"
    )


def test_no_weights_and_pickled_weights(folder):
    (folder / "model.safetensors").unlink()
    assert code_of(opened, folder)[0] == "MW-HF-010"
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    code, text = code_of(opened, folder)
    assert code == "MW-HF-010"
    assert "pickle" in text


@pytest.mark.parametrize(
    "index", ["", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": 3}}']
)
def test_a_damaged_index(folder, index):
    (folder / INDEX).write_text(index)
    assert code_of(opened, folder)[0] == "MW-HF-011"


def test_an_index_that_names_a_missing_file_or_tensor(folder):
    names = dict.fromkeys(tensors_of(folder), "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names | {NAME: "model-2.safetensors"}}))
    assert code_of(opened(folder).check)[0] == "MW-HF-011"
    tensors = tensors_of_single(folder)
    del tensors[NAME]
    rewritten(folder, tensors)
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    assert code_of(opened(folder).check)[0] == "MW-HF-013"


def tensors_of_single(folder):
    file = SafetensorsFile.open(folder / "model.safetensors")
    return {name: file.read(name) for name in file.entries}


HEADER = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]},
}


def file_of(header, data=b"\0" * 11):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def changed(name, **fields):
    return {**HEADER, name: {**HEADER[name], **fields}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 16,
        file_of(HEADER)[:-1],
        file_of(HEADER) + b"\0",
        file_of(b"{"),
        file_of(b"[]"),
        file_of(b"[" * 100_000),
        file_of(changed("a", data_offsets=[0, 4])),
        file_of(changed("a", shape=[-2])),
        file_of(changed("a", shape=[True])),
        file_of(changed("a", shape=[2**60, 2**60])),
        file_of(changed("a", shape="2")),
        file_of(changed("b", data_offsets=[7, 10])),
        file_of(changed("b", data_offsets=[9, 12])),
        file_of({**HEADER, "c": 1}),
        file_of({**HEADER, "c": HEADER["b"]}),
        file_of(changed("b", data_offsets=[9, 12]), b"\0" * 12),
    ],
)
def test_a_damaged_file(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    assert code_of(SafetensorsFile.open, tmp_path / "x.safetensors")[0] == "MW-HF-011"


def test_an_unknown_dtype(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(file_of(changed("a", dtype="F4", shape=[16])))
    assert code_of(SafetensorsFile.open, tmp_path / "x.safetensors")[0] == "MW-HF-012"


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_a_changed_byte_gives_an_error_or_tensors(tmp_path_factory, data):
    content = bytearray(file_of(HEADER))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        file = SafetensorsFile.open(path)
    except MeshwrightError:
        return
    for name in file.entries:
        file.read(name)


def test_an_export_overwrites_nothing(tmp_path):
    model = Model(hidden=16, layers=1, heads=2, ffn=24, vocab=20, name="tiny")
    weights = DrawnWeights(model, 0)
    (tmp_path / "there").mkdir()
    assert code_of(export, tmp_path / "there", model, weights, dtype=torch.float32)[0] == "MW-HF-019"
    assert export(tmp_path / "new", model, weights, dtype=torch.float32).family == "llama"
    assert code_of(export, tmp_path / "new", model, weights, dtype=torch.float32)[0] == "MW-HF-019"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "there"]


def test_a_failed_export_leaves_nothing(tmp_path):
    class Broken:
        def read(self, name, full, start, shape):
            raise MeshwrightError("MW-CKPT-002", "damaged")

    model = Model(hidden=16, layers=1, heads=2, ffn=24, vocab=20)
    assert code_of(export, tmp_path / "new", model, Broken(), dtype=torch.float32)[0] == "MW-CKPT-002"
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_no_family(tmp_path):
    model = Model(hidden=16, layers=1, heads=2, ffn=24, vocab=20, norms_per_layer=4)
    code, text = code_of(export, tmp_path / "new", model, DrawnWeights(model, 0), dtype=torch.float32)
    assert code == "MW-HF-017"
    assert "norms_per_layer" in text


def test_the_original_config_is_kept_where_it_still_describes_the_model(folder):
    original = hf.load(folder)
    model = hf.interpret(original)
    assert hf.write(model.but(dropout_rate=0.1), original) == ("llama", original)
    family, config = hf.write(model.but(layers=2), original)
    assert (family, config["num_hidden_layers"]) == ("llama", 2)
