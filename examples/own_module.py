"""Any `nn.Module` under a plan: here a Hugging Face Llama (needs `transformers`) over four ranks, ZeRO-3 × tensor and sequence parallelism.

torchrun --nproc-per-node 4 examples/own_module.py
"""

from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
plan = {"shard": 2, "zero": 3, "tp": 2, "sp": True, "recompute": "full"}
model = mw.parallelize(LlamaForCausalLM(config), plan, optimizer=partial(torch.optim.AdamW, lr=1e-3))

text = torch.arange(4 * 32).view(4, 32) % 256
mine = text.chunk(model.data_ranks)[model.data_rank]  # ranks of one tp group take the same share
for step in range(5):
    loss = model.step({"input_ids": mine, "labels": mine}, clip=1.0)
    if model.mesh.rank == 0:
        print(f"step {step}: loss {loss.item():.6f}")

state = model.state_dict()  # whole, on every rank: LlamaForCausalLM(config).load_state_dict(state) works
torch.distributed.destroy_process_group()
