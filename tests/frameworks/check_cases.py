"""The healthy trainings that are recorded under real frameworks and compared with one device (test_check_healthy.py)."""

from collections.abc import Iterator
from dataclasses import dataclass

PERTURBED = {"fp64": 0, "fp32": 2, "bf16": 2}


@dataclass(frozen=True)
class Family:
    """Trainings that share a reference on one device: a script, the words of the model, a dtype; and their layouts, with the ranks of each."""

    script: str
    dtype: str
    layouts: tuple[tuple[str, int], ...]
    words: str = ""  # of all: what the model is, clipping
    alone: str = ""  # of the reference only


def family(script: str, dtype: str, words: str, *layouts: str, alone: str = "") -> Family:
    """A layout is written as "2: ddp": on two ranks."""
    pairs = tuple((text.partition(":")[2].strip(), int(text.partition(":")[0])) for text in layouts)
    return Family(script, dtype, pairs, words, alone)


FAMILIES = {
    "torch": [
        family(
            "torch_native",
            "fp64",
            "--clip 0.5",
            "2: ddp",
            "2: ddp view --accumulate 2",
            "4: ddp static",
            "2: fsdp2",
            "4: hsdp --accumulate 2",
            "2: sp2",
            "4: fsdp2 sp2 recompute",
        ),
        family(
            "torch_native",
            "fp64",
            "",
            "2: tp2",
            "4: fsdp2 tp2",
            "2: fsdp1",
            "2: fsdp2 --optimizer adamw --accumulate 4",
        ),
        family("torch_native", "fp64", "tied", "2: ddp --accumulate 4", "2: fsdp2"),
        family("torch_native", "fp64", "--optimizer sgd", "4: ddp --accumulate 2", "2: fsdp2 recompute"),
        family(
            "torch_native", "fp32", "--clip 0.5", "2: fsdp1", "4: fsdp1 --accumulate 2", "2: fsdp1 flat", "4: fsdp2 sp2"
        ),
        family("torch_native", "bf16", "", "2: ddp", "2: fsdp2", "2: tp2"),
        family("torch_native", "fp32", "autocast", "2: ddp", "2: fsdp1 --accumulate 2"),
    ],
    "torch pipelining": [
        family(
            "torch_pipeline",
            "fp64",
            "",
            "2: 1f1b pp2 --accumulate 4",
            "2: gpipe pp2 --accumulate 2",
            "4: 1f1b pp4 --accumulate 4",
            "2: interleaved pp2 --accumulate 4",
            "2: zerobubble pp2 --accumulate 4",
            "4: 1f1b pp2 fsdp2 --accumulate 2",
            "4: interleaved pp2 fsdp2 --accumulate 2",
        ),
        family("torch_pipeline", "fp32", "", "2: 1f1b pp2 --accumulate 8", "4: gpipe pp2 fsdp2 --accumulate 4"),
        family("torch_pipeline", "bf16", "", "2: 1f1b pp2 --accumulate 4"),
    ],
    "megatron-core": [
        family(
            "megatron_gpt",
            "fp32",
            "--clip 1.0",
            "2: tp2",
            "2: sp2",
            "2: pp2 --accumulate 4",
            "2: pp2 vpp2 --accumulate 4",
            "2: dp2 --accumulate 2",
            "2: dopt",
            "4: tp2 dopt",
            "4: sp2 pp2 --accumulate 2",
            "4: pp2 vpp2 dopt --accumulate 2",
            "2: overlap dopt --accumulate 2",
            "4: tp2 pp2 recompute --accumulate 4",
        ),
        family(
            "megatron_gpt",
            "fp32",
            "tied rope gqa swiglu qknorm --clip 1.0",
            "2: tp2",
            "2: sp2",
            "2: pp2 --accumulate 2",
            "4: pp2 dopt --accumulate 2",
        ),
        family(
            "megatron_gpt",
            "fp32",
            "moe --clip 1.0",
            "2: ep2",
            "2: ep2 a2a",
            "4: ep2 a2a dopt",
            "4: tp2 ep2 sp2 a2a",
            "4: ep2 pp2 --accumulate 2",
        ),
        family("megatron_gpt", "bf16", "--clip 1.0", "2: tp2", "2: dopt", "2: pp2 --accumulate 2"),
    ],
    "DeepSpeed": [
        family(
            "deepspeed_engine",
            "fp32",
            "--clip 0.5",
            "2: zero0",
            "2: zero1",
            "2: zero2",
            "2: zero3",
            "2: zero1 --accumulate 2",
            "2: zero2 --accumulate 2",
            "2: zero3 --accumulate 2",
            "4: zero2 overlap",
        ),
        family("deepspeed_engine", "fp32", "twice", "2: zero2", "2: zero3"),
        family("deepspeed_engine", "bf16", "", "2: zero2 --accumulate 2", "2: zero3", alone="zero1"),
        family(
            "deepspeed_engine",
            "fp32",
            "pipe",
            "2: pp2 --accumulate 2",
            "4: pp2 --accumulate 2",
            "4: pp2 zero1 --accumulate 4",
        ),
    ],
    "accelerate": [
        family(
            "accelerate_loop",
            "fp32",
            "--clip 0.5",
            "2: ddp",
            "2: ddp --accumulate 2",
            "2: fsdp2",
            "4: fsdp2 --accumulate 2",
        ),
        family("accelerate_loop", "fp64", "", "2: ddp", "2: fsdp2 --accumulate 4"),
        family("accelerate_loop", "bf16", "", "2: ddp --accumulate 2", "4: ddp"),
        family("accelerate_loop", "fp32", "tied --optimizer sgd", "2: ddp", "4: ddp --accumulate 2"),
    ],
    "Transformers' Trainer": [
        family(
            "hf_trainer",
            "fp32",
            "--clip 0.5",
            "2: ddp",
            "2: ddp --accumulate 2",
            "4: ddp --accumulate 2",
            "1: --accumulate 4",
            "2: launched fsdp2",
        ),
        family("hf_trainer", "fp32", "tied padded", "2: ddp --accumulate 2", "1: --accumulate 4"),
        family("hf_trainer", "fp64", "", "2: ddp recompute"),
        family("hf_trainer", "bf16", "", "2: ddp --accumulate 2"),
    ],
    "torchtitan": [
        family(
            "titan",
            "fp32",
            "--clip 0.5",
            "2: fsdp2",
            "4: hsdp",
            "2: tp2",
            "4: fsdp2 tp2",
            "2: fsdp2 recompute --accumulate 2",
            "4: hsdp --accumulate 2",
            "2: ddp",
        ),
        family("titan", "fp64", "", "2: tp2 recompute"),
        family("titan", "bf16", "", "2: fsdp2"),
    ],
    "Lightning": [
        family("lightning_fit", "fp32", "--clip 0.5", "2: ddp", "2: ddp --accumulate 2", "4: ddp", "1: --accumulate 4"),
        family("lightning_fit", "fp64", "", "2: ddp --accumulate 4", "4: ddp"),
        family("lightning_fit", "bf16", "", "2: ddp"),
        family("lightning_fit", "fp32", "tied --optimizer sgd", "2: ddp --accumulate 2"),
    ],
    "a plain loop": [
        family("torch_native", "fp64", "--clip 0.5", "1: --accumulate 2", "1: --accumulate 8", "1: recompute"),
        family("torch_native", "fp32", "", "1: --accumulate 4", "1: recompute --accumulate 2"),
        family("torch_native", "bf16", "", "1: --accumulate 4"),
        family("torch_native", "fp64", "tied --optimizer sgd", "1: --accumulate 4", "1: --accumulate 2"),
    ],
}


def runs() -> Iterator[tuple[str, Family, str, int]]:
    """Every training: the framework, its family, the words of the layout, the ranks."""
    for framework, families in FAMILIES.items():
        for each in families:
            for layout, world in each.layouts:
                yield framework, each, layout, world
