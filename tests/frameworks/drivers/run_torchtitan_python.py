"""torchtitan 0.3: its ConfigManager imports the function of settings.py, its Trainer builds mesh, model, pipeline and optimizer and makes the steps.

The settings name a model of torchtitan, whose widths are replaced by small ones. Flex attention has no backward on a CPU and is replaced,
tokenizer and dataset are replaced by the test's tokens.
"""

# ruff: noqa: E402
import sys

import cpu_torchtitan
import parse_common
import run_common as common

parse_common.stub("triton", "triton.language")
import torch
import torchtitan_common
from torchtitan.components import metrics
from torchtitan.config import ConfigManager
from torchtitan.models import llama3
from torchtitan.models.common.attention import FlexAttention
from torchtitan.trainer import Trainer

# Settings that are replaced after they were parsed.
OVERRIDES = {
    ("compile", "enable"): False,  # would be compiled for minutes
    ("training", "disable_cuda_graphs"): True,
    ("validator", "enable"): False,  # of the model's own settings: needs a dataset
}


class Nothing:
    """In the place of tokenizer and dataloader."""

    def build(self, **kwargs):
        return None


def small_llama(job):
    """A function that makes torchtitan's settings of Llama 3 8B with small widths."""

    def make(attn_backend, tp_gemm_backend="default"):
        dim, vocab = job["hidden"], job["vocab"]
        return llama3.Llama3Model.Config(
            dim=dim, vocab_size=vocab,
            tok_embeddings=llama3.Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT),
            norm=llama3.RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
            lm_head=llama3.Linear.Config(in_features=dim, out_features=vocab, param_init=llama3._output_linear_init(dim)),
            layers=llama3._build_llama3_layers(
                n_layers=job["layers"], dim=dim, n_heads=job["heads"], n_kv_heads=job["kv_heads"], hidden_dim=job["ffn"],
                rope=llama3.ComplexRoPE.Config(dim=dim // job["heads"], max_seq_len=job["seq"], theta=500000, scaling="llama"),
                attn_backend=attn_backend, tp_gemm_backend=tp_gemm_backend,
            ),
        )  # fmt: skip

    return make


def parse(job):
    """The settings that the function in settings.py makes, then those of OVERRIDES."""
    sys.path.insert(0, job["variables"]["PYTHONPATH"])
    sys.modules.pop("settings", None)
    llama3.llama3_configs["8B"] = small_llama(job)
    words = job["words"]
    config = ConfigManager().parse_args(words[words.index("--module") :])
    sys.path.pop(0)
    replaced = torchtitan_common.replace_settings(config, OVERRIDES)
    config.tokenizer = config.dataloader = Nothing()
    return config, [*replaced, "causal sdpa in place of flex attention"]


def train(job):
    """Two steps of torchtitan's Trainer."""
    config, replaced = parse(job)
    metrics.MetricsProcessor.__init__ = cpu_torchtitan.Log.__init__
    metrics.MetricsProcessor.should_log, metrics.MetricsProcessor.log = (
        cpu_torchtitan.Log.should_log,
        cpu_torchtitan.Log.log,
    )
    trainer = Trainer(config)
    with torch.device("cpu"):
        whole = config.model_spec.model.build()
    torchtitan_common.fill(trainer, whole)
    pipeline = config.parallelism.pipeline_parallel_degree > 1
    rows = config.parallelism.pipeline_parallel_microbatch_size if pipeline else config.training.local_batch_size
    answer = torchtitan_common.train(trainer, job, rows)
    return answer | {"overrides": [*cpu_torchtitan.OVERRIDES, *replaced, "small widths of the model"]}


FlexAttention._compiled_flex_attn = cpu_torchtitan.causal_attention
torch.compiler.set_stance("force_eager")
common.main(train)
