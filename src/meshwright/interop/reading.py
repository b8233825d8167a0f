"""Settings understood: the plan, the workload and the model that they describe, and what is wrong, unknown or without effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.describe import catalog, legality
from meshwright.describe.framework_stages import framework_stages
from meshwright.describe.legality import Case
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.interop.assemble import Assembled, assemble
from meshwright.interop.checks import check_facts
from meshwright.interop.frameworks.framework import Framework
from meshwright.interop.keys import Facts, Understood, flags, read_facts
from meshwright.interop.problems import SettingsProblem
from meshwright.interop.shapes import ShapeKeys, shape_of


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

    @property
    def facts(self) -> Facts:
        return self.understood.facts

    @property
    def gpus(self) -> int:
        return max(0, self.assembled.gpus)

    @property
    def plan(self) -> Plan:
        return self.assembled.plan_object()

    @property
    def workload(self) -> Workload:
        return self.assembled.workload_object()

    @property
    def stack(self) -> Stack:
        stack: Stack = catalog.load("stacks", self.framework.stack)
        return stack.but(**self.assembled.stack) if self.assembled.stack else stack

    @property
    def stack_section(self) -> str | dict[str, Any]:
        """The stack as a plan file has it: its name, and what the settings change of it."""
        name = self.framework.stack
        return {"extends": name, **self.assembled.stack} if self.assembled.stack else name

    @property
    def errors(self) -> list[SettingsProblem]:
        return [p for p in self.problems if p.severity == "error"]


def understand(
    framework: Framework,
    settings: Mapping[str, Any],
    args: Sequence[str] = (),
    *,
    gpus: int = 0,
    hardware: str = "",
    model: str = "",
    shape: Mapping[str, Any] | None = None,
) -> SettingsReading:
    """The reading of settings and flags; flags win. `gpus`, `hardware`, `model` and `shape` are known from elsewhere."""
    merged = {**_dashed(framework, settings), **_named(framework, flags(args))}
    understood = read_facts(framework.table, merged)
    facts = understood.facts
    name = str(facts.get("model") or model or "")
    found = shape_of(facts, _better_name(name, model), shape, framework.trains_mtp)
    assembled = assemble(facts, framework, gpus, found.layers, found.experts)
    if found.complete and "layers_per_stage" not in assembled.plan:
        stages = framework_stages(found.model, catalog.load("stacks", framework.stack), assembled.plan["pp"])
        assembled.plan |= {"layers_per_stage": stages} if stages else {}
    if unstated := [axis for axis in assembled.exposed if f"overlap_{axis}" not in understood.sources]:
        assembled.assumed.append(f"no overlap of {', '.join(unstated)}: the framework's default")
    reading = SettingsReading(framework, understood, assembled, found, hardware)
    reading.problems = [*assembled.problems, *check_facts(reading.facts, framework, assembled, found, hardware, merged)]
    if framework.layout_in_code and not found.layers_stated:
        reading.problems = [_less_certain(p) for p in reading.problems]
    if not reading.errors:
        reading.problems += _illegal(reading)
    return reading


def _less_certain(problem: SettingsProblem) -> SettingsProblem:
    """A division of layers that is only known by the model's name, in a framework whose code may set another one."""
    if problem.code != "MW-SET-003":
        return problem
    return replace(problem, severity="warning", why=f"{problem.why}, unless its code sets a layout for this model")


def _better_name(name: str, model: str) -> str:
    """The name of the model in the settings, or the one that is known from elsewhere if it says more."""
    return model if model and len(model) > len(name) else name or model


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
        error = legality.problem(Case.of(plan, reading.shape.model, workload, None, stack, framework=True))
    except MeshwrightError as failure:
        error = failure
    return [] if error is None else [SettingsProblem(error.code, error.what, error.why, error.fix)]
