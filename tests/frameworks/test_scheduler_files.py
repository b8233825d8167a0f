"""Launch files for Kubernetes and SkyPilot, read by the models and parsers of these projects: what we wrote is what they read.

`make test-frameworks` runs this. A package that cannot be installed is skipped with the reason.
"""

from functools import cache
from typing import Any

import pytest
import yaml
from environments import ROOT, drive

from meshwright.describe.config import load
from meshwright.errors import MeshwrightError
from meshwright.view.launch_files import LAUNCHERS
from meshwright.view.launch_files.job import LaunchJob, make_job

LARGE, SMALL = "examples/llama3-70b-64xh100.toml", "examples/demo-dp2-tp2.toml"
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "many nodes": (LARGE, {"framework": "meshwright", "interface": "eth0", "claim": "disk"}),
    "CPUs": (SMALL, {"framework": "meshwright"}),
    "two nodes of CPUs": (SMALL, {"framework": "meshwright", "per_node": 2, "folder": "/shared/it's mine"}),
    "megatron-lm": (LARGE, {"framework": "megatron-lm", "image": "registry.example.com/team/image:1.2"}),
    "deepspeed": (LARGE, {"framework": "deepspeed"}),
    "accelerate": (LARGE, {"framework": "accelerate"}),
}
ZERO = ["plan.zero=3", "plan.tp=1", "plan.sp=false", "plan.pp=1", "plan.shard=64", "plan.recompute=full"]
SETTINGS = {"deepspeed": ZERO, "accelerate": ZERO}


@cache
def job_of(name: str) -> LaunchJob:
    plan, options = JOBS[name]
    try:
        return make_job(load(ROOT / plan, SETTINGS.get(name, [])), plan, typed="meshwright launch", **options)
    except MeshwrightError as error:
        pytest.skip(f"not offered: {error}")


@cache
def written(launcher: str) -> dict[str, str]:
    """The files of a launcher, by job; jobs that are refused are left out."""
    texts = {}
    for name in JOBS:
        try:
            texts[name] = LAUNCHERS[launcher].write(job_of(name))
        except pytest.skip.Exception:
            continue
    return texts


@cache
def answers(environment: str, launcher: str) -> dict[str, dict[str, Any]]:
    """What the parser of an environment read, by job."""
    files = written(launcher)
    cases = {name: {"text": text, "documents": list(yaml.safe_load_all(text))} for name, text in files.items()}
    return drive(environment, cases)


def answer(environment: str, launcher: str, name: str) -> dict[str, Any]:
    job_of(name)
    read = answers(environment, launcher)
    if "" in read:
        pytest.skip(read[""]["refused"])
    assert "refused" not in read[name], read[name]["refused"]
    return read[name]


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("launcher", ["kubernetes", "pytorchjob"])
def test_kubeflow_has_every_field_that_we_write(launcher: str, name: str) -> None:
    documents = list(yaml.safe_load_all(LAUNCHERS[launcher].write(job_of(name))))
    assert answer("kubernetes", launcher, name)["documents"] == documents


@pytest.mark.parametrize("name", JOBS)
def test_a_pytorchjob_has_a_pod_per_node(name: str) -> None:
    job = job_of(name)
    (document,) = answer("kubernetes", "pytorchjob", name)["documents"]
    replicas = document["spec"]["pytorchReplicaSpecs"]
    assert sum(group["replicas"] for group in replicas.values()) == job.nodes
    assert document["spec"]["nprocPerNode"] == str(job.per_node)
    for group in replicas.values():
        (container,) = group["template"]["spec"]["containers"]
        assert int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0)) == job.per_node * job.has_gpus
        assert container["args"][0].splitlines()[-1].startswith("exec ")


@pytest.mark.parametrize("name", JOBS)
def test_skypilot_reads_the_resources_of_the_plan(name: str) -> None:
    job, read = job_of(name), answer("skypilot", "skypilot", name)
    task = yaml.safe_load(LAUNCHERS["skypilot"].write(job))
    assert read["num_nodes"] == job.nodes
    assert read["accelerators"] == ({"H100": job.per_node} if job.has_gpus else None)
    assert read["cpus"] == (None if job.has_gpus else f"{job.per_node}+")
    assert read["network_tier"] == ("best" if job.has_gpus and job.nodes > 1 else None)
    assert read["job_recovery"]["max_restarts_on_errors"] == job.restarts
    for field in ("name", "envs", "run", "setup"):
        assert read[field] == task[field]
