"""The training command of a launch script: the flags of its program, and the GPUs that its launcher states.

    #SBATCH --nodes=8
    srun torchrun --nproc_per_node 8 pretrain_gpt.py …  → 64 GPUs, and the flags of pretrain_gpt.py

Of several commands the one with the most keys of a framework is read, the last of equals. A file of flags without a command, or a script that only
assigns variables for others, is read as one list of flags.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from meshwright.describe.files import read_text
from meshwright.errors import MeshwrightError
from meshwright.interop.shell import syntax
from meshwright.interop.shell.commands import Shell
from meshwright.interop.shell.expansion import Value
from meshwright.interop.shell.open_values import as_written

LEAST_KEYS = 2  # of a framework, for a command to be its training
# Options of launchers and of Slurm: nodes, processes of a node, and processes of all nodes.
OPTIONS = {
    **dict.fromkeys(("--nnodes", "--nodes", "-N", "--num_nodes", "--num_machines", "--num-nodes"), "nodes"),
    **dict.fromkeys(("--nproc_per_node", "--nproc-per-node", "--gpus-per-node", "--gpus_per_node", "--num_gpus", "--gres"), "gpus"),
    **dict.fromkeys(("--num_processes", "-np", "-n", "--ntasks"), "all"),
    "--ntasks-per-node": "tasks",
}  # fmt: skip
TORCHRUN = ("--nnodes", "--nproc_per_node", "--nproc-per-node")
GPU_LISTS = ("--gres", "--gpus-per-node")  # gpu:h100:8
# Launchers that start the processes of one node where no number of nodes is given; DeepSpeed's those of a file of hosts, if it is given one.
DEEPSPEED = ("deepspeed", "deepspeed.launcher.runner")
ONE_NODE = (*DEEPSPEED, "torchrun", "torch.distributed.run", "torch.distributed.launch")
HOSTFILE, INCLUDE = ("--hostfile", "-H"), ("--include", "-i")
DIRECTIVE = re.compile(r"^#SBATCH\s+(.+)$", re.MULTILINE)
PROGRAM = re.compile(r".*\.py|llamafactory-cli|axolotl|tune|nemo")
SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "tasks": ("SLURM_NTASKS_PER_NODE",),
    "gpus": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
}
NUMBER = re.compile(r"\d{1,12}")  # of the environment only numbers are taken: a key or a password is not to be printed
FLAG = re.compile(r"--[A-Za-z]")
OPEN_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)")
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


@dataclass
class Script:
    """What a script states: flags, settings as `a.b=c`, and the nodes and processes of a node of its launcher.

    `skipped` names commands that an open condition leaves out, `sourced` files that are not read, such as a list of hosts, `environment`
    variables of the caller that were used; `files` are those that the script writes and names in its flags."""

    args: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    launched: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    sourced: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    left_open: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    @property
    def gpus(self) -> int:
        """The number of processes, which is that of GPUs; 0: not known."""
        nodes, each = (self.launched.get(name, "") for name in ("nodes", "each"))
        return int(nodes) * int(each) if nodes.isdigit() and each.isdigit() else 0

    def notes(self, gpus_are_given: bool) -> list[str]:
        """What was taken from the launcher and from the environment, for the list of assumptions."""
        out = [*self.assumed, *(f"{name}: {value} (from the environment)" for name, value in self.environment.items())]
        if self.gpus and not gpus_are_given:
            out.append(
                f"GPUs: {self.gpus} ({self.launched['nodes']} × {self.launched['each']}, as the script starts it)"
            )
        return out


def read_script(
    text: str,
    keys_of: Callable[[dict[str, str], list[str]], int],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Script:
    """The training command of a script. `keys_of` counts the keys of a framework in settings and flags. `environment` gives the variables that
    the script leaves open in this command, as `TP=8 bash train.sh` does. `folder`: that of the script, from which it may source files."""
    directives = [word for row in DIRECTIVE.findall(text) for word in row.split("#")[0].split()]
    given = launcher_options(directives)
    beside = partial(text_beside, folder)
    out = training_command(text, keys_of, given, {}, beside)
    words = [*out.args, *out.settings.values(), *out.launched.values(), *out.files.values()]
    asked = {name for word in words for name in OPEN_NAME.findall(word)}
    used = {name: value for name, value in (environment or {}).items() if name in asked and NUMBER.fullmatch(value)}
    return replace(training_command(text, keys_of, given, used, beside), environment=used) if used else out


def file_beside(folder: Path | None, name: str) -> Path | None:
    """The file of a relative name in a folder or below it; None for others, such as one above it, or behind a link that leads out."""
    if folder is None:
        return None
    try:
        place = (folder / name).resolve()
        return (
            place
            if place.is_file() and place.is_relative_to(folder.resolve()) and not Path(name).is_absolute()
            else None
        )
    except (OSError, ValueError):  # a name that no file can have
        return None


def text_beside(folder: Path | None, name: str) -> str | None:
    """The text of a file beside a script; None where there is none that can be read."""
    place = file_beside(folder, name)
    try:
        return None if place is None else read_text(place)
    except MeshwrightError:
        return None


def training_command(
    text: str,
    keys_of: Callable[[dict[str, str], list[str]], int],
    given: dict[str, str],
    environment: dict[str, str],
    beside: Callable[[str], str | None],
) -> Script:
    shell = Shell(variables={**slurm_variables(given), **environment}, beside=beside)
    shell.run(syntax.parse(text))
    best, most = Script(), LEAST_KEYS - 1
    for each in shell.started:
        found = command_of(each.words, given)
        if (keys := keys_of(found.settings, found.args)) >= max(most, LEAST_KEYS):
            best, most = found, keys
    if most < LEAST_KEYS:
        words = [word for each in shell.started for word in (*each.words, "--")] + list(flag_words(shell.variables))
        best = command_of(words, given)
    best.skipped, best.sourced = shell.skipped, [*shell.sourced, *best.sourced]
    best.assumed += [f"{name}: beside the script, which sources it" for name in shell.included]
    named = set(map(os.path.normpath, best.args))
    files = {os.path.normpath(as_written(name)): text for name, text in shell.files.items()}
    best.files = {name: text for name, text in files.items() if name in named}
    return best


def command_of(words: Sequence[str], given: dict[str, str]) -> Script:
    """The flags and settings of one command; `given` has the nodes and GPUs that the script states above it."""
    first = next((i for i, word in enumerate(words) if PROGRAM.fullmatch(word)), -1)
    module = next((i + 1 for i, word in enumerate(words[:-1]) if word == "-m" and (first < 0 or i < first)), -1)
    first = module if module >= 0 and first < 0 else first
    launcher = [as_written(word) for word in words[: max(first, 0)]]
    launched = launcher_options(launcher, given)
    programs = {word.rpartition("/")[2] for word in launcher}
    by_deepspeed = not programs.isdisjoint(DEEPSPEED)
    hosts = [
        value for name, value in options(launcher) if by_deepspeed and name in HOSTFILE and "nodes" not in launched
    ]
    if by_deepspeed:
        launched |= included_gpus(launcher)
    if not hosts and not programs.isdisjoint(ONE_NODE) and "each" in launched:
        launched.setdefault("nodes", "1")
    # Some frameworks have flags of torchrun as settings too.
    own = [word for name, value in options(launcher) if name in TORCHRUN for word in (name, value) if value]
    out = Script([*own, "--"], launched=launched, sourced=hosts)
    for word in map(as_written, words[first + 1 :]):
        if FLAG.match(word) or word == "--":
            out.args.append(word)
        elif (override := OVERRIDE.fullmatch(word)) and out.args[-1] == "--":
            out.settings[override[1]] = override[2]
        elif out.args[-1] != "--":
            out.args.append(word)
    return out


def options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every word as an option with its value, behind `=` or in the next word."""
    for place, word in enumerate(words):
        name, sign, value = word.partition("=")
        yield name, value if sign else "".join(words[place + 1 : place + 2])


def launcher_options(words: Sequence[str], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The nodes and the processes of a node ("each") that options of a launcher state, over those that are given above it.

    Slurm often starts one task on a node, which starts one process for each GPU: numbers of GPUs come before numbers of tasks."""
    own: dict[str, str] = {}
    for name, value in options(words):
        number = re.search(r"(\d+|\$.*)$" if name in GPU_LISTS else r"^(\d+|\$.*)$", value)
        if name in OPTIONS and number:
            own[OPTIONS[name]] = number[1]
    out = {**(given or {}), **own}
    nodes = out.get("nodes", "1")
    if "gpus" not in own and own.get("all", "").isdigit() and nodes.isdigit():
        out |= {"nodes": nodes, "each": str(int(own["all"]) // max(1, int(nodes)))}
    elif each := out.get("gpus") or out.get("tasks"):
        out["each"] = each
    return out


def included_gpus(words: Sequence[str]) -> dict[str, str]:
    """The nodes and the GPUs of each that DeepSpeed's `--include a:0,1@b:0,1` names; nothing where a host stands for all of its GPUs."""
    named: dict[str, set[str]] = {}
    for host in (each for name, value in options(words) if name in INCLUDE for each in value.split("@")):
        name, _, numbers = host.partition(":")
        if not re.fullmatch(r"\d+(,\d+)*", numbers):
            return {}
        named.setdefault(name, set()).update(numbers.split(","))
    sizes = [len(numbers) for numbers in named.values()]
    if len(set(sizes)) > 1:  # hosts with different numbers of GPUs
        return {"nodes": "1", "each": str(sum(sizes))}
    return {"nodes": str(len(sizes)), "each": str(sizes[0])} if sizes else {}


def slurm_variables(given: dict[str, str]) -> dict[str, Value]:
    """The variables that Slurm sets for a job of these nodes."""
    out: dict[str, Value] = {name: given[fact] for fact, names in SLURM.items() if fact in given for name in names}
    nodes, tasks = given.get("nodes", ""), given.get("tasks", "1")
    if nodes.isdigit() and tasks.isdigit():
        out["SLURM_NTASKS"] = out["SLURM_NPROCS"] = str(int(nodes) * int(tasks))
    return out


def flag_words(variables: dict[str, Value]) -> Iterator[str]:
    """The words of all variables that hold flags."""
    for value in variables.values():
        words = value.split() if isinstance(value, str) else list(value.values())
        if any(FLAG.match(word) for word in words):
            yield from (*words, "--")
