"""nanotron 0.4: its dataclasses read the sections general, parallelism, tokens and model, strictly: a key that they lack is refused.

The newest release of the registry is older than what is written: its section `optimizer` has other keys and is not read here; `recompute_layer`,
context parallelism and experts came later, so plans with them are refused and skipped. It takes any `model_config`, whose values say nothing here."""

import parse_common as common
import yaml

common.stub("nanotron.logging", "triton", "triton.language")  # it and nanotron.config import each other
SECTIONS = {"general": "GeneralArgs", "parallelism": "ParallelismArgs", "tokens": "TokensArgs", "model": "ModelArgs"}
LATER = ("recompute_layer", "context_parallel_size", "moe_config")


def parse(case):
    from nanotron.config import config as module

    settings = yaml.safe_load(case["text"])
    assert set(settings) <= {*SECTIONS, "optimizer", "checkpoints"}
    later = [key for key in LATER if key in {**settings["parallelism"], **settings["model"]["model_config"]}]
    if later:
        return {"skipped": f"nanotron 0.4 has no {', '.join(later)}"}
    settings.setdefault("general", {"project": "none"})
    settings["tokens"].setdefault("train_steps", 10)
    settings["model"].setdefault("init_method", {"std": 0.02})
    parts = {
        name: module.get_config_from_dict(settings[name], getattr(module, kind)) for name, kind in SECTIONS.items()
    }
    degrees, tokens, model = parts["parallelism"], parts["tokens"], parts["model"]
    return {
        "world": degrees.dp * degrees.tp * degrees.pp, "dp": degrees.dp, "tp": degrees.tp, "pp": degrees.pp, "ep": degrees.expert_parallel_size,
        "sp": degrees.tp > 1 and degrees.tp_mode.name == "REDUCE_SCATTER", "microbatch": tokens.micro_batch_size, "seq": tokens.sequence_length,
        "accumulation": tokens.batch_accumulation_per_replica, "batch": tokens.micro_batch_size * tokens.batch_accumulation_per_replica * degrees.dp,
        "dtype": {"torch.bfloat16": "bf16", "torch.float32": "fp32"}.get(str(model.dtype), str(model.dtype)),
    }  # fmt: skip


common.main(parse)
