"""JSON schemas of what `launch` writes for Kubernetes and SkyPilot, from the public descriptions of their APIs.

`TRAIN_JOB` and `TRAINING_RUNTIME`: trainer.kubeflow.org/v1alpha1 of the Kubeflow Trainer 2.x and jobset.x-k8s.io/v1alpha2, as far as our
files use them. Unknown keys are refused, since the API server would drop them. `SKY_TASK`: the keys of a SkyPilot task (0.14).
"""

from typing import Any


def closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """An object with these keys and no others."""
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": item}


TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
GROUP = {"const": "trainer.kubeflow.org/v1alpha1"}
RESOURCES = closed(limits={"type": "object"}, requests={"type": "object"})
ENV = listed(closed(("name", "value"), name=TEXT, value={"type": "string"}))
METADATA = closed(("name",), name=NAME)

TRAIN_JOB = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=GROUP,
    kind={"const": "TrainJob"},
    metadata=METADATA,
    spec=closed(
        ("runtimeRef",),
        runtimeRef=closed(
            ("name",),
            apiGroup={"const": "trainer.kubeflow.org"},
            kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
            name=NAME,
        ),
        trainer=closed(
            numNodes=COUNT,
            numProcPerNode=COUNT,
            resourcesPerNode=RESOURCES,
            env=ENV,
            image=TEXT,
            command=listed(TEXT),
            args=listed(TEXT),
        ),
    ),
)
CONTAINER = closed(
    ("name", "image"),
    name={"const": "node"},
    image=TEXT,
    command=listed(TEXT),
    args=listed(TEXT),
    volumeMounts=listed(closed(("name", "mountPath"), name=NAME, mountPath=TEXT)),
)
VOLUME = closed(
    ("name",),
    name=NAME,
    persistentVolumeClaim=closed(("claimName",), claimName=TEXT),
    emptyDir=closed(medium={"enum": ["", "Memory"]}),
)
POD = closed(
    ("containers",),
    restartPolicy={"enum": ["Never", "OnFailure"]},
    terminationGracePeriodSeconds=COUNT,
    containers=listed(CONTAINER),
    volumes=listed(VOLUME),
)
JOB = closed(
    ("template",),
    metadata=closed(labels={"type": "object", "additionalProperties": TEXT}),
    spec=closed(("template",), backoffLimit=COUNT, template=closed(("spec",), spec=POD)),
)
JOB["required"] = ["spec"]
TRAINING_RUNTIME = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=GROUP,
    kind={"const": "TrainingRuntime"},
    metadata=METADATA,
    spec=closed(
        ("template",),
        mlPolicy=closed(numNodes=COUNT, torch={"type": "object"}),
        template=closed(
            ("spec",),
            spec=closed(
                ("replicatedJobs",),
                failurePolicy=closed(maxRestarts=COUNT),
                replicatedJobs=listed(closed(("name", "template"), name={"const": "node"}, template=JOB)),
            ),
        ),
    ),
)
SKY_TASK = closed(
    ("name", "num_nodes", "resources", "run"),
    name=TEXT,
    num_nodes=COUNT,
    resources=closed(
        accelerators={"type": "string", "pattern": "^[A-Z0-9-]+:[0-9]+$"},
        cpus={"type": ["string", "number"]},
        network_tier={"enum": ["best", "standard"]},
        job_recovery=closed(strategy=TEXT, max_restarts_on_errors=COUNT),
    ),
    workdir=TEXT,
    envs={"type": "object", "additionalProperties": {"type": "string"}},
    setup=TEXT,
    run=TEXT,
)
