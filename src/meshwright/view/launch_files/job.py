"""What every launch file is written from: the ranks and their hosts, the run folder, the restarts, and the reasons for each number."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.result import Prediction
from meshwright.errors import MeshwrightError
from meshwright.predict.prediction import predict
from meshwright.units import Json, format_seconds
from meshwright.view.launch_files.frameworks import for_framework, framework_of, program_of
from meshwright.view.launch_files.program import TrainingProgram

MOST_IN_ONE_HOST = 16  # a larger first level is an NVLink domain of many hosts …
DOMAIN_HOST = 4  # … such as NVL72, whose hosts have 4 GPUs
SAVE_SECONDS = 1800.0  # between checkpoints, where the plan file gives no number of steps
SAVE_BEFORE_END = 180  # seconds before the time limit at which ranks are asked to save


@dataclass(frozen=True)
class LaunchJob:
    """One training to be started on `nodes` hosts with `per_node` processes each."""

    name: str
    config: Config
    program: TrainingProgram
    prediction: Prediction
    typed: str  # the command that writes the file
    nodes: int
    per_node: int
    folder: str
    save_every: int
    save_reason: str
    interface: str = ""
    image: str = ""
    claim: str = ""
    time_limit: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # of `mw.load`, which change what the plan file says

    @property
    def restarts(self) -> int:
        return self.config.run.restarts

    @property
    def has_gpus(self) -> bool:
        return self.config.cluster.accelerator.name != "cpu"

    @property
    def threads(self) -> int:
        """Threads of each rank for operations on the CPU: one, since a host has a process for each device."""
        return 1

    def heading(self) -> list[str]:
        """The lines at the top of a file, without comment signs."""
        p, config = self.prediction, self.config
        device = "GPUs" if self.has_gpus else "processes"
        low, high = format_seconds(p.step_time_low_s), format_seconds(p.step_time_high_s)
        out = [
            f"Written by `{self.typed}`.",
            f"{config.model.name}: {config.plan.title()}",
            f"{config.plan.world} ranks: {self.nodes} × {self.per_node} {device} of {config.cluster.name}.",
            f"Predicted: step {format_seconds(p.step_time_s)} ({low} to {high}), {p.memory_gib:.1f} of {p.memory_limit_gib:.1f} GiB.",
        ]
        program = "Meshwright's trainer" if self.program.is_ours else self.program.framework
        out.append(f"The program is {program}; the prediction is for the stack {config.stack.name}.")
        return [*out, *self.program.notes]


def comment(lines: list[str]) -> str:
    """Lines as comments of a shell script, YAML or Python; a name with a line break stays on its line."""
    return "\n".join(f"# {' '.join(line.split())}" for line in lines)


def make_job(
    config: Config,
    plan: str,
    *,
    typed: str,
    framework: str = "",
    folder: str = "",
    per_node: int = 0,
    save_every: int = 0,
    interface: str = "",
    image: str = "",
    claim: str = "",
    time_limit: str = "",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> LaunchJob:
    """Check a plan and derive its job; raises if the plan is illegal, the framework cannot run it, or its ranks do not fill hosts. `options`
    (cluster, nodes, gpus, set) are those with which `config` was loaded from the plan file: `meshwright train` reads the file again."""
    framework = framework_of(config, framework)
    config = for_framework(config.check(), framework)
    check_names(interface=interface, claim=claim, time=time_limit)
    check_paths(plan, folder, *option_words(options))
    name = label(plan)
    folder = folder or f"/shared/runs/{name}"
    prediction = predict(config)
    nodes, per_node = hosts_of(config, per_node)
    save_every, reason = interval(config, prediction, save_every)
    program = program_of(framework, config, plan, folder, save_every)
    if program.is_ours:
        program = replace(program, begin=(*program.begin, *option_words(options)))
    named: Json = {"interface": interface, "image": image, "claim": claim, "time_limit": time_limit, "options": options}
    return LaunchJob(name, config, program, prediction, typed, nodes, per_node, folder, save_every, reason, **named)


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line; a list repeats its option."""
    return [
        word
        for name, value in options.items()
        for one in (value if isinstance(value, list) else [value])
        for word in (f"--{name.replace('_', '-')}", str(one))
    ]


def label(plan: str) -> str:
    """A name for the job: what Kubernetes allows (letters, digits and dashes, at most 40), from the name of the plan file."""
    stem = re.split(r"[/\\]", plan)[-1].removesuffix(".toml").lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:40].strip("-") or "train"


def hosts_of(config: Config, per_node: int) -> tuple[int, int]:
    """Hosts, and processes on each: the first level of the cluster is a host, unless it is an NVLink domain of many hosts."""
    world = config.plan.world
    if not per_node:
        size = config.cluster.node_size
        per_node = min(world, size if size <= MOST_IN_ONE_HOST else DOMAIN_HOST)
    if world % per_node:
        divisors = [n for n in range(1, min(world, 16) + 1) if world % n == 0]
        what, why = (
            f"{world} ranks do not fill hosts of {per_node}",
            "A launcher starts the same number of processes on every host",
        )
        raise MeshwrightError("MW-LAUNCH-001", what, why=why, valid=divisors, fix=f"--per-node {divisors[-1]}")
    return world // per_node, per_node


def interval(config: Config, prediction: Prediction, save_every: int) -> tuple[int, str]:
    """Steps between checkpoints, and why: without them a restart begins at step 0."""
    if save_every:
        return save_every, "as asked for"
    if config.checkpoint.every:
        return config.checkpoint.every, "as in [checkpoint] of the plan file"
    steps = max(1, round(SAVE_SECONDS / prediction.step_time_s))
    minutes = max(1, steps * prediction.step_time_s / 60)
    return steps, f"about {minutes:,.0f} minutes by the predicted step; --save-every changes it"


ALLOWED = re.compile(r"[\w.:,=-]*", re.ASCII)


def check_names(**values: str) -> None:
    """Raise if a name that is written into the file as it is has characters that a shell or YAML would interpret."""
    for option, value in values.items():
        if not ALLOWED.fullmatch(value):
            what, valid = (
                f"--{option} '{value}' has characters that such a name does not have",
                ["letters", "digits", ". : , = _ -"],
            )
            raise MeshwrightError("MW-LAUNCH-003", what, valid=valid)


def check_paths(*paths: str) -> None:
    """Raise if a path has control characters, such as a line break, which would end a line of the file."""
    for path in paths:
        if not path.isprintable():
            raise MeshwrightError("MW-LAUNCH-003", f"the path '{path}' has control characters", fix="rename the file")
