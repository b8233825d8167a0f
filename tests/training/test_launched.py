"""Ranks that a launcher started: two hosts in network namespaces, two agents of torchrun, Open MPI's variables, a group of Ray.

The ranks are forked from the forkserver of the tests, which has imported torch; each gets the variables of its launcher and calls
`run_training`, as `meshwright train` does."""

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid

import pytest

import ranks  # noqa: F401  preloads what ranks need
from meshwright.comm.emulate import system
from meshwright.comm.emulate.emulation import Emulation
from meshwright.comm.emulate.topology import INTERFACE, Topology, address, namespace
from meshwright.describe.config import Config, load
from meshwright.describe.run_folder import present_plan, read_about, read_events, read_steps
from meshwright.errors import MeshwrightError
from meshwright.training.launch import local
from meshwright.training.launch.local import main_hidden
from meshwright.training.run import run_training
from meshwright.view.runs import summary

MODEL = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 32, "vocab": 256}
WORKLOAD = {"batch": 4, "seq": 8, "precision": "fp32"}
FP32 = {"param_dtype": "fp32", "master": False}
CLONE_NEWNET = 0x40000000


def config(**plan):
    return Config.from_parts(MODEL, "laptop", "gloo-cpu", WORKLOAD, {**FP32, **plan})


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def as_rank(variables, output, work, *args):
    """One process of a launcher: its output in a file, an exit code as that of the command."""
    from meshwright.cli import exit_code_of

    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    if space := variables.pop("NAMESPACE", ""):
        with open(system.NAMESPACES / space) as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) == 0
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **variables})
    try:
        code = exit_code_of(lambda: work(*args), False)
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    os._exit(code)


def run(folder, variables, work, *args, seconds=60.0):
    """Run `work` in one process for each set of variables; the exit codes and what each printed."""
    context = multiprocessing.get_context("forkserver")
    outputs = [folder / f"output-{i}" for i in range(len(variables))]
    processes = [
        context.Process(target=as_rank, args=(each, str(output), work, *args), daemon=True)
        for each, output in zip(variables, outputs, strict=True)
    ]
    with main_hidden():
        local.ensure_forkserver(__name__)
        for process in processes:
            process.start()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        process.kill()
        process.join()
    return [process.exitcode for process in processes], [output.read_text() for output in outputs]


def train(plan, steps, folder):
    training = run_training(plan, steps, folder=folder)
    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    assert (training is None) == (rank > 0)
    if training is not None:
        print("loss", training.measurement.loss[-1], "ranks", len(training.communication["ranks"]))


def env(rank, world, address, port, local_rank=None):
    local = rank if local_rank is None else local_rank
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local), "MASTER_ADDR": address, "MASTER_PORT": str(port),
    }  # fmt: skip


def missing_rights():
    try:
        system.check_rights()
        probe = f"mw-probe{uuid.uuid4().hex[:4]}-n0"
        system.call("ip", "netns", "add", probe)
        system.delete_namespace(probe)
    except MeshwrightError as error:
        return str(error)
    return ""


REFUSED = missing_rights()


@pytest.mark.skipif(bool(REFUSED), reason=REFUSED or "has the rights")
def test_two_hosts_train_what_one_host_trains(tmp_path):
    """Four ranks on two hosts that only reach each other over the emulated link; dp between the hosts."""
    plan = config(replicate=2, tp=2)
    alone = run_training(plan, 3).measurement.loss
    name = "t" + uuid.uuid4().hex[:8]
    with Emulation(Topology(nodes=2, ranks_per_node=2, rate=25e6), name):
        variables = [
            {
                **env(rank, 4, address(0), 29_411, rank % 2),
                "NAMESPACE": namespace(name, rank // 2),
                "GLOO_SOCKET_IFNAME": INTERFACE,
            }
            for rank in range(4)
        ]
        codes, texts = run(tmp_path, variables, train, plan, 3, tmp_path / "run")
    assert codes == [0] * 4, texts
    assert [row["loss"] for row in read_steps(tmp_path / "run")] == alone
    assert f"loss {alone[-1]} ranks 4" in texts[0]
    assert (tmp_path / "run" / "rank-3.log").exists()
    assert (tmp_path / "run" / "timeline.json").exists()


@pytest.mark.slow
def test_ranks_of_open_mpi(tmp_path):
    name, port = "OMPI_COMM_WORLD_", str(free_port())
    variables = [
        {
            f"{name}RANK": str(r),
            f"{name}SIZE": "2",
            f"{name}LOCAL_RANK": str(r),
            f"{name}LOCAL_SIZE": "2",
            "MASTER_PORT": port,
        }
        for r in range(2)
    ]
    codes, texts = run(tmp_path, variables, train, config(tp=2), 2, tmp_path / "run")
    assert codes == [0, 0], texts
    assert len(read_steps(tmp_path / "run")) == 2


def train_in_a_group(plan, folder):
    """Ray makes the default group before it calls the user's function; a second training uses it too."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method="env://")
    for name in ("one", "two"):
        train(plan, 2, folder / name)
    assert distributed.is_initialized()


def test_a_group_that_exists_is_used_and_kept(tmp_path):
    port = free_port()
    codes, texts = run(
        tmp_path, [env(r, 2, "127.0.0.1", port) for r in range(2)], train_in_a_group, config(tp=2), tmp_path
    )
    assert codes == [0, 0], texts
    assert read_steps(tmp_path / "one")[1]["loss"] == read_steps(tmp_path / "two")[1]["loss"]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"tp": 2, "microbatch": 3}, "MW-PLAN-"),
        ({"replicate": 4}, "MW-MESH-001: the plan needs 4 ranks and 2 were started"),
    ],
)
def test_wrong_input_is_printed_by_one_rank(tmp_path, plan, words):
    """Every rank finds the error; only the first one prints it, and all exit with its code."""
    port = free_port()
    variables = [env(r, 2, "127.0.0.1", port) for r in range(2)]
    codes, texts = run(tmp_path, variables, train, config(**plan), 2, tmp_path / "run")
    assert codes == [2, 2], texts
    assert words in texts[0]
    assert texts[1] == ""
    assert not (tmp_path / "run" / "steps.jsonl").exists()


def train_until_rank_1_fails(plan, folder, how):
    from meshwright.training import worker
    from meshwright.training.hooks import Hook

    class Failing(Hook):
        def before_step(self, trainer):
            if trainer.step == 3 and how == "raised":
                raise ZeroDivisionError("in step 3")
            if trainer.step == 3 and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1":
        worker.hooks_of = lambda *_: [Failing()]
    train(plan, 10, folder)


@pytest.mark.parametrize("how", [pytest.param("raised", marks=pytest.mark.slow), "killed"])
def test_only_the_root_cause_of_a_failure_is_printed(tmp_path, how):
    """A rank that lost rank 1 prints nothing if rank 1 has reported the cause, and otherwise that a rank is lost."""
    port, folder = free_port(), tmp_path / "run"
    variables = [env(r, 3, "127.0.0.1", port) for r in range(3)]
    plan = Config.from_parts(MODEL, "laptop", "gloo-cpu", {**WORKLOAD, "batch": 6}, {**FP32, "replicate": 3})
    codes, texts = run(tmp_path, variables, train_until_rank_1_fails, plan, folder, how)
    assert texts[2] == ""
    assert "Traceback" in (folder / "rank-2.log").read_text()
    assert len(read_steps(folder)) == 3
    (attempt,) = read_about(folder)["attempts"]
    if how == "raised":
        assert codes == [70, 70, 70]
        assert "MW-RANK-001: rank 1 raised" in texts[1]
        assert "ZeroDivisionError: in step 3" in texts[1]
        assert "MW-" not in texts[0]
        assert attempt["cause"] == "rank 1 raised: ZeroDivisionError: in step 3"
    else:
        assert codes == [70, -signal.SIGKILL, 70]
        assert "MW-RANK-010: rank 0 lost the connection" in texts[0]


def train_elastic(plan, steps, folder):
    """A rank of an elastic job of torchrun; on two ranks, rank 1 alone is signalled in step 5."""
    from meshwright.training import worker
    from meshwright.training.faults import guard
    from meshwright.training.hooks import Hook

    class Signal(Hook):
        def before_step(self, trainer):
            if trainer.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    guard.AGENT_S = 0.0
    if os.environ["RANK"] == "1":
        worker.hooks_of = lambda *_: [Signal()]
    run_training(plan, steps, folder=folder)


def test_a_node_that_joins_an_elastic_job_continues_its_run(tmp_path):
    """torchrun starts the ranks anew and counts no restart. The same agent is the sign that it is the same job; another job is refused."""
    elastic = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "0"}
    folder, port = tmp_path / "run", free_port()
    codes, texts = run(
        tmp_path, [env(0, 1, "127.0.0.1", port) | elastic], train_elastic, config(microbatch=2), 3, folder
    )
    assert codes == [0], texts
    codes, texts = run(tmp_path, [env(0, 1, "127.0.0.1", free_port())], train, config(microbatch=2), 9, folder)
    assert codes == [2]
    assert "MW-FOLDER-002" in texts[0]
    port = free_port()
    variables = [env(r, 2, "127.0.0.1", port) | elastic for r in range(2)]
    codes, texts = run(tmp_path, variables, train_elastic, config(microbatch=2), 100_000, folder)
    assert codes == [143, 0], (
        texts
    )  # the agent of rank 0 was not signalled: it must not take this for the end of the job
    first, second = read_about(folder)["attempts"]
    assert (first["world"], second["world"], second["resumed_from"], second["cause"]) == (1, 2, 3, "stopped")
    steps = [row["step"] for row in read_steps(folder)]
    assert steps == list(range(len(steps)))
    assert len(steps) in (6, 7)  # the signalled step, and one that has begun meanwhile


def rank_of_agent(folder, plan):
    """A rank under torchrun's agent. Rank 1 of the first attempt is killed after some steps."""
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":

        def kill():
            while len(read_steps(folder)) < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        training = run_training(plan, 200, folder=folder)
    except BaseException:
        (folder / f"error-{os.getpid()}").write_text(traceback.format_exc())
        os._exit(1)
    return training is not None and len(training.steps)


@pytest.mark.slow
def test_two_agents_of_torchrun_restart_their_ranks(tmp_path):
    """Both agents start their rank again in a new group, in the store that the agents keep."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    port, results = free_port(), {}

    def agent(number):
        settings = LaunchConfig(
            min_nodes=2,
            max_nodes=2,
            nproc_per_node=1,
            run_id="test",
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{port}",
            rdzv_configs={"is_host": number == 0},
            max_restarts=2,
            start_method="forkserver",
            local_addr="127.0.0.1",
        )
        results[number] = elastic_launch(settings, rank_of_agent)(tmp_path, config(replicate=2))

    local.ensure_forkserver(__name__)
    threads = [threading.Thread(target=agent, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert {rank: value for found in results.values() for rank, value in found.items()} == {0: 200, 1: False}
    first, second = read_about(tmp_path)["attempts"]
    assert first["cause"].startswith("rank 0 raised")  # it lost rank 1, which could not say why
    assert second["cause"] == ""


def resume_resized(plan, steps, folder):
    run_training(plan, steps, folder=folder, resume=True)


@pytest.mark.slow
def test_a_resize_keeps_the_plan_of_the_user_and_returns_to_it(tmp_path):
    """Two ranks, then one, then two: `plan.toml` is the user's plan all the time, with the present one in present.toml."""
    folder, plan = tmp_path / "run", config(replicate=2)
    run_training(plan, 2, folder=folder)
    asked = load(folder / "plan.toml")
    codes, texts = run(tmp_path, [env(0, 1, "127.0.0.1", free_port())], resume_resized, asked, 3, folder)
    assert codes == [0], texts
    assert (load(folder / "plan.toml").plan, load(folder / "present.toml").plan.world) == (asked.plan, 1)
    assert load(present_plan(folder)).plan.world == read_about(folder)["attempts"][-1]["world"] == 1
    title = summary(folder)["title"]
    assert title == f"{load(folder / 'present.toml').plan.title()} (asked for: {asked.plan.title()})"
    assert any(e["kind"] == "resized" and asked.plan.title() in e["text"] for e in read_events(folder))
    training = run_training(load(folder / "plan.toml"), 4, folder=folder, resume=True)
    assert training.config.plan == asked.plan
    assert load(folder / "plan.toml").plan == asked.plan
    assert not (folder / "present.toml").exists()
    assert summary(folder)["title"] == asked.plan.title()
