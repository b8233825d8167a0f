"""Weights of Transformers folders: read, run and written by us, they are the same weights and the same logits."""

import json

import pytest
import torch

from hf_folders import (
    CASES,
    FURTHER,
    IDS,
    loaded,
    logits,
    opened,
    original,
    our_network,
    rewritten,
    saved,
    tensors_of,
)
from meshwright.describe import hf
from meshwright.models.hf.folder import INDEX, Mxfp4Tensors
from meshwright.models.hf.safetensors_file import SafetensorsFile
from meshwright.models.hf.weights import FolderWeights, export

# Both sides compute in float32, in another order: some tens of roundings of 2⁻²⁴ in each of a few layers.
BOUND = 64 * 2**-24


@pytest.mark.parametrize("case", CASES)
def test_import_and_export_keep_every_bit(case, tmp_path):
    weights = opened(saved(case, tmp_path / "theirs"))
    weights.check()
    done = export(tmp_path / "ours", weights.model, weights, dtype=torch.float32, like=tmp_path / "theirs")
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(done.folder)
    assert set(after) == set(before)
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    assert torch.equal(logits(loaded(done.folder)), logits(original(case)))


@pytest.mark.parametrize("case", [case for case in CASES if case not in FURTHER])
def test_our_network_has_the_logits_of_transformers(case, tmp_path):
    expected = logits(original(case))
    with torch.no_grad():
        got = our_network(opened(saved(case, tmp_path / "theirs")))(IDS)
    assert float((got - expected).abs().max() / expected.abs().max()) < BOUND


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("phi3", "glm4", "stablelm")])
def test_a_config_written_from_the_model_alone_loads(case, tmp_path):
    weights = opened(saved(case, tmp_path / "theirs"))
    done = export(tmp_path / "ours", weights.model, weights, dtype=torch.float32)
    assert torch.equal(logits(loaded(done.folder)), logits(original(case)))


def in_fp8(weight, block):
    """fp8 numbers and the scale of each block; blocks at the edges may be smaller."""
    rows, columns = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    scale = torch.rand(rows, columns) + 0.5
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: weight.shape[0], : weight.shape[1]]
    return (weight / wide).to(torch.float8_e4m3fn), scale, wide


def test_fp8_blocks_are_dequantised_as_transformers_does(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder, block = saved("deepseek_v3", tmp_path / "fp8"), (16, 8)
    stored, plain = {}, {}
    for name, tensor in tensors_of(folder).items():
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale_inv"], wide = in_fp8(tensor, block)
            plain[name] = stored[name].float() * wide
            if all(n % b == 0 for n, b in zip(tensor.shape, block, strict=True)):
                oracle = Fp8Dequantize(None)._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.float32)
                assert torch.equal(plain[name], oracle)
        else:
            stored[name] = plain[name] = tensor
    method = {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    weights = opened(rewritten(folder, stored, quantization_config=method))
    weights.check()
    read = tensors_of(folder)
    assert set(read) == set(plain)
    assert not [name for name in plain if not torch.equal(read[name], plain[name])]
    q = weights.read("layers.2.attention.heads.q_b.weight", (40, 12), (13, 5), (20, 6))
    assert torch.equal(q, plain["model.layers.2.self_attn.q_b_proj.weight"][13:33, 5:11])


def test_the_export_of_a_quantised_folder_says_its_dtype(tmp_path):
    folder = saved("deepseek_v3", tmp_path / "fp8")
    tensors = tensors_of(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name], tensors[f"{name}_scale_inv"], _ = in_fp8(tensors[name], (128, 128))
    weights = opened(rewritten(folder, tensors, quantization_config={"quant_method": "fp8"}))
    done = export(tmp_path / "plain", weights.model, weights, dtype=torch.bfloat16, like=folder)
    config = json.loads((done.folder / "config.json").read_text())
    assert config["dtype"] == done.dtype == "bfloat16"
    assert "quantization_config" not in config
    assert {entry.dtype for entry in SafetensorsFile.open(done.folder / "model.safetensors").entries.values()} == {
        torch.bfloat16
    }


class Stored:
    """Tensors in memory, in place of a folder."""

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return self.tensors

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def read(self, name, box):
        return self.tensors[name][box].clone()


def test_mxfp4_is_unpacked_as_transformers_does():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 2), dtype=torch.uint8)
    scales[0, 0] = torch.tensor([0, 254])  # the ends of the range
    tensors = Mxfp4Tensors(Stored({"w_blocks": blocks, "w_scales": scales, "b": torch.ones(3, 10)}))
    expected = convert_moe_packed_tensors(blocks, scales)
    assert set(tensors.names()) == {"w", "b"}
    assert tensors.shape("w") == tuple(expected.shape) == (3, 64, 10)
    for box in [(slice(0, 3), slice(0, 64), slice(0, 10)), (slice(1, 2), slice(7, 41), slice(1, 10, 2))]:
        assert torch.equal(tensors.read("w", box).to(torch.bfloat16), expected[box])


def test_gpt_oss_in_mxfp4_equals_its_plain_weights(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"experts": 4, "hidden": 32, "width": 64}
    folder = saved("gpt_oss-packed", tmp_path / "mxfp4")
    plain, stored = tensors_of(folder), {}
    torch.manual_seed(1)
    for name, tensor in list(plain.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, d_in, d_out = tensor.shape
            assert d_in in (sizes["hidden"], sizes["width"])
            blocks = torch.randint(0, 256, (experts, d_out, d_in // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 126, (experts, d_out, d_in // 32), dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            stored[name] = tensor
    packed = opened(rewritten(folder, stored, quantization_config={"quant_method": "mxfp4"}))
    packed.check()
    export(tmp_path / "plain", packed.model, packed, dtype=torch.float32, like=folder)
    after = tensors_of(tmp_path / "plain")
    assert set(after) == set(plain)
    assert not [name for name in plain if not torch.equal(after[name], plain[name])]
    gate = packed.read("layers.1.moe.experts.gate.weight", (4, 64, 32), (1, 10, 3), (2, 20, 9))
    expected = plain["model.layers.1.mlp.experts.gate_up_proj"][1:3, 3:12, 20:60:2].transpose(1, 2)
    assert torch.equal(gate, expected)


def quantised_fp8(folder):
    """DeepSeek-V3 with fp8 blocks, as Transformers reads it: blocks that divide every matrix. The library converts it without
    `accelerate`, but refuses to start if that package is missing."""
    stored = {}
    for name, tensor in tensors_of(saved("deepseek_v3", folder)).items():
        stored[name] = tensor
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale_inv"], _ = in_fp8(tensor, (4, 4))
    method = {"quant_method": "fp8", "weight_block_size": [4, 4], "activation_scheme": "dynamic"}
    return rewritten(folder, stored, quantization_config=method), (
        "FineGrainedFP8Config",
        {"weight_block_size": (4, 4)},
    )


def quantised_mxfp4(folder):
    """gpt-oss with experts in MXFP4."""
    stored = {}
    for name, tensor in tensors_of(saved("gpt_oss-packed", folder)).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            shape = (len(tensor), tensor.shape[2], tensor.shape[1] // 32)
            stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(118, 122, shape, dtype=torch.uint8)
        else:
            stored[name] = tensor
    return rewritten(folder, stored, quantization_config={"quant_method": "mxfp4"}), ("Mxfp4Config", {})


@pytest.mark.parametrize("quantised", [quantised_fp8, quantised_mxfp4])
def test_a_quantised_folder_has_the_logits_of_the_model_that_transformers_loads(quantised, tmp_path, monkeypatch):
    """The oracle is the library's own loading with dequantisation, on the CPU."""
    import transformers
    from transformers.quantizers import quantizer_finegrained_fp8

    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda *_: True)
    torch.manual_seed(1)
    folder, (name, options) = quantised(tmp_path / "folder")
    method = getattr(transformers, name)(dequantize=True, **options)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=method, dtype=torch.float32)
    with torch.no_grad():
        got = our_network(opened(folder))(IDS)
    expected = logits(theirs.float().eval())
    assert float((got - expected).abs().max() / expected.abs().max()) < BOUND


def test_experts_saved_stacked_are_read_too(tmp_path):
    weights = opened(saved("mixtral", tmp_path / "separate"))
    tensors = {name: t for name, t in tensors_of(tmp_path / "separate").items() if ".experts." not in name}
    tensors = {name.replace("block_sparse_moe", "mlp"): t for name, t in tensors.items()}
    for i, layer in enumerate(original("mixtral").model.layers):
        for part in ("gate_up_proj", "down_proj"):
            tensors[f"model.layers.{i}.mlp.experts.{part}"] = getattr(layer.mlp.experts, part).detach()
    stacked = opened(rewritten(saved("mixtral", tmp_path / "stacked"), tensors))
    stacked.check()
    for name, place in weights.places.items():
        full = (place.experts, *place.shape) if place.experts else place.shape
        box = ([0] * len(full), full)
        assert torch.equal(weights.read(name, full, *box), stacked.read(name, full, *box)), name


def test_many_files_and_their_index(tmp_path):
    folder = saved("llama", tmp_path / "theirs", max_shard_size="20KB")
    assert (folder / INDEX).is_file()
    weights = opened(folder)
    weights.check()
    done = export(tmp_path / "ours", weights.model, weights, dtype=torch.float32, like=folder, shard_bytes=20_000)
    assert done.files > 2
    assert torch.equal(logits(loaded(done.folder)), logits(original("llama")))


def test_a_rank_opens_only_the_files_of_its_part(tmp_path):
    weights = opened(saved("llama", tmp_path / "theirs", max_shard_size="20KB"))
    weights.read("layers.1.attention.q.weight", (32, 32), (0, 8), (32, 8))
    assert len(weights.folder.stored.files) == 1
    assert weights.bytes_read == 32 * 8 * 4


def test_padded_rows_of_the_vocabulary_are_zero_and_not_exported(tmp_path):
    weights = FolderWeights(saved("llama", tmp_path / "theirs"), hf.read(tmp_path / "theirs").but(vocab_multiple=16))
    weights.check()
    last = weights.read("head.project.weight", (48, 32), (36, 0), (12, 32))
    assert torch.equal(last[:4], original("llama").lm_head.weight[36:])
    assert last.shape == (12, 32)
    assert not last[4:].any()
    padding = weights.read("head.project.weight", (48, 32), (42, 0), (6, 32))
    assert padding.shape == (6, 32)
    assert not padding.any()
    done = export(tmp_path / "ours", weights.model, weights, dtype=torch.float32, like=tmp_path / "theirs")
    assert torch.equal(logits(loaded(done.folder)), logits(original("llama")))


def test_a_base_model_without_its_prefix_is_read(tmp_path):
    """The GPT-2 on the hub was saved without its head: names have no `transformer.`, and buffers are among the tensors."""
    folder = saved("gpt2", tmp_path / "theirs")
    tensors = {name.removeprefix("transformer."): t for name, t in tensors_of(folder).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    weights = opened(rewritten(folder, tensors))
    weights.check()
    done = export(tmp_path / "ours", weights.model, weights, dtype=torch.float32, like=folder)
    assert torch.equal(logits(loaded(done.folder)), logits(original("gpt2")))


def test_tensors_that_the_model_does_not_need_are_ignored(tmp_path):
    """The head of tied embeddings, and the layers that predict further tokens."""
    folder = saved("llama-tied", tmp_path / "tied")
    tensors = tensors_of(folder)
    assert "lm_head.weight" not in tensors
    opened(rewritten(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})).check()
    folder = saved("deepseek_v3", tmp_path / "predicting")
    tensors = tensors_of(folder)
    more = {name.replace("layers.2.", "layers.3."): t for name, t in tensors.items() if "layers.2." in name}
    opened(rewritten(folder, tensors | more, num_nextn_predict_layers=1)).check()
