"""A shell script that starts torchrun; the same on every node."""

from __future__ import annotations

import shlex

from meshwright.view.launch_files.job import PORT, Job, comment

FAILURES = """\
# After a failure torchrun ends all ranks and starts them again, on every node; they continue from the last good
# checkpoint of the run folder, which all nodes must share."""


def write(job: Job) -> str:
    """The script. One node needs no address: `--standalone` picks a free port of this machine."""
    parts = ["#!/usr/bin/env bash", comment(job.heading()), "set -euo pipefail", "", environment(job), ""]
    parts += [choose_words(job), ""]
    if job.nodes == 1:
        parts += ["# One machine: the ranks meet on a free port of it.", "meet=(--standalone)"]
    else:
        parts += [
            "# The ranks meet at the first node. HEAD is its name or address, the same on every node; the port must be open there.",
            f'meet=(--rdzv-backend c10d --rdzv-endpoint "${{HEAD:?set HEAD to the name of the first node}}:${{PORT:-{PORT}}}"',
            f"      --rdzv-id {job.name})",
        ]
    parts += ["", FAILURES, f'exec torchrun "${{meet[@]}}" {options(job)} "${{words[@]}}"', ""]
    return "\n".join(parts)


def options(job: Job) -> str:
    return f"--nnodes {job.nodes} --nproc-per-node {job.per_node} --max-restarts {job.restarts}"


def environment(job: Job) -> str:
    """Variables of every rank, with the reason for each."""
    lines = [
        "# A process for each device: more threads per process would compete for the cores.",
        f"export OMP_NUM_THREADS={job.threads}",
    ]
    if job.interface:
        lines += [
            "# Hosts with several interfaces: ranks must exchange addresses over one that reaches the other hosts.",
            f"export GLOO_SOCKET_IFNAME={job.interface} NCCL_SOCKET_IFNAME={job.interface}",
        ]
    elif job.nodes > 1:
        lines.append("# Hosts with several interfaces: export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (--interface).")
    return "\n".join(lines)


def choose_words(job: Job) -> str:
    """Shell lines that set `words`: a folder with a plan is a run that was begun before, which continues."""
    program = job.program
    if not program.proceed:
        return f"# The same words begin and continue a run: {program.framework} looks for its checkpoints.\nwords=({shlex.join(program.begin)})"
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
