"""What Meshwright writes is run: two steps of a small model by the framework itself, on 2 or 4 CPU processes with gloo.

A run gives `launch`'s words and file, unchanged, to a driver in the framework's environment (runs.py). Its layout must be the plan's: degrees,
micro-batches, and on every rank the elements of parameters and of Adam's moment that Meshwright's memory prediction counts. Its losses and
gradient norms must be those of one process of the same framework, with the same weights and global batch. Plans are in float32, so that
rounding hides nothing. What a driver replaces because a CPU does not have it is printed.
"""

from dataclasses import replace
from typing import Any

import pytest
from cases import Case, expected
from runs import Run, outcomes

from meshwright.predict.prediction import predict

FP32 = ("workload.precision=fp32", "plan.param_dtype=fp32", "plan.master=false", "optimizer.warmup=0")
SMALL_EXPERTS = (
    "model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.vocab=256", "model.expert_ffn=64", "model.experts=4",
)  # fmt: skip
ROUNDING = 1e-6  # relative: sums of float32 in another order


def small(*fix: str, gpus: int = 2, model: str = "nano", settings: tuple[str, ...] = ()) -> Case:
    """A question about a small model: 8 sequences of 64 tokens in micro-batches of 2, float32."""
    return Case(model, gpus, 8, 64, ("microbatch=2", *fix), FP32 + settings, "laptop")


def experts(*fix: str, gpus: int = 2) -> Case:
    return small(*fix, gpus=gpus, model="tiny-moe", settings=SMALL_EXPERTS)


def titan(*fix: str, gpus: int = 2) -> Case:
    """Settings of torchtitan name a model: the smallest Llama 3, of which the run shrinks the widths, on GPUs that hold it in float32."""
    return replace(small(*fix, gpus=gpus, model="llama3-8b"), cluster="dgx-b200")


DEEPSPEED = {
    f"deepspeed zero {stage}": Run("deepspeed", "deepspeed", small("tp=1", f"zero={stage}")) for stage in range(4)
}
MEGATRON = {
    "data parallel": small("dp=2", "zero=0"),
    "distributed optimizer": small("dp=2", "zero=1"),
    "tensor parallel": small("tp=2", "sp=false"),
    "sequence parallel": small("tp=2", "sp=true"),
    "pipeline": small("pp=2", "virtual=1"),
    "virtual stages": small("pp=2", "virtual=2"),
    "tensor and pipeline": small("tp=2", "pp=2", "virtual=1", gpus=4),
    "tensor and optimizer": small("tp=2", "dp=2", "zero=1", gpus=4),
    "virtual stages and optimizer": small("pp=2", "virtual=2", "dp=2", "zero=1", gpus=4),
    "experts": experts("ep=2"),
    "experts and data": experts("ep=2", gpus=4),
}
TRAINER = {
    f"trainer deepspeed zero {stage}": Run("transformers-trainer", "trainer", small("tp=1", f"zero={stage}"))
    for stage in (1, 2, 3)
}
ACCELERATE = {
    "accelerate ddp": Run("accelerate", "accelerate", small("zero=0")),
    "accelerate fsdp2": Run("accelerate", "accelerate", replace(small("zero=3"), cluster="dgx-h100")),
    "accelerate hsdp": Run(
        "accelerate", "accelerate", replace(small("zero=3", "replicate=2", gpus=4), cluster="dgx-h100")
    ),
}
TITAN_WIDTHS = (("hidden", 64), ("heads", 8), ("kv_heads", 4), ("ffn", 192), ("vocab", 256))
TITAN = {
    "fsdp": titan("zero=3"),
    "ddp": titan("zero=0", "dp=2"),
    "tensor parallel": titan("tp=2", "sp=true"),
    "fsdp and tensor": titan("zero=3", "tp=2", "sp=true", "dp=2", gpus=4),
    "hsdp": titan("zero=3", "replicate=2", gpus=4),
    "pipeline": titan("pp=2", "virtual=1", "schedule=1f1b"),
    "interleaved and fsdp": titan("zero=3", "pp=2", "virtual=2", "schedule=interleaved", "dp=2", gpus=4),
    "zero bubble and fsdp": titan("zero=3", "pp=2", "virtual=2", "schedule=interleaved-zb", "dp=2", gpus=4),
}
TITANS = {"torchtitan-0_2": "torchtitan", "torchtitan-0_3": "torchtitan_python"}
# Gradients of torchtitan 0.2 over those of one process. DDP averages gradients of a loss that is already divided by the tokens of all ranks.
# A pipeline does not divide the loss by the tokens of the batch: 8 sequences of 64.
NORM_FACTORS = {"torchtitan-0_2 ddp": 1 / 2} | {
    f"torchtitan-0_2 {name}": 8 * 64 for name, case in TITAN.items() if "pp=2" in case.fix
}
RUNS = {
    **DEEPSPEED,
    **TRAINER,
    **ACCELERATE,
} | {
    f"{environment} {name}": Run(environment, "megatron", case)
    for environment in ("megatron-core-0_17", "megatron-core-0_19")
    for name, case in MEGATRON.items()
}
RUNS |= {
    f"{environment} {name}": Run(environment, driver, case, TITAN_WIDTHS)
    for environment, driver in TITANS.items()
    for name, case in TITAN.items()
    if environment == "torchtitan-0_2" or "pp=2" not in case.fix  # pipelines of 0.3 need a PyTorch after 2.13
}


def answers_of(run: Run) -> list[dict[str, Any]]:
    """What every rank of a run saw; skips the test if the framework cannot be installed."""
    everything = (*RUNS.values(), *(each.alone for each in RUNS.values()))
    together = tuple(dict.fromkeys(each for each in everything if each.environment == run.environment))
    answers = outcomes(together)[run]
    if "missing" in answers[0]:
        pytest.skip(answers[0]["missing"])
    assert "refused" not in answers[0], answers[0]["refused"]
    return answers


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RUNS)
def test_a_framework_trains_with_what_we_wrote_as_on_one_process(name: str) -> None:
    run = RUNS[name]
    assert run.offer.refused + run.offer.launch_refused == ""
    config, answers, alone = run.config, answers_of(run), answers_of(run.alone)[0]
    plan = expected(config)
    stages = predict(config).memory_by_stage
    print("replaced on CPU:", *answers[0]["overrides"], sep="\n  ")
    assert len(answers) == run.case.gpus
    for answer in answers:
        assert {k: v for k, v in answer.items() if k in plan} == {k: plan[k] for k in answer if k in plan}
        assert answer["rows"] == 2 * plan["accumulation"] * [
            plan["microbatch"]
        ]  # every forward pass of the first layer
        memory = stages[answer.get("stage", 0)]
        elements = {part: memory[part] * 2**30 / 4 for part in ("parameters", "optimizer")}
        assert answer["parameters"] == pytest.approx(elements["parameters"], rel=0.01)  # shards are padded
        assert answer["states"] == pytest.approx(elements["optimizer"] / 2, rel=0.01)
        assert answer["losses"] == pytest.approx(alone["losses"], rel=ROUNDING)
        norms = [norm * NORM_FACTORS.get(name, 1) for norm in alone["norms"]]
        assert answer["norms"] == pytest.approx(norms, rel=ROUNDING)
