"""TRL: the arguments of `trl sft --config FILE`, and the configurations of PEFT and bitsandbytes that they make.

The number of processes is given: there is one here."""

import os
import tempfile

import parse_common as common

os.environ["ACCELERATE_USE_CPU"] = "true"


def parse(case):
    from transformers import TrainingArguments
    from trl import get_peft_config
    from trl.scripts.sft import make_parser

    TrainingArguments.world_size = property(lambda self: case["world"])
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(case["text"] + "\noutput_dir: /nonexistent\ndataset_name: none\nuse_cpu: true\n")  # a plan has none
        file.flush()
        _, training, model, _ = make_parser().parse_args_and_config(["--config", file.name])
    answer = common.trainer_answer(training, case["world"], training.gradient_checkpointing)
    config = get_peft_config(model)
    named = case["targets"]
    assert config is None or config.target_modules == (
        set(named) if named and named != ["all-linear"] else named and named[0]
    )
    assert not (model.load_in_4bit and answer["zero"]) or model.bnb_4bit_quant_storage == model.dtype
    return {
        **answer, "seq": training.max_length,
        "adapter": [config.r, config.lora_alpha, config.lora_dropout] if config else None,
        "base_bits": 4 if model.load_in_4bit else 8 if model.load_in_8bit else None,
    }  # fmt: skip


common.main(parse)
