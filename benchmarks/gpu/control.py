"""A plain compiled PyTorch trainer of a Llama-shaped model, to compare with: what a careful engineer writes in sixty lines.

fp32 weights, bf16 autocast, `torch.compile` of the whole model, torch's attention, fused AdamW, clipped gradients. Prints one JSON line.

    python benchmarks/gpu/control.py 1.5b          # ours: benchmarks/gpu/run.py speed
    python benchmarks/gpu/control.py 1.5b --hf     # the same shape as Hugging Face's LlamaForCausalLM, compiled
"""

import json
import statistics
import sys
import time
from typing import Any

import torch
from shapes import SHAPES
from torch import nn
from torch.nn import functional as F

STEPS, WINDOWS = 4, 3  # steps that are timed together, after four others


class Block(nn.Module):
    def __init__(self, h: int, heads: int, kv: int, ffn: int) -> None:
        super().__init__()
        self.d, self.heads, self.kv = h // heads, heads, kv
        self.norm1, self.norm2 = nn.RMSNorm(h, eps=1e-5), nn.RMSNorm(h, eps=1e-5)
        self.qkv = nn.Linear(h, (heads + 2 * kv) * self.d, bias=False)
        self.out = nn.Linear(h, h, bias=False)
        self.up = nn.Linear(h, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, h, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(b, s, -1, self.d).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.kv, self.kv), dim=1)
        q, k = (y * cos + torch.cat((-y[..., self.d // 2 :], y[..., : self.d // 2]), -1) * sin for y in (q, k))
        y = F.scaled_dot_product_attention(q, k.to(v), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Plain(nn.Module):
    def __init__(self, layers: int, h: int, heads: int, kv: int, ffn: int, vocab: int, seq: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, h), nn.RMSNorm(h, eps=1e-5)
        self.blocks = nn.ModuleList(Block(h, heads, kv, ffn) for _ in range(layers))
        self.head = nn.Linear(h, vocab, bias=False)
        angle = torch.outer(torch.arange(seq), 500000.0 ** (-torch.arange(0, h // heads, 2) / (h // heads))).repeat(
            1, 2
        )
        self.register_buffer("cos", angle.cos().bfloat16())
        self.register_buffer("sin", angle.sin().bfloat16())

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).bfloat16()
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), target.flatten())


class HuggingFace(nn.Module):
    def __init__(self, layers: int, h: int, heads: int, kv: int, ffn: int, vocab: int, seq: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        settings: dict[str, Any] = {
            "hidden_size": h,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "vocab_size": vocab,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "max_position_embeddings": seq,
            "tie_word_embeddings": False,
            "attn_implementation": "sdpa",
            "use_cache": False,
        }
        self.llama = LlamaForCausalLM(LlamaConfig(**settings))

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.llama(input_ids=ids, labels=target, use_cache=False).loss


def main(shape: str, hf: bool) -> None:
    size = SHAPES[shape]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    kind = HuggingFace if hf else Plain
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
    with torch.device("cuda"):
        model = kind(*(size[name] for name in names))
    run = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = size["batch"] * size["seq"]
    seconds, began, last = [], time.perf_counter(), time.perf_counter()
    for step in range(4 + WINDOWS * STEPS):
        ids = torch.randint(0, size["vocab"], (size["batch"], size["seq"] + 1), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0 or (step >= 3 and (step - 3) % STEPS == 0):  # the host waits for the device once in a window only
            torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append((now - last) / STEPS)
            last = now
        if step == 0:
            first = time.perf_counter() - began
    step_s = statistics.median(seconds[2:])
    peak = torch.cuda.max_memory_allocated() / 2**30
    name = "Hugging Face" if hf else "control"
    result = {"name": name, "shape": shape, "step_ms": step_s * 1e3, "tokens_per_s": tokens / step_s}
    print(json.dumps({**result, "peak_gib": peak, "first_step_s": first}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "--hf" in sys.argv)
