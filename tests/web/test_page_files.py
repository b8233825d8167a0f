"""Files that a user brings to Plan: a Hugging Face config.json, a cluster.toml, settings of another framework."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from web.browser import fragment, shows, until

Open = Callable[..., Any]
SMALL = fragment(model="tiny", cluster={"extends": "dgx-h100", "gpus": 8}, workload__batch=64, workload__seq=1024,
                 plan={"tp": 2, "pp": 2, "shard": 2, "zero": 1})  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_dropped_model_and_a_calibrated_cluster_become_inputs(server: str, open_page: Open, tmp_path: Path) -> None:
    page = open_page(server + "/" + SMALL, refused=True)
    model, cluster = tmp_path / "my-llama.json", tmp_path / "cluster.toml"
    model.write_text(json.dumps(LLAMA), "utf-8")
    cluster.write_text('[cluster]\nextends = "dgx-a100"\ngpus = 16\nprice = 2.5\n', "utf-8")
    page.locator("input[type=file]").nth(0).set_input_files(model)
    shows(page, "my-llama")
    page.locator("input[type=file]").nth(1).set_input_files(cluster)
    shows(page, "on 16 × a100")
    cluster.write_text("[cluster]\nprice = \n", "utf-8")
    page.locator("input[type=file]").nth(1).set_input_files(cluster)
    shows(page, "MW-CONF-006", "#inputs")


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 8192
[parallelism]
tensor_parallel_degree = 4
[metrics]
log_freq = 10
"""


def test_a_dropped_settings_file_sets_the_inputs_and_settings_are_copied(
    server: str, open_page: Open, tmp_path: Path
) -> None:
    page = open_page(server + "/" + SMALL, refused=True)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    settings = tmp_path / "llama.toml"
    settings.write_text(TITAN, "utf-8")
    page.locator("input[type=file]").nth(2).set_input_files(settings)
    shows(page, "llama3-8b")
    until(page, "location.hash.includes('torchtitan')")
    page.select_option("#copy-settings", "megatron-lm")
    until(page, "navigator.clipboard.readText().then((text) => text.includes('--tensor-model-parallel-size 4'))")
    settings.write_text(TITAN.replace("tensor_parallel_degree = 4", "tensor_parallel_degree = 3"), "utf-8")
    page.locator("input[type=file]").nth(2).set_input_files(settings)
    shows(page, "MW-SET-001", "#inputs")
