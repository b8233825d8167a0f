"""The twelve lessons of the page: a few sentences, a view to open, and questions. The last one asks about the present plan.

The words are in `lessons.toml`. An answer is never typed: a number question names one of the values below, which are those of the functions
that the commands use, and a choice is decided by comparing such values (the option with the largest is right).
"""

import tomllib
from functools import cache
from importlib.resources import files

import numpy as np

from meshwright.cost.advice import communication_share, microbatches_for, minimum_bucket, ring_buffer
from meshwright.cost.memory import minimum_gpus, zero_state_bytes
from meshwright.describe import catalog
from meshwright.lower.program import sent
from meshwright.planner.goodput import young_interval
from meshwright.programs.pipelines.formulas import bubble_fraction, bubble_overhead, in_flight
from meshwright.units import Json
from meshwright.view.page.subject import Subject

TOLERANCE = 0.02  # of a number: two correct digits are enough
GB, MB, MIB = 1e9, 1e6, 2**20


def sent_bytes(collective: str, buffer: float, ranks: float = 8.0) -> float:
    return float(np.asarray(sent(collective, buffer, ranks)))


def memory_values() -> dict[str, float]:
    """Bytes of 7 billion parameters, by ZeRO stage on 8 GPUs, and what DDP and FSDP send."""
    ddp = sent_bytes("all_reduce", 14 * GB)
    fsdp = 2 * sent_bytes("all_gather", 14 * GB) + sent_bytes("reduce_scatter", 14 * GB)
    return {
        "state_gb": zero_state_bytes(7e9, 1, 0) / GB,
        "state_gpus": minimum_gpus(7e9, 80 * GB),
        "ddp_gb": zero_state_bytes(7e9, 8, 0) / GB,
        "zero1_gb": zero_state_bytes(7e9, 8, 1) / GB,
        "zero3_gb": zero_state_bytes(7e9, 8, 3) / GB,
        "fsdp_over_ddp": fsdp / ddp,
        "ddp_over_fsdp": ddp / fsdp,
        "fp16_largest": float(np.finfo(np.float16).max),
        "fp32_largest": float(np.finfo(np.float32).max),
    }


def link_values() -> dict[str, float]:
    """Bytes of an all-reduce of 10 GB, of one of GPT-3's layers, and the constants of links."""
    infiniband, nvlink = (catalog.load("links", name) for name in ("ib-ndr", "nvlink4"))
    ring = sent_bytes("all_reduce", 10 * GB)
    return {
        "ring_gb": ring / GB,
        "ring_growth": 2 * 10 * GB / ring,
        "long_ring_gb": sent_bytes("all_reduce", 10 * GB, 1024.0) / GB,
        "alpha_us": 1e6 * infiniband.alpha,
        "rate_gb": 1e-9 / infiniband.beta,
        "crossover_kb": minimum_bucket(infiniband.alpha, infiniband.beta) / 1e3,
        "communication_percent": 100 * communication_share(80e-3, 20e-3)[0],
        "layer_mb": sent_bytes("all_reduce", 2048 * 12288 * 2) / MB,
        "nvlink_rate": 1 / nvlink.beta,
        "infiniband_rate": 1 / infiniband.beta,
    }


def pipeline_values() -> dict[str, float]:
    """Bubbles of 4 ranks and 8 micro-batches, and the micro-batches in flight."""
    schedules = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1))
    gpipe, plain, looped, zero_bubble = (float(bubble_fraction(name, 4, 8, v)) for name, v in schedules)
    return {
        "gpipe": gpipe,
        "bubble": plain,
        "bubble_percent": 100 * plain,
        "looped": looped,
        "looped_percent": 100 * looped,
        "zero_bubble": zero_bubble,
        "busy_1f1b": -plain,
        "busy_looped": -looped,
        "busy_zero_bubble": -zero_bubble,
        "microbatches": microbatches_for("1f1b", 4, 1, 0.8) or 0,
        "overhead_percent": 100 * float(bubble_overhead("1f1b", 4, 32)),
        "gpipe_in_flight": float(in_flight("gpipe", 4, 8)),
        "in_flight": float(in_flight("1f1b", 4, 8)),
        "gpipe_mib": 64 * float(in_flight("gpipe", 4, 8)),
        "in_flight_mib": 64 * float(in_flight("1f1b", 4, 8)),
    }


def model_values() -> dict[str, float]:
    """Recompute of Llama 2 7B, double buffers of ring attention, and the experts of Mixtral."""
    llama, mixtral = (catalog.load("models", name) for name in ("llama2-7b", "mixtral-8x7b"))
    saved, inputs = sum(llama.activations(4096).values()), llama.layers * 4096 * llama.hidden * 2
    return {
        "recompute_percent": 100 * sum(llama.flops(4096).values()) / llama.model_flops(4096),
        "saved_gb": saved / GB,
        "inputs_gb": inputs / GB,
        "shrink_percent": 100 * (1 - inputs / saved),
        "buffer_mib": ring_buffer(131072, 64, 8192, 1) / MIB,
        "long_buffer_gib": ring_buffer(2**20, 8, 8192, 1) / 2**30,
        "active_percent": 100 * mixtral.active / mixtral.total,
        "active_billions": mixtral.active / 1e9,
        "total_billions": mixtral.total / 1e9,
        "tokens_mb": sent_bytes("all_to_all", 4096.0 * mixtral.top_k * mixtral.hidden * 2) / MB,
        "young_s": young_interval(60.0, 24 * 3600.0),
        "young_minutes": young_interval(60.0, 24 * 3600.0) / 60,
    }


@cache
def general_values() -> dict[str, float]:
    """The values that do not depend on the plan."""
    return memory_values() | link_values() | pipeline_values() | model_values()


@cache
def lessons() -> list[Json]:
    text = files("meshwright.view.page").joinpath("lessons.toml").read_text("utf-8")
    lessons: list[Json] = tomllib.loads(text)["lesson"]
    return lessons


def question(written: Json, values: dict[str, float]) -> Json:
    """A question with its answer: a number in its unit, or the index of the right option."""
    out = {"ask": written["ask"].format(**values), "why": written["why"].format(**values), "tolerance": TOLERANCE}
    if "answer" in written:
        return out | {"answer": float(values[written["answer"]]), "unit": written["unit"], "options": []}
    options, sizes = list(written["options"]), [values.get(x, 0.0) for x in written["options"].values()]
    right = int(np.argmax(sizes))
    if "equal" in written:
        options.append(written["equal"])
        right = len(sizes) if np.ptp(sizes) <= 1e-9 * max(map(abs, sizes)) else right
    return out | {"answer": right, "unit": "", "options": options}


def data(subject: Subject) -> Json:
    """Twelve lessons, each with text, a view to open, and questions with their answers."""
    p = subject.estimate.prediction
    rate = p.tokens_per_s or 1.0
    values = general_values() | {"rate": rate, "step_s": p.step_time_s, "days": 1e12 / rate / 86400}
    return {
        "lessons": [
            {"changes": {}, **lesson, "questions": [question(written, values) for written in lesson["questions"]]}
            for lesson in lessons()
        ]
    }
