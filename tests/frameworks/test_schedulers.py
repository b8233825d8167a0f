"""Files of `meshwright launch`, run by real schedulers on this machine: Slurm, Open MPI, torchrun and Ray; and the script of a pod of Kubernetes.

Every training of one plan and seed has the same losses, also if a rank, a node or the job was lost on the way. Schedulers run in a namespace
(isolated_hosts.py); one that is not installed is skipped with the reason. Debian: `apt-get install slurmctld slurmd slurm-client munge openmpi-bin`.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import yaml
from environments import python_of
from isolated_hosts import STEPS, Hosts, launch, losses, missing, poll, resumed, write_plan
from ray_cluster import Ray
from slurm_cluster import PROGRAMS, Slurm

pytestmark = pytest.mark.timeout(1200)
KILL = {"kind": "kill", "rank": 1, "step": 5, "seconds": 0.0}
CHECKPOINTS = ([2], [4])  # saved before that; the last one may not be complete when the rank is killed
SLOW = {"kind": "slow", "rank": 0, "step": 3, "seconds": 1.0, "steps": 5}  # time for a test to interrupt the run


@cache
def undisturbed(ranks: int) -> list[float]:
    """The losses of the plan on processes of this machine."""
    folder = Path(mkdtemp(prefix="meshwright-"))
    write_plan(folder, ranks)
    words = [sys.executable, "-m", "meshwright", "train", "plan.toml", "--out", "run", "--no-calibrate"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = losses(folder / "run")
    assert len(result) == STEPS
    return result


def wait_for_step(run: Path, step: int) -> None:
    poll(lambda: len(losses(run)) >= step, 400, f"no step {step}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    reason = missing(*PROGRAMS)
    if reason:
        pytest.skip(reason)
    with Slurm(tmp_path_factory.mktemp("slurm"), 3) as cluster:
        yield cluster


def log_of(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.glob("plan-*.log"))


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 2), (4, 2)])
def test_slurm_runs_the_batch_script(slurm: Slurm, tmp_path, ranks: int, per_node: int) -> None:
    write_plan(tmp_path, ranks)
    printed = launch(tmp_path, "--slurm", "--per-node", str(per_node))
    assert "sbatch plan.sbatch" in printed
    job = slurm.submit("plan.sbatch", tmp_path)
    assert slurm.finish(job) == "COMPLETED", log_of(tmp_path)
    assert slurm.field(job, "NumNodes") == str(ranks // per_node)
    assert losses(tmp_path / "run") == undisturbed(ranks)


def test_slurm_starts_the_ranks_again_after_one_was_killed(slurm: Slurm, tmp_path) -> None:
    variables = write_plan(tmp_path, 4, [KILL])
    launch(tmp_path, "--slurm", "--per-node", "2")
    job = slurm.submit("plan.sbatch", tmp_path, **variables)
    assert slurm.finish(job) == "COMPLETED", log_of(tmp_path)
    assert "attempt 0 ended with status" in log_of(tmp_path)
    assert losses(tmp_path / "run") == undisturbed(4)
    assert resumed(tmp_path / "run") in CHECKPOINTS


def test_a_requeued_job_of_slurm_continues(slurm: Slurm, tmp_path) -> None:
    variables = write_plan(tmp_path, 2, [SLOW])
    launch(tmp_path, "--slurm")
    job = slurm.submit("plan.sbatch", tmp_path, **variables)
    wait_for_step(tmp_path / "run", 5)
    slurm.run("scontrol", "requeue", job)
    slurm.start_again(job)
    assert slurm.finish(job) == "COMPLETED", log_of(tmp_path)
    assert slurm.field(job, "Restarts") == "1"
    assert losses(tmp_path / "run") == undisturbed(2)
    assert len(resumed(tmp_path / "run")) == 1
    assert resumed(tmp_path / "run")[0] >= 2


def test_a_signal_before_the_time_limit_saves_and_the_job_is_queued_again(slurm: Slurm, tmp_path) -> None:
    variables = write_plan(tmp_path, 2, [SLOW])
    launch(tmp_path, "--slurm")
    job = slurm.submit("plan.sbatch", tmp_path, **variables)
    wait_for_step(tmp_path / "run", 5)
    slurm.run("scancel", "--signal=USR1", job)  # what Slurm sends by #SBATCH --signal: to the steps, not to the script
    slurm.start_again(job)
    assert slurm.finish(job) == "COMPLETED", log_of(tmp_path)
    assert losses(tmp_path / "run") == undisturbed(2)
    assert resumed(tmp_path / "run")[0] >= 5  # saved at the signal: nothing is repeated


def test_slurm_runs_a_job_on_other_nodes_after_it_lost_one(slurm: Slurm, tmp_path) -> None:
    variables = write_plan(tmp_path, 4, [{**SLOW, "seconds": 3.0}])
    launch(tmp_path, "--slurm", "--per-node", "2")
    job = slurm.submit("plan.sbatch", tmp_path, "--nodelist=n1,n2", **variables)
    wait_for_step(tmp_path / "run", 4)
    slurm.lose_node("n2")
    try:
        slurm.start_again(job, "ReqNodeList=")
        assert slurm.finish(job) == "COMPLETED", log_of(tmp_path)
        assert slurm.field(job, "NodeList") == "n[1,3]"
    finally:
        slurm.start_node(2)
        poll(lambda: "3 idle" in slurm.run("sinfo", "-h", "-o", "%D %t", check=False), 60, "n2 does not come back")
    assert losses(tmp_path / "run") == undisturbed(4)


def test_slurm_with_too_few_nodes_or_no_plan_says_so(slurm: Slurm, tmp_path) -> None:
    write_plan(tmp_path, 4)
    launch(tmp_path, "--slurm", "--per-node", "2")
    job = slurm.submit("plan.sbatch", tmp_path, "--nodes=1")
    assert slurm.finish(job) == "FAILED"
    assert "MW-MESH-001" in log_of(tmp_path), log_of(tmp_path)
    (tmp_path / "plan.toml").unlink()
    job = slurm.submit("plan.sbatch", tmp_path)
    assert slurm.finish(job) == "FAILED"
    assert "plan.toml" in log_of(tmp_path)


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Hosts(tmp_path, 2) as isolated:
        yield isolated


def test_open_mpi_starts_the_ranks(hosts: Hosts, tmp_path) -> None:
    if missing("mpirun"):
        pytest.skip(missing("mpirun"))
    write_plan(tmp_path, 2)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_oob_tcp_if_include": "lo"}
    options = ["--oversubscribe"]  # more ranks than cores, if the machine has one
    words = ["meshwright", "train", "plan.toml", "--out", "run", "--save-every", "2"]
    hosts.run("mpirun", "-n", "2", *options, *words, **root)
    assert losses(tmp_path / "run") == undisturbed(2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchrun_runs_the_script(hosts: Hosts, tmp_path, ranks: int) -> None:
    """4 ranks: two agents with two ranks each, and a rank that is killed."""
    variables = write_plan(tmp_path, ranks, [KILL] if ranks == 4 else None)
    launch(tmp_path, "--torchrun", "--per-node", "2")
    agents = [
        hosts.start(
            f"agent-{n}.log", "bash", "plan-torchrun.sh", HEAD=os.uname().nodename, GLOO_SOCKET_IFNAME="lo", **variables
        )
        for n in range(ranks // 2)
    ]
    codes = [agent.wait(300) for agent in agents]
    assert codes == [0] * len(agents), (tmp_path / "agent-0.log").read_text()[-3000:]
    assert losses(tmp_path / "run") == undisturbed(ranks)
    assert resumed(tmp_path / "run") in (CHECKPOINTS if ranks == 4 else [[]])


@pytest.mark.parametrize("kind", ["kubernetes", "pytorchjob"])
def test_pods_run_their_script_with_the_variables_of_the_controller(hosts: Hosts, tmp_path, kind: str) -> None:
    """Two pods with a rank each, as processes. The Training Operator also sets RANK and WORLD_SIZE, of pods: torchrun replaces them."""
    write_plan(tmp_path, 2)
    text = launch(tmp_path, f"--{kind}", "--per-node", "1", "--out", "-")
    document = next(yaml.safe_load_all(text))
    if kind == "pytorchjob":
        pod = document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    else:
        pod = document["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "29500"}
    if kind == "pytorchjob":
        variables |= {"WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    pods = [
        hosts.start(
            f"pod-{number}.log",
            *container["command"],
            *container["args"],
            GLOO_SOCKET_IFNAME="lo",
            PET_NODE_RANK=str(number),
            **variables,
            **({"RANK": str(number)} if kind == "pytorchjob" else {}),
        )
        for number in range(2)
    ]
    assert [process.wait(300) for process in pods] == [0, 0], (tmp_path / "pod-0.log").read_text()[-3000:]
    assert losses(tmp_path / "run") == undisturbed(2)


@pytest.fixture(scope="module")
def ray(tmp_path_factory) -> Iterator[Ray]:
    python, failure = python_of("ray")
    if failure or missing():
        pytest.skip(failure or missing())
    with Ray(tmp_path_factory.mktemp("ray"), 3, python) as cluster:
        yield cluster


def test_ray_trains_on_workers_of_one_node(ray: Ray, tmp_path) -> None:
    write_plan(tmp_path, 2)
    printed = launch(tmp_path, "--ray", run=str(tmp_path / "run"))
    assert "ray job submit --working-dir . -- python plan-ray.py" in printed
    output = ray.submit(tmp_path)
    assert losses(tmp_path / "run") == undisturbed(2), output


def test_ray_continues_after_a_worker_was_killed(ray: Ray, tmp_path) -> None:
    variables = write_plan(tmp_path, 4, [KILL])
    launch(tmp_path, "--ray", run=str(tmp_path / "run"))
    output = ray.submit(tmp_path, **variables)
    assert losses(tmp_path / "run") == undisturbed(4), output
    assert resumed(tmp_path / "run") in CHECKPOINTS


RANK = """\
import os, signal, time
from pathlib import Path
import torch
from torch import distributed
distributed.init_process_group("gloo")
total = torch.ones(1)
distributed.all_reduce(total)
rank, begun = distributed.get_rank(), Path({folder!r}, "begun")
if rank == 1 and not begun.exists():
    begun.touch()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
distributed.barrier()
Path({folder!r}, f"rank-{{rank}}").write_text(str(int(total)))
"""


def test_a_killed_worker_of_ray_takes_the_rank_of_a_framework_with_it(ray: Ray, tmp_path) -> None:
    """The script in the place of nanotron's kills the worker that started it, in the first attempt."""
    write_plan(tmp_path, 2)
    (tmp_path / "run_train.py").write_text(RANK.format(folder=str(tmp_path)))
    launch(tmp_path, "--ray", run=str(tmp_path / "run"), framework="nanotron")
    output = ray.submit(tmp_path)
    assert [(tmp_path / f"rank-{rank}").is_file() and (tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == [
        "2"
    ] * 2, output
    assert not ray.processes(lambda folder: b"run_train.py" in (folder / "cmdline").read_bytes())


def test_ray_continues_on_another_node_after_it_lost_one(ray: Ray, tmp_path) -> None:
    variables = write_plan(tmp_path, 4, [{**SLOW, "seconds": 3.0}])
    launch(tmp_path, "--ray", run=str(tmp_path / "run"))
    job = ray.start_job(tmp_path, **variables)
    wait_for_step(tmp_path / "run", 4)
    used = [number for number in (2, 3) if ray.workers(number)]
    ray.lose_node(used[0])
    job.wait(300)
    assert losses(tmp_path / "run") == undisturbed(4), (ray.folder / "job.log").read_text()[-3000:]
    assert len(resumed(tmp_path / "run")) == 1
