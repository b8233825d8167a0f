"""A TrainJob for the Kubeflow Trainer (API trainer.kubeflow.org/v1alpha1), with the TrainingRuntime that it refers to; or a PyTorchJob for
the Training Operator before it (kubeflow.org/v1).

The cluster's own runtime `torch-distributed` has no restarts and no shared volume, and a TrainJob cannot add restarts, so the file brings a
runtime with both. The controller sets torchrun's variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, …) in every pod.
"""

import json
from textwrap import indent

from meshwright.view.launch_files import agent
from meshwright.view.launch_files.job import LaunchJob, comment
from meshwright.view.launch_files.torchrun import choose_words, write_settings

IMAGE = "YOUR-REGISTRY/meshwright:latest"
MOUNT = "/shared"


def needed_package(job: LaunchJob) -> str:
    return "Meshwright with its extra [train] (docs/install.md)" if job.program.is_ours else job.program.install


def write(job: LaunchJob) -> str:
    """Two YAML documents. Text in double quotes is JSON, which YAML reads the same way."""
    return f"""\
{preamble(job)}
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: {job.name}
spec:
  mlPolicy:
    numNodes: {job.nodes}
    torch: {{}}  # the controller sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, which torchrun reads
  template:
    spec:
      # After a failure of one pod the others cannot go on: all are created again, and continue from the last good checkpoint.
      failurePolicy:
        maxRestarts: {job.restarts}
      replicatedJobs:
        - name: node
          template:
            metadata:
              labels:
                trainer.kubeflow.org/trainjob-ancestor-step: trainer  # the pods that the TrainJob's `trainer` describes
            spec:
              backoffLimit: 0  # a pod alone is not restarted: it could not rejoin the ranks of the others
              template:
                spec:
                  restartPolicy: Never
{indent(pod(job, "node"), " " * 18)}---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job.name}
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: {job.name}
  trainer:
    numNodes: {job.nodes}
    numProcPerNode: {job.per_node}  # one process for each device
    resourcesPerNode:{limits(job)}
    env:
{environment(job)}
"""


def write_pytorchjob(job: LaunchJob) -> str:
    """One YAML document; the other nodes have the pod of the first one, by reference."""
    settings = f"  resources:{limits(job)}\n  env:\n{environment(job)}\n"
    workers = f"""
    Worker:
      replicas: {job.nodes - 1}
      restartPolicy: OnFailure
      template: *pod"""
    return f"""\
{preamble(job)}
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {job.name}
spec:
  nprocPerNode: "{job.per_node}"  # one process for each device; torchrun reads it as PET_NPROC_PER_NODE
  runPolicy:
    backoffLimit: {job.restarts}
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      # After a failure the agents of all pods end, and the pods start them again: the ranks continue from the last good checkpoint.
      restartPolicy: OnFailure
      template: &pod
        spec:
{indent(pod(job, "pytorch", settings), " " * 10).rstrip()}{workers if job.nodes > 1 else ""}
"""


def preamble(job: LaunchJob) -> str:
    """The comments at the top."""
    image = f"The image must have {needed_package(job)}"
    volume = "the volume claim must allow many writers (ReadWriteMany), since all pods write checkpoints."
    return comment([*job.heading(), f"{image}; {volume}"])


def limits(job: LaunchJob) -> str:
    return f'\n      limits: {{nvidia.com/gpu: "{job.per_node}"}}' if job.has_gpus else " {}"


def pod(job: LaunchJob, container: str, settings: str = "") -> str:
    """Fields of a pod: a container with the script (`settings`: fields that a TrainJob has elsewhere), the shared disk, and memory for messages."""
    return f"""\
terminationGracePeriodSeconds: 180  # SIGTERM: ranks save a checkpoint before they end
containers:
  - name: {container}
    image: {json.dumps(job.image or IMAGE)}
    command: [bash, -c]
    args:
    - |
{indent(container_script(job), " " * 6)}
{indent(settings, "  ")}\
    volumeMounts:
      - {{name: shared, mountPath: {MOUNT}}}
      - {{name: memory, mountPath: /dev/shm}}
volumes:
  - name: shared
    persistentVolumeClaim: {{claimName: {json.dumps(job.claim or "shared")}}}
  # NCCL and gloo exchange data between the ranks of a pod in shared memory; the default of 64 MiB is too small.
  - name: memory
    emptyDir: {{medium: Memory}}
"""


def container_script(job: LaunchJob) -> str:
    """Return the script of the container; every pod evaluates it before any rank has started."""
    start = "torchrun"  # it reads the controller's variables itself
    if job.program.agent != agent.TORCHRUN:
        start = f"{agent.command(job)} {agent.numbered(job, '$PET_NODE_RANK', '$PET_MASTER_ADDR', '$PET_MASTER_PORT')}"
    lines = ["set -euo pipefail", *write_settings(job), choose_words(job), f'exec {start} "${{words[@]}}"']
    return "\n".join(lines)


def environment(job: LaunchJob) -> str:
    """Variables of the container. A pod has one interface, so none is named unless `--interface` was given."""
    values = {"OMP_NUM_THREADS": str(job.threads)} | {name: v for name, (v, _) in job.program.variables.items()}
    if job.interface:
        values |= {"GLOO_SOCKET_IFNAME": job.interface, "NCCL_SOCKET_IFNAME": job.interface}
    return "\n".join(f"      - {{name: {name}, value: {json.dumps(value)}}}" for name, value in values.items())
