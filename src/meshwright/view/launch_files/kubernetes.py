"""A TrainJob for the Kubeflow Trainer (API trainer.kubeflow.org/v1alpha1), with the TrainingRuntime that it refers to.

The cluster's own runtime `torch-distributed` has no restarts and no shared volume, and a TrainJob cannot add restarts, so the file brings a
runtime with both. The controller sets torchrun's variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, …) in every pod.
"""

from __future__ import annotations

import json

from meshwright.view.launch_files import agent
from meshwright.view.launch_files.job import LaunchJob, comment
from meshwright.view.launch_files.torchrun import choose_words, write_settings

IMAGE = "YOUR-REGISTRY/meshwright:latest"
MOUNT = "/shared"


def needed_package(job: LaunchJob) -> str:
    return "Meshwright with its extra [train] (docs/install.md)" if job.program.is_ours else job.program.install


def write(job: LaunchJob) -> str:
    """Two YAML documents. Text in double quotes is JSON, which YAML reads the same way."""
    script = "\n".join(f"{' ' * 24}{line}".rstrip() for line in container_script(job).splitlines())
    gpus = f"\n      limits: {{nvidia.com/gpu: {job.per_node}}}" if job.has_gpus else " {}"
    return f"""\
{comment(job.heading())}
# The image must have {needed_package(job)}; the volume claim must allow many writers (ReadWriteMany), since all pods write checkpoints.
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
                  terminationGracePeriodSeconds: 180  # SIGTERM: ranks save a checkpoint before they end
                  containers:
                    - name: node
                      image: {json.dumps(job.image or IMAGE)}
                      command: [bash, -c]
                      args:
                      - |
{script}
                      volumeMounts:
                        - {{name: shared, mountPath: {MOUNT}}}
                        - {{name: memory, mountPath: /dev/shm}}
                  volumes:
                    - name: shared
                      persistentVolumeClaim: {{claimName: {json.dumps(job.claim or "shared")}}}
                    # NCCL and gloo exchange data between the ranks of a pod in shared memory; the default of 64 MiB is too small.
                    - name: memory
                      emptyDir: {{medium: Memory}}
---
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
    resourcesPerNode:{gpus}
    env:
{environment(job)}
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
