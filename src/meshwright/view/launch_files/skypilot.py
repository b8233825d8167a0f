"""A task for SkyPilot: a cloud with the accelerators is found, and the agent is started on every node."""

import json

from meshwright.describe.run import PORT
from meshwright.view.launch_files import agent
from meshwright.view.launch_files.job import LaunchJob, comment
from meshwright.view.launch_files.torchrun import choose_words, write_settings

# Our catalog's accelerators under SkyPilot's names; others are written in capitals, and a comment says so.
ACCELERATORS = {
    "a100-40gb": "A100", "a100-80gb": "A100-80GB", "h100-sxm": "H100", "h200": "H200", "b200": "B200", "b300": "B300",
    "gb200": "GB200", "v100-sxm2-16gb": "V100", "v100-sxm2-32gb": "V100-32GB", "l4": "L4", "l40s": "L40S", "mi300x": "MI300X",
}  # fmt: skip


def write(job: LaunchJob) -> str:
    """The task. Restarts are those of a managed job (`sky jobs launch`): the nodes may be others then, so the folder is mounted."""
    run = "\n".join(f"  {line}".rstrip() for line in run_script(job).splitlines())
    return f"""\
{comment(job.heading())}
name: {job.name}
num_nodes: {job.nodes}

resources:
{resources(job)}
  # A managed job is started again if a node is lost, and at most {job.restarts} times if the program fails.
  job_recovery:
    max_restarts_on_errors: {job.restarts}

# The plan file and what it refers to are copied from this folder to every node.
workdir: .

# The run folder must outlive the nodes and be shared by them: a bucket or a volume, mounted at the folder of the run.
# file_mounts:
#   /shared: {{source: s3://YOUR-BUCKET, mode: MOUNT}}

envs:
  OMP_NUM_THREADS: "{job.threads}"
{variables(job)}
{setup_comment(job)}setup: |
  pip install "{job.program.install}"

run: |
{run}
"""


def setup_comment(job: LaunchJob) -> str:
    """Explain how the wheel gets into the copied folder; other frameworks are on the public index."""
    make = "pip wheel --no-deps --wheel-dir . CHECKOUT"
    return f"# No index has Meshwright. Put its wheel into this folder first: {make}\n" if job.program.is_ours else ""


def resources(job: LaunchJob) -> str:
    accelerator = job.config.cluster.accelerator.name
    if not job.has_gpus:
        return f"  cpus: {job.per_node}+"
    name = ACCELERATORS.get(accelerator, accelerator.upper())
    lines = [] if accelerator in ACCELERATORS else ["  # Check the name with `sky show-gpus`."]
    lines.append(f"  accelerators: {name}:{job.per_node}")
    if job.nodes > 1:
        lines.append(
            "  network_tier: best  # the fastest network of the cloud between the nodes; the prediction assumes it"
        )
    return "\n".join(lines)


def variables(job: LaunchJob) -> str:
    """Variables of the program, each with its reason, and the interface."""
    lines = [f"  {name}: {json.dumps(value)}  # {why}" for name, (value, why) in job.program.variables.items()]
    return "\n".join([*lines, interface(job)])


def interface(job: LaunchJob) -> str:
    if not job.interface:
        return "  # Hosts with several interfaces: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (--interface)."
    return f'  GLOO_SOCKET_IFNAME: "{job.interface}"\n  NCCL_SOCKET_IFNAME: "{job.interface}"'


def run_script(job: LaunchJob) -> str:
    """Return the script of every node. SkyPilot gives the addresses of all nodes, the first of which is the place to meet."""
    return "\n".join(
        (
            "set -euo pipefail",
            *write_settings(job),
            choose_words(job),
            "# The agents meet at the first node; SKYPILOT_NODE_RANK numbers the nodes in the same order.",
            'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
            f"exec {agent.command(job)} \\",
            f'  {agent.numbered(job, "$SKYPILOT_NODE_RANK", "$head", str(PORT))} "${{words[@]}}"',
        )
    )
