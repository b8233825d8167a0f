"""A batch script for Slurm.

Our trainer reads Slurm's variables (`training.launch.placement`), so one task is one rank: the address is the first host of the step, the
port follows from the job's number, and a signal of Slurm reaches every rank. Other frameworks read torchrun's variables, so one task per node is
torchrun, or accelerate's agent.
"""

from meshwright.describe.run import PORT
from meshwright.view.launch_files import agent
from meshwright.view.launch_files.job import SAVE_BEFORE_END, LaunchJob, comment
from meshwright.view.launch_files.torchrun import choose_words, environment, write_settings

INTERFACE = """\
# Ranks exchange their addresses over the interface by which a node reaches another node of this job. Without this, a node with several
# interfaces may offer an address that the others cannot reach. `--interface NAME` of `meshwright launch` writes a fixed name instead.
find_interface() {
    local host
    for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        if [ "$host" != "${SLURMD_NODENAME:-}" ]; then
            ip -o route get "$(getent ahostsv4 "$host" | awk 'NR == 1 { print $1 }')" | sed -n 's/.* dev \\([^ ]*\\).*/\\1/p'
            return
        fi
    done
}
with_interface() {
    local name
    name=$(find_interface || true)
    if [ -n "$name" ]; then export GLOO_SOCKET_IFNAME="$name" NCCL_SOCKET_IFNAME="$name"; fi
    exec "$@"
}
export -f find_interface with_interface"""

LOST_NODE = (
    "    # If a node does not answer, no attempt on these nodes can succeed: the job is queued again and gets others.",
    '    if ! timeout 60 srun --overlap --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 true; then',
    '        scontrol requeue "$SLURM_JOB_ID"',
    "        exit 1",
    "    fi",
)


def write(job: LaunchJob) -> str:
    """The script: directives, environment, the attempts, and what happens at the time limit."""
    parts = ["#!/usr/bin/env bash", directives(job), comment(job.heading()), "set -uo pipefail"]
    parts += [
        ': "${SLURM_JOB_ID:?start this file with sbatch}"',
        "",
        environment(job, "# Ranks exchange their addresses over this interface."),
        "",
    ]
    if job.nodes > 1 and not job.interface:
        parts += [INTERFACE, ""]
    if not job.program.is_ours:
        parts += [
            "# The agents meet at the first node of the job. The port follows from the job's number, so that two jobs do not meet.",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port=$(({PORT} + SLURM_JOB_ID % 10000))",
            "",
        ]
    parts += [*write_settings(job), attempts(job), ""]
    return "\n".join(parts)


def directives(job: LaunchJob) -> str:
    """The #SBATCH lines, each with its reason."""
    ours = job.program.is_ours
    tasks = job.per_node if ours else 1
    per = "one task is one rank" if ours else "one task is the agent of a node"
    lines = [
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes}",
        f"#SBATCH --ntasks-per-node={tasks}    # {per}",
    ]
    if job.has_gpus:
        lines.append(f"#SBATCH --gpus-per-node={job.per_node}")
    lines += [
        "#SBATCH --exclusive    # other jobs on a node would slow every rank, since ranks wait for the slowest",
        "#SBATCH --requeue --open-mode=append    # the job may start again after a node failure; its log is continued",
        "#SBATCH --output=%x-%j.log",
    ]
    if job.program.saves_on:
        lines.append(
            f"#SBATCH --signal={job.program.saves_on}@{SAVE_BEFORE_END}    # {SAVE_BEFORE_END} s before the time limit: ranks save and end"
        )
    if job.time_limit:
        lines.append(f"#SBATCH --time={job.time_limit}")
    return "\n".join(lines)


def attempts(job: LaunchJob) -> str:
    """The loop of attempts. A failed step ends the job, unless the script starts it again."""
    start = "with_interface " if job.nodes > 1 and not job.interface else ""
    shell = f"bash -c '{start}\"$@\"' rank " if start else ""
    if job.program.is_ours:
        body = f'srun --kill-on-bad-exit=1 {shell}python "${{words[@]}}"'
        why = "# Each attempt starts all ranks; --kill-on-bad-exit ends the others as soon as one fails, so that none waits for it."
    else:
        meet = agent.meeting(job, "$head", "$port", '"$SLURM_JOB_ID"')
        body = f'srun --kill-on-bad-exit=1 {shell}{agent.command(job)} {meet} {agent.restarts(job, 0)} "${{words[@]}}"'
        why = (
            "# Each attempt starts the agents; they restart nothing themselves, so that failures are counted here only."
        )
    inner = "\n".join(f"    {line}" for line in choose_words(job).splitlines())
    lines = [
        why,
        f"for attempt in $(seq 0 {job.restarts}); do",
        inner,
        f"    {body} && break",
        "    status=$?",
        '    echo "attempt $attempt ended with status $status" >&2',
        *(LOST_NODE if job.nodes > 1 else ()),
        f'    if [ "$attempt" = {job.restarts} ]; then exit "$status"; fi',
        "done",
    ]
    if job.program.is_ours and job.program.saves_on:
        lines += [
            "",
            "# Stopped by the signal before the time limit, not done: queue the job again; it continues in the same run folder.",
            'if meshwright runs "$run" --json | grep -q \'"state": "stopped"\'; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return "\n".join(lines)
