"""The command that starts the ranks of one host: `torchrun`, or `accelerate launch`, which starts torchrun's agent with its own settings.

Both take the number of hosts, the place where they meet, and the restarts, under other names; torchrun counts the processes of a host and
accelerate those of all hosts.
"""

import shlex

from meshwright.view.launch_files.job import LaunchJob

TORCHRUN, ACCELERATE = "torchrun", "accelerate"
# Names of the same options.
NAMES = {
    TORCHRUN: {
        "restarts": "--max-restarts",
        "rank": "--node-rank",
        "address": "--master-addr",
        "port": "--master-port",
    },
    ACCELERATE: {
        "restarts": "--max_restarts",
        "rank": "--machine_rank",
        "address": "--main_process_ip",
        "port": "--main_process_port",
    },
}


def command(job: LaunchJob) -> str:
    """The program and the number of its processes. accelerate reads its other options from its settings file."""
    if job.program.agent == TORCHRUN:
        return f"torchrun --nnodes {job.nodes} --nproc-per-node {job.per_node}"
    file = shlex.quote(f"{job.folder}/{job.program.file}")
    return f"accelerate launch --config_file {file} --num_machines {job.nodes} --num_processes {job.config.plan.world}"


def restarts(job: LaunchJob, count: int) -> str:
    return f"{NAMES[job.program.agent]['restarts']} {count}"


def single_host(job: LaunchJob) -> str:
    """Options of a single host, whose ranks meet on a free port of it."""
    return "--standalone" if job.program.agent == TORCHRUN else "--main_process_port 0"


def meeting(job: LaunchJob, address: str, port: str, identity: str) -> str:
    """Options of hosts without a number: they meet at `address`, which one of them has. Words are those of a shell."""
    if job.program.agent == TORCHRUN:
        return f'--rdzv-backend c10d --rdzv-endpoint "{address}:{port}" --rdzv-id {identity}'
    return f'--rdzv_backend c10d --main_process_ip "{address}" --main_process_port "{port}"'


def numbered(job: LaunchJob, rank: str, address: str, port: str) -> str:
    """Options of hosts that know their number; host 0 has the address."""
    names = NAMES[job.program.agent]
    return f'{names["rank"]} "{rank}" {names["address"]} "{address}" {names["port"]} "{port}"'
