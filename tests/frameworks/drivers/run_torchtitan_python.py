"""torchtitan 0.3: its ConfigManager imports the function of settings.py, its Trainer builds mesh, model, pipeline and optimizer and makes the steps.

The model is Llama 3 with small widths and the number of layers of the settings. Its attention is PyTorch's scaled dot product: the flex attention of
torchtitan's models has no backward pass on a CPU. Tokenizer and dataset are replaced by the test's tokens.
"""

# ruff: noqa: E402
import importlib
import sys

from meshwright.check import cpu

cpu.install()
import run_common as common
import torch
import torchtitan_common
from torchtitan.config import ConfigManager
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

# Settings that are replaced after they were parsed.
OVERRIDES = {
    ("compile", "enable"): False,  # would be compiled for minutes
    ("compile", "enable_async_tensor_parallel"): False,  # symmetric memory of GPUs
    ("training", "disable_cuda_graphs"): True,
    ("checkpoint", "enable"): False,
}


class Nothing:
    """In the place of tokenizer and dataset, with the methods of a part that torchtitan builds."""

    def build(self, **arguments):
        return None


class Metrics(Nothing):
    def build(self, **arguments):
        return torchtitan_common.Log()


def small(model, job):
    """The config of a model with the widths of the plan."""
    dim, vocab = job["hidden"], job["vocab"]
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    layers = llama3._build_llama3_layers(
        n_layers=len(model.layers), dim=dim, n_heads=job["heads"], n_kv_heads=job["kv_heads"], hidden_dim=job["ffn"],
        rope=llama3.ComplexRoPE.Config(dim=dim // job["heads"], max_seq_len=job["seq"], theta=500000, scaling="llama"), attn_backend="",
    )  # fmt: skip
    return llama3.Llama3Model.Config(
        dim=dim, vocab_size=vocab, layers=layers,
        tok_embeddings=llama3.Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT),
        norm=llama3.RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(in_features=dim, out_features=vocab, param_init=llama3._output_linear_init(dim)),
    )  # fmt: skip


def train(job):
    """Two steps of torchtitan's Trainer."""
    words = job["words"]
    sys.path.insert(0, job["folder"])
    sys.modules.pop("settings", None)
    importlib.invalidate_caches()
    config = ConfigManager().parse_args(words[words.index("--module") :])
    sys.path.remove(job["folder"])
    replaced = torchtitan_common.replace_settings(config, OVERRIDES)
    config.model_spec.model = small(config.model_spec.model, job)
    config.loss.loss_fn.global_vocab_size = job["vocab"]
    config.tokenizer, config.dataloader, config.metrics = Nothing(), Nothing(), Metrics()
    type(config).to_dict = lambda config: {}
    trainer = Trainer(config)
    with torch.device("meta"):
        whole = config.model_spec.model.build()
    whole.to_empty(device="cpu")
    torchtitan_common.fill(trainer, whole)
    answer = torchtitan_common.train(trainer, job, job["microbatch"])
    return answer | {"overrides": [*torchtitan_common.OVERRIDES, *replaced, "small widths of the model", "attention"]}


common.main(train)
