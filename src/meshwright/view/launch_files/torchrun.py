"""A shell script that starts torchrun, or the framework's own agent; the same on every node."""

import shlex

from meshwright.describe.run import PORT
from meshwright.view.launch_files import agent
from meshwright.view.launch_files.job import LaunchJob, comment

LONGEST_LINE = 140
INTERFACE = (
    "# Hosts with several interfaces: ranks must exchange addresses over one that reaches the other hosts.",
    "# Hosts with several interfaces: export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (--interface).",
)
FAILURES = """\
# After a failure the agent ends all ranks and starts them again, on every node; they continue from the last good
# checkpoint of the run folder, which all nodes must share."""


def write(job: LaunchJob) -> str:
    """The script. One node needs no address: `--standalone` picks a free port of this machine."""
    parts = ["#!/usr/bin/env bash", comment(job.heading()), "set -euo pipefail", "", environment(job, *INTERFACE), ""]
    parts += [*write_settings(job), choose_words(job), ""]
    if job.nodes == 1:
        parts += ["# One machine: the ranks meet on a free port of it.", f"meet=({agent.single_host(job)})"]
    else:
        parts += [
            "# The ranks meet at the first node. HEAD is its name or address, the same on every node; the port must be open there.",
            f"meet=({agent.meeting(job, '${HEAD:?set HEAD to the name of the first node}', f'${{PORT:-{PORT}}}', job.name)})",
        ]
    parts += [
        "",
        FAILURES,
        f'exec {agent.command(job)} "${{meet[@]}}" {agent.restarts(job, job.restarts)} "${{words[@]}}"',
        "",
    ]
    return "\n".join(parts)


def environment(job: LaunchJob, named: str, unnamed: str = "") -> str:
    """Shell lines that set the variables of every rank, with the reason for each; `named` is that of an interface, and `unnamed` a note
    where hosts have several and none is named."""
    lines = [
        "# A process for each device: more threads per process would compete for the cores.",
        f"export OMP_NUM_THREADS={job.threads}",
        *(f"export {name}={shlex.quote(value)}  # {why}" for name, (value, why) in job.program.variables.items()),
    ]
    if job.interface:
        lines += [named, f"export GLOO_SOCKET_IFNAME={job.interface} NCCL_SOCKET_IFNAME={job.interface}"]
    elif job.nodes > 1 and unnamed:
        lines.append(unnamed)
    return "\n".join(lines)


def write_settings(job: LaunchJob) -> list[str]:
    """Shell lines that write the settings file of a framework into the run folder; none for a program without one.

    Every node may write it: the file appears whole or not at all, and all nodes write the same text."""
    program = job.program
    if not program.file:
        return []
    return [
        f"# The settings of {program.framework}. They are written here, so that this file is all that a node needs.",
        f"mkdir -p {shlex.quote(job.folder)}",
        f"new=$(mktemp {shlex.quote(job.folder + '/' + program.file)}.XXXXXX)",
        "cat > \"$new\" <<'END_OF_SETTINGS'",
        program.settings.rstrip("\n"),
        "END_OF_SETTINGS",
        f'mv "$new" {shlex.quote(job.folder + "/" + program.file)}',
        "",
    ]


def choose_words(job: LaunchJob) -> str:
    """Shell lines that set `words`: a folder with a plan is a run that was begun before, which continues."""
    program = job.program
    if not program.proceed:
        groups = [shlex.join(group) for group in flag_groups(program.begin)]
        words = f"words=({' '.join(groups)})"
        if len(words) > LONGEST_LINE:
            words = "words=(\n    " + "\n    ".join(groups) + "\n)"
        return "\n".join(
            (
                f"# Checkpoints every {job.save_every} steps: {job.save_reason}.",
                f"# The same words begin and continue a run: {program.reads_checkpoints} looks for its checkpoints.",
                words,
            )
        )
    return "\n".join(
        (
            f"# Checkpoints every {job.save_every} steps: {job.save_reason}.",
            "# A run folder with a plan is a run that was begun before: it continues from its last good checkpoint.",
            f"run={shlex.quote(job.folder)}",
            'if [ -f "$run/plan.toml" ]; then',
            f"    words=({shlex.join(program.proceed)})",
            "else",
            f"    words=({shlex.join(program.begin)})",
            "fi",
        )
    )


def flag_groups(words: tuple[str, ...]) -> list[list[str]]:
    """A command line in groups: a flag with its values, for one line of a file each."""
    out: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and out[-1]:
            out.append([])
        out[-1].append(word)
    return out
