"""LLaMA-Factory: `get_train_args`, which is what `llamafactory-cli train FILE` calls first, with the number of processes given."""

import os

import parse_common as common
import yaml

os.environ["ACCELERATE_USE_CPU"] = "true"


def parse(case):
    import llamafactory.hparams.parser as parser
    from transformers import TrainingArguments
    from transformers.training_args import ParallelMode

    TrainingArguments.world_size = property(lambda self: case["world"])
    TrainingArguments.parallel_mode = property(lambda self: ParallelMode.DISTRIBUTED)
    parser.check_version = lambda *a, **b: None  # of bitsandbytes, which is for GPUs
    settings = {
        "do_train": True,
        "output_dir": "/nonexistent",
        "model_name_or_path": "none",
        "dataset": "none",
        "use_cpu": True,
    }  # a plan has none
    model, data, training, tuning, _ = parser.get_train_args(yaml.safe_load(case["text"]) | settings)
    lora = tuning.finetuning_type == "lora"
    named = case["targets"] or ["q_proj", "v_proj"]  # PEFT's default for these models
    assert not lora or tuning.lora_target == (["all"] if named == ["all-linear"] else named)
    answer = common.trainer_answer(training, case["world"], not model.disable_gradient_checkpointing)
    assert not answer["zero"] or not model.low_cpu_mem_usage  # else all weights are on every GPU first
    return {
        **answer,
        "seq": data.cutoff_len,
        "fp8": training.fp8,
        "adapter": [tuning.lora_rank, tuning.lora_alpha, tuning.lora_dropout] if lora else None,
        "base_bits": model.quantization_bit,
    }


common.main(parse)
