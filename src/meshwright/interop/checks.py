"""Rules of frameworks about their settings, beyond those of a plan: what they refuse, and what they accept without a warning.

Each rule reads facts that settings state; a fact that is missing never breaks a rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.interop.assemble import Assembled
from meshwright.interop.checks_megatron import check_megatron
from meshwright.interop.frameworks.framework import Framework
from meshwright.interop.keys import Facts
from meshwright.interop.problems import SettingsProblem
from meshwright.interop.shapes import ShapeKeys
from meshwright.interop.stages import stages

NODE = 8  # GPUs of one NVLink domain of a server
BEYOND_NODE = re.compile(r"^b[23]00", re.IGNORECASE)  # servers whose expert dispatchers fail across nodes


def check_facts(
    facts: Facts, framework: Framework, made: Assembled, shape: ShapeKeys, hardware: str, settings: Mapping[str, Any]
) -> Iterator[SettingsProblem]:
    """Return the errors in the facts of settings."""
    yield from _precision(facts)
    yield from _unfilled(facts)
    yield from _sequence(facts, framework)
    yield from _local_batch(facts, framework)
    yield from _experts_on_nvlink(facts, made, hardware)
    yield from _zero_in_pipeline(facts, framework)
    yield from _two_lengths(settings)
    yield from _stages_of_schedule(facts, framework, shape)
    yield from check_megatron(facts, framework, settings)
    yield from _axolotl(facts, framework, settings)


def _precision(facts: Facts) -> Iterator[SettingsProblem]:
    if facts.get("half_alternative") and facts.get("half") in ("bf16", "fp16"):
        yield SettingsProblem(
            "MW-SET-005",
            "bf16 and fp16 are both set",
            why="The two precisions exclude each other",
            fix="drop the block of the precision that is not used",
        )


def _unfilled(facts: Facts) -> Iterator[SettingsProblem]:
    for key in facts.get("unfilled") or ():
        yield SettingsProblem(
            "MW-SET-006",
            f"{key} = auto",
            why="The caller fills `auto` only under the names that start with stage3_; the framework cannot parse it here",
            fix=f"{key.rpartition('.')[0]}.stage3_{key.rpartition('.')[2]} = auto, or a number",
        )


def _sequence(facts: Facts, framework: Framework) -> Iterator[SettingsProblem]:
    if framework.splits_evenly and facts.get("stated_sp") and facts.get("tp", 1) == 1:
        yield SettingsProblem(
            "MW-SET-009",
            "sequence parallelism with tensor parallelism 1",
            why="It has no effect and is switched off",
            severity="note",
        )


def _local_batch(facts: Facts, framework: Framework) -> Iterator[SettingsProblem]:
    local, micro, pp = facts.get("local_batch"), facts.get("pipeline_microbatch"), facts.get("pp", 1)
    if not local or not micro or pp == 1:
        return
    if local % micro:
        yield SettingsProblem(
            "MW-SET-007",
            f"a local batch of {local} does not divide into micro-batches of {micro}",
            why="The pipeline takes whole micro-batches",
        )
    elif local // micro < pp:
        refuses = framework.name == "automodel"
        yield SettingsProblem(
            "MW-SET-007",
            f"{local // micro} micro-batch{'es' * (local // micro > 1)} for a pipeline of {pp} stages",
            why="The framework needs at least one micro-batch per stage"
            if refuses
            else "Stages are idle: micro-batches are fewer than stages",
            fix=f"a local batch of {pp * micro}",
            severity="error" if refuses else "warning",
        )


def _experts_on_nvlink(facts: Facts, made: Assembled, hardware: str) -> Iterator[SettingsProblem]:
    """Fast expert dispatchers on servers with 8 GPUs: reports of failures when a group of experts spans servers."""
    kind, ep = facts.get("dispatcher"), facts.get("ep", 1)
    if kind not in ("deepep", "hybridep") or facts.get("dispatcher_type") in ("alltoall", "allgather"):
        return
    domain = facts.get("nvlink_domain") or NODE
    ranks = ep * (facts.get("expert_tp") or 1)
    if ranks > domain and BEYOND_NODE.match(hardware.strip()):
        yield SettingsProblem(
            "MW-SET-008",
            f"ep = {ep} with the {kind} dispatcher spans {ranks} GPUs, beyond the NVLink domain of {domain} on {hardware}",
            why="Runs with it failed there: an error about the topology, or an illegal memory access",
            fix=f"ep = {domain}, or the all-to-all dispatcher",
        )


def _zero_in_pipeline(facts: Facts, framework: Framework) -> Iterator[SettingsProblem]:
    stage = facts.get("zero_config", facts.get("zero"))
    if (
        framework.name == "deepspeed"
        and facts.get("pp", 1) > 1
        and facts.get("pipeline_engine", True)
        and stage in (2, 3)
    ):
        yield SettingsProblem(
            "MW-SET-009",
            f"ZeRO stage {stage} with a pipeline of {facts['pp']} stages",
            why="The pipeline engine accumulates gradients over micro-batches and refuses to shard them",
            fix="stage 1, or --no-pipeline-parallel",
        )


def _two_lengths(settings: Mapping[str, Any]) -> Iterator[SettingsProblem]:
    found = {
        key: settings[key] for key in ("model.seq_length", "dataset.seq_length") if isinstance(settings.get(key), int)
    }
    if len(set(found.values())) > 1:
        yield SettingsProblem(
            "MW-SET-009",
            " and ".join(f"{key} = {value}" for key, value in found.items()),
            why="The model and its data have different sequence lengths",
            severity="warning",
        )


def _stages_of_schedule(facts: Facts, framework: Framework, shape: ShapeKeys) -> Iterator[SettingsProblem]:
    """torchtitan's distributed/pipeline_parallel.py (commit 02ef790c79): the layers per stage give the stages of a rank, of which a schedule
    needs one, two, or at least two."""
    if framework.name != "torchtitan" or facts.get("pp", 1) == 1 or not facts.get("layers_per_chunk"):
        return
    schedule = facts.get("schedule") or "1f1b"
    virtual, _, problems = stages(facts, shape.layers, framework)
    if shape.layers is None or problems:
        return
    least, most = {"1f1b": (1, 1), "gpipe": (1, 1), "zbv": (2, 2), "dualpipev": (2, 2)}.get(schedule, (2, virtual + 1))
    if not least <= virtual <= most:
        needs = f"{least}" if least == most else f"at least {least}"
        yield SettingsProblem(
            "MW-SET-003",
            f"{virtual} stage{'s' * (virtual > 1)} per rank with the schedule {schedule}",
            why=f"It needs {needs}; stages of {facts['layers_per_chunk']} layers make {virtual * facts['pp']}",
            fix=f"{-(-(shape.layers + 2) // (least * facts['pp']))} layers per stage",
        )


def _axolotl(facts: Facts, framework: Framework, settings: Mapping[str, Any]) -> Iterator[SettingsProblem]:
    """axolotl's utils/schemas/validation.py (commit 6e30f2a321)."""
    if framework.name != "axolotl":
        return
    if facts.get("cp", 1) > 1 and settings.get("sample_packing") is True and facts.get("microbatch", 1) > 1:
        yield SettingsProblem(
            "MW-SET-009",
            f"a micro-batch of {facts['microbatch']} packed samples with context parallelism",
            why="Its attention over several ranks takes one packed sequence",
            fix="micro_batch_size 1",
        )
    if settings.get("deepspeed") and settings.get("fsdp"):
        yield SettingsProblem(
            "MW-SET-009",
            "deepspeed and fsdp are both set",
            why="Each of the two shards the model",
            fix="drop one of the two",
        )
