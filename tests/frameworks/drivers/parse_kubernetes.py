"""Read documents of Kubernetes with the models of Kubeflow's own packages, and write them back.

TrainJob and TrainingRuntime: the pydantic models of `kubeflow` (kubeflow-trainer-api), which refuse a wrong type. PyTorchJob: the models of
`kubeflow-training`, and of `kubernetes` below them. A field that a model does not have is missing in what it writes back.
"""

import json
from types import SimpleNamespace
from typing import Any

from kubeflow.training import models as training_models
from kubeflow.training.api_client import ApiClient
from kubeflow_trainer_api import models
from kubernetes import client
from parse_common import main

for name, model in vars(client).items():  # as kubeflow.training does before it reads a job
    if name.startswith("V1"):
        setattr(training_models, name, model)


def read_back(document: dict[str, Any]) -> Any:
    kind = document["kind"]
    if kind == "PyTorchJob":
        api = ApiClient()
        job = api.deserialize(SimpleNamespace(data=json.dumps(document)), "KubeflowOrgV1PyTorchJob")
        return api.sanitize_for_serialization(job)
    return getattr(models, f"TrainerV1alpha1{kind}").from_dict(document).to_dict()


if __name__ == "__main__":
    main(lambda case: {"documents": [read_back(document) for document in case["documents"]]})
