"""Transformers' Trainer with a small Llama: DDP; fsdp2 by `fsdp=`; padded sequences of other lengths with `padded`."""

import os
import tempfile

import common
import torch
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """The sequences of both steps, in the order in which the ranks read micro-batches: each takes every WORLD-th."""

    def __init__(self, padded):
        self.rows, self.padded = torch.cat([common.tokens(step)[0] for step in range(common.STEPS)]), padded

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        labels = row.clone()
        if self.padded:
            labels[common.SEQ - (5 * number) % 13 :] = -100
        return {"input_ids": row, "labels": labels}


class InOrder(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


def main():
    chosen = common.options()
    if chosen.bug:
        import bugs_trainer

        bugs_trainer.plant(chosen)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=common.VOCAB,
        hidden_size=common.HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=common.SEQ,
        tie_word_embeddings="tied" in chosen.layout,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    if chosen.dtype == "fp64":
        model = model.double()
    more = {}
    if "fsdp2" in chosen.layout:
        more = {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        }
    if "launched" in chosen.layout:  # what `accelerate launch --use_fsdp` sets
        os.environ.update(
            ACCELERATE_USE_FSDP="true",
            FSDP_VERSION="2",
            FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
            FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaDecoderLayer",
        )
    if "recompute" in chosen.layout:
        more |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        ddp_backend="gloo" if chosen.world > 1 else None,
        max_steps=common.STEPS,
        per_device_train_batch_size=common.BATCH // chosen.world // chosen.accumulate,
        gradient_accumulation_steps=chosen.accumulate,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=chosen.clip,
        optim="adamw_torch",
        bf16=chosen.dtype == "bf16",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        remove_unused_columns=False,
        **more,
    )
    InOrder(model=model, args=arguments, train_dataset=Rows("padded" in chosen.layout)).train()


if __name__ == "__main__":
    main()
