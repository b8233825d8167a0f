"""A Hugging Face Llama over tensor-parallel ranks, by a table of names; needs `transformers`.

    torchrun --nproc-per-node 4 examples/tensor_parallel_llama.py

Four ranks share two KV heads: each head is on two of them, and their gradients are summed.
"""

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.parallel.tensor import families
from meshwright.parallel.tensor import split as tensor

distributed.init_process_group("gloo")
group = distributed.group.WORLD
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=256)  # fmt: skip
torch.manual_seed(0)  # the same weights on every rank, of which each keeps its own part
model = LlamaForCausalLM(config)
done = tensor.split(model, families.llama(config), group)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.arange(32).view(2, 16)

for step in range(5):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    done.sum_gradients(model)
    norm = done.norm(model)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    optimizer.step()
    optimizer.zero_grad()
    if group.rank() == 0:
        print(f"step {step}: loss {loss.item():.6f}, gradient norm {norm.item():.6f}")
distributed.destroy_process_group()
