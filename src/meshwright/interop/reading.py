"""Settings understood: the plan, the workload and the model that they describe, and what is wrong, unknown or without effect."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from meshwright.describe import catalog, legality
from meshwright.describe.adapter import Adapter
from meshwright.describe.legality import Case
from meshwright.describe.plan import Plan, framework_stages
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.interop.adapters import adapter_of, with_adapter
from meshwright.interop.assemble import Assembled, assemble
from meshwright.interop.keys import Facts, Framework, SettingsProblem, Understood, flags, last_part, read_facts
from meshwright.interop.rules import check_rules
from meshwright.interop.rules_megatron import MEGATRON_RULES
from meshwright.interop.rules_torch import TORCH_RULES
from meshwright.interop.shapes import DROPOUTS, ShapeKeys, catalog_model, shape_of
from meshwright.interop.shell.scripts import Script
from meshwright.interop.stages import stages

# --- Rules of frameworks about their settings, beyond those of a plan: what they refuse, and what they accept without a warning.
#
# Each rule reads facts that settings state; a fact that is missing never breaks a rule.

# Models whose code in Megatron-Bridge sets the layout of the pipeline.
LAYOUT_IN_CODE = re.compile(r"deepseek|kimi|moonlight|sarvam|glm|step|exaone|nemotron")
# Facts that make another plan or workload; a file that leaves one of them open cannot be answered.
DECISIVE = frozenset(("tp", "cp", "pp", "ep", "virtual", "layers_per_chunk", "microbatch", "batch", "seq"))
LAUNCHER = ("nnodes", "nproc_per_node")  # options of torchrun in front of a script's program, which give its GPUs
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
    yield from _nothing_to_shard(facts, framework, made)
    yield from _different_data(settings)
    yield from _stages_of_schedule(facts, framework, shape)
    world = {"gpus": made.gpus} if made.gpus > 0 else {}
    yield from check_rules((*MEGATRON_RULES, *TORCH_RULES), facts | world, framework, settings)


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


def _nothing_to_shard(facts: Facts, framework: Framework, made: Assembled) -> Iterator[SettingsProblem]:
    """Automodel's mesh (components/distributed/mesh_utils.py): FSDP2 with as many copies as data-parallel ranks."""
    copies, plan = facts.get("replicate") or 1, made.plan
    if framework.name == "automodel" and copies > 1 and plan["replicate"] * plan["shard"] == copies:
        yield SettingsProblem(
            "MW-SET-009",
            f"{copies} replicas of {copies} data-parallel ranks",
            why="FSDP2 has no ranks left to shard over",
            fix="dp_replicate_size 1",
        )


def _different_data(settings: Mapping[str, Any]) -> Iterator[SettingsProblem]:
    """Megatron-Bridge's `ConfigContainer.validate`: some data sets state numbers that the model or the training states too."""
    pairs: tuple[tuple[str, str, str, Literal["warning", "error"]], ...] = (
        ("model.seq_length", "dataset.seq_length", "The model and its data have different sequence lengths", "warning"),
        (
            "train.micro_batch_size",
            "dataset.micro_batch_size",
            "The framework refuses data in other micro-batches",
            "error",
        ),
    )
    for first, second, why, severity in pairs:
        found = {key: settings[key] for key in (first, second) if isinstance(settings.get(key), int)}
        if len(set(found.values())) > 1:
            what = " and ".join(f"{key} = {value}" for key, value in found.items())
            yield SettingsProblem("MW-SET-009", what, why, f"{second} {found[first]}", severity)


def _stages_of_schedule(facts: Facts, framework: Framework, shape: ShapeKeys) -> Iterator[SettingsProblem]:
    """torchtitan's distributed/pipeline_parallel.py (commit 02ef790c79) and Automodel's pipelining/functional.py (36044ad3d1): the layers per
    stage give the stages of a rank, of which a schedule needs one, two, or at least two."""
    if (
        framework.name not in ("torchtitan", "automodel")
        or facts.get("pp", 1) == 1
        or not facts.get("layers_per_chunk")
    ):
        return
    schedule = facts.get("schedule") or "1f1b"
    virtual, _, problem = stages(facts, shape.layers, framework)
    if shape.layers is None or problem:
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


@dataclass
class SettingsReading:
    """One file or recipe, understood. `gpus` and `hardware` are 0 and "" where they are not given.

    `gpus_are_least`: the number of GPUs is the smallest that the degrees allow, and the recipe may be meant for more."""

    framework: Framework
    understood: Understood
    assembled: Assembled
    shape: ShapeKeys
    hardware: str = ""
    problems: list[SettingsProblem] = field(default_factory=list)
    gpus_are_least: bool = False
    adapter: Adapter = field(default_factory=Adapter)

    @property
    def facts(self) -> Facts:
        return self.understood.facts

    @property
    def gpus(self) -> int:
        return max(0, self.assembled.gpus)

    @cached_property
    def plan(self) -> Plan:
        return self.assembled.plan_object()

    @cached_property
    def workload(self) -> Workload:
        return self.assembled.workload_object()

    @cached_property
    def stack(self) -> Stack:
        stack: Stack = catalog.load("stacks", self.assembled.stack_name)
        return stack.but(**self.assembled.stack) if self.assembled.stack else stack

    @property
    def stack_section(self) -> str | dict[str, Any]:
        """The stack as a plan file has it: its name, and what the settings change of it."""
        name = self.assembled.stack_name
        return {"extends": name, **self.assembled.stack} if self.assembled.stack else name

    @property
    def errors(self) -> list[SettingsProblem]:
        return [p for p in self.problems if p.severity == "error"]

    def blocking(self, overrides: Sequence[str] = ()) -> list[SettingsProblem]:
        """The errors that end the reading. Overrides may mend an illegal plan or model, which the plan file's own checks then decide."""
        return [p for p in self.errors if not overrides or p.code.startswith("MW-SET")]


def raise_first(problems: Sequence[SettingsProblem]) -> None:
    """Raise the first of some problems."""
    for problem in problems:
        raise MeshwrightError(problem.code, problem.what, why=problem.why, fix=problem.fix)


def understand(
    framework: Framework,
    settings: Mapping[str, Any],
    args: Sequence[str] = (),
    *,
    gpus: int = 0,
    hardware: str = "",
    model: str = "",
    shape: Mapping[str, Any] | None = None,
    script: Script | None = None,
) -> SettingsReading:
    """The reading of settings and flags; flags win. `gpus`, `hardware`, `model` and `shape` are known from elsewhere, `script` is their file."""
    script = script or Script()
    merged = merged_settings(framework, settings, args)
    understood = read_facts(framework.table, merged)
    facts = understood.facts
    unstated = [fact for fact in DROPOUTS if framework.dropout and script.args and fact not in facts]
    facts |= dict.fromkeys(unstated, framework.dropout)
    for kind, texts in (("left open", script.left_open), ("left out", script.skipped), ("not read", script.sourced)):
        for text in texts:
            understood.note(kind, text)
    if script.gpus and understood.unknown:
        understood.others["unknown"] = [key for key in understood.unknown if last_part(key) not in LAUNCHER]
    name = str(facts.get("model") or model or "")
    found = shape_of(facts, _better_name(name, model), shape, framework.trains_mtp)
    assembled = assemble(facts, framework, gpus or script.gpus, found.layers, found.experts)
    assembled.assumed += script.notes(bool(gpus))
    assembled.assumed += [
        f"{fact.replace('_', ' ')}: {framework.dropout:g}, the default of {framework.title}" for fact in unstated
    ]
    if found.complete and "layers_per_stage" not in assembled.plan:
        stages = framework_stages(found.model, catalog.load("stacks", assembled.stack_name), assembled.plan["pp"])
        assembled.plan |= {"layers_per_stage": stages} if stages else {}
    if unstated := [axis for axis in assembled.exposed if f"overlap_{axis}" not in understood.sources]:
        assembled.assumed.append(f"no overlap of {', '.join(unstated)}: the framework's default")
    adapter = adapter_of(facts)
    if found.complete:
        found = replace(found, model=with_adapter(found.model, adapter))
    reading = SettingsReading(framework, understood, assembled, found, hardware, adapter=adapter)
    reading.problems = [
        *_left_open(understood),
        *_refused_shape(found),
        *assembled.problems,
        *check_facts(reading.facts, framework, assembled, found, hardware, merged),
    ]
    if framework.layout_in_code and not found.layers_stated and LAYOUT_IN_CODE.search(name.lower() or model.lower()):
        reading.problems = [_less_certain(p) for p in reading.problems]
    if not reading.errors:
        reading.problems += _illegal(reading)
    return reading


def _refused_shape(shape: ShapeKeys) -> list[SettingsProblem]:
    """Numbers of the model that contradict each other."""
    error = shape.refused
    return [] if error is None else [SettingsProblem(error.code, error.what, error.why, error.fix)]


def _left_open(understood: Understood) -> Iterator[SettingsProblem]:
    """Degrees and sizes whose value the file leaves to whoever starts it: another plan would be read in silence."""
    for key in (key for fact, key in understood.open_facts.items() if fact in DECISIVE):
        value = str(understood.used[key])
        name = re.search(r"[A-Za-z_]\w*", value)
        given = f"{name[0]}=N meshwright …, or " if name and re.fullmatch(r"\$\{?[A-Za-z_]\w*\}?", value) else ""
        yield SettingsProblem(
            "MW-SET-016",
            f"{key} = {value}, which the file does not assign",
            why="The plan depends on it, and a file is read without running it",
            fix=f"{given}write the number into a copy of the file",
        )


def merged_settings(framework: Framework, settings: Mapping[str, Any], args: Sequence[str]) -> dict[str, Any]:
    """Settings and flags under the names of the table's keys; flags win."""
    return {**_dashed(framework, settings), **_named(framework, flags(args))}


def _less_certain(problem: SettingsProblem) -> SettingsProblem:
    """A division of layers that is only known by the model's name, in a framework whose code may set another one."""
    if problem.code != "MW-SET-003":
        return problem
    return replace(problem, severity="warning", why=f"{problem.why}, unless its code sets a layout for this model")


def _better_name(name: str, model: str) -> str:
    """Of the model's names in the settings and from elsewhere, one that the catalog has, else the longer."""
    names = sorted((name, model), key=len, reverse=True)
    return next((each for each in names if catalog_model(each)), names[0])


def _dashed(framework: Framework, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a framework of flags: `model_parallel.tensor_model_parallel_size` in a file is the flag --tensor-model-parallel-size."""
    if framework.flag_prefix or framework.form != "args":
        return dict(settings)
    return {
        name if name.startswith("--") or name.isupper() else _as_flag(name): value for name, value in settings.items()
    }


def _as_flag(name: str) -> str:
    return "--" + name.rpartition(".")[2].replace("_", "-")


def _named(framework: Framework, given: dict[str, Any]) -> dict[str, Any]:
    """Flags under the names of the table's keys."""
    prefix = framework.flag_prefix
    if not prefix:
        return given
    return {name.removeprefix(prefix).replace("-", "_"): value for name, value in given.items()}


def _illegal(reading: SettingsReading) -> list[SettingsProblem]:
    """The first rule of `describe.legality` that the plan breaks on this model, workload and stack."""
    try:
        plan, workload = reading.plan, reading.workload
        stack = reading.stack
        # What people run in the framework, it can run: of its limits only divisibility counts here.
        stack = stack.but(can={"framework": stack.can.framework, "tensor_divides_kv": stack.can.tensor_divides_kv})
        if reading.facts.get("microbatch_group"):
            stack = stack.but(interleaved_rounds=False)
        error = legality.problem(Case(plan, reading.shape.model, workload, None, stack, framework=True))
    except MeshwrightError as failure:
        error = failure
    return [] if error is None else [SettingsProblem(error.code, error.what, error.why, error.fix)]
