"""Ranks that a launcher started: what its variables say, how the ranks meet, and what they report if they cannot."""

import os
import socket
import threading
import time

import pytest

from meshwright.errors import MeshwrightError
from meshwright.training.launch import join
from meshwright.training.launch.join import FailedElsewhere, Meeting, check_devices, device_of, joined
from meshwright.training.launch.rank import Placement, first_host, placement


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_placement_of_torchrun_and_slurm():
    assert placement({}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "h0", "MASTER_PORT": "1234"}
    assert placement(torchrun) == Placement(3, 8, 1, "h0", 1234)
    restarted = {**torchrun, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert placement(restarted) == Placement(3, 8, 1, "h0", 1234, store_is_running=True, restarts=2)
    elastic = placement({**restarted, "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "a"})
    assert (elastic.elastic, elastic.restarts_left) == (True, 1)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "5", "SLURM_JOB_ID": "71234"}
    assert placement(slurm) is None  # in the batch script, which runs on the first node only
    slurm["SLURM_STEP_NODELIST"] = "gpu[03-04]"
    assert placement(slurm) == Placement(5, 16, 5, "gpu03", 29_500 + 1234)
    assert placement({**slurm, **torchrun}) == placement(torchrun)  # torchrun under srun
    assert placement({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None  # an interactive shell of one task


def test_placement_of_open_mpi():
    name = "OMPI_COMM_WORLD_"
    mpi = {f"{name}RANK": "3", f"{name}SIZE": "4", f"{name}LOCAL_RANK": "1", f"{name}LOCAL_SIZE": "4"}
    assert placement(mpi) == Placement(3, 4, 1, "127.0.0.1", 29_500)
    several_hosts = {**mpi, f"{name}LOCAL_SIZE": "2"}
    assert placement({**several_hosts, "MASTER_ADDR": "h0"}) == Placement(3, 4, 1, "h0", 29_500)
    with pytest.raises(MeshwrightError, match=r"MW-RANK-006.*Fix: mpirun -x MASTER_ADDR=HOST"):
        placement(several_hosts)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[003-007,12],login1", "gpu003"), ("node7", "node7"), ("a,b", "a"), ("n[5]", "n5"), ("", "")],
)
def test_first_host_of_a_slurm_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h"},
        {"RANK": "0", "WORLD_SIZE": "2"},
    ],
)
def test_wrong_variables_are_refused(variables):
    with pytest.raises(MeshwrightError, match="MW-RANK-006"):
        placement(variables)


def test_missing_rank_is_named_in_bounded_time():
    start = time.monotonic()
    with (
        pytest.raises(MeshwrightError, match="MW-RANK-007: rank 1, 2 of 3 did not join within 1 s"),
        joined(Placement(0, 3, 0, "127.0.0.1", free_port()), "cpu", timeout_s=1.0),
    ):
        pass
    assert time.monotonic() - start < 60  # torch waits minutes


def test_unreachable_rendezvous_address_is_an_error(capfd):
    start = time.monotonic()
    with pytest.raises(MeshwrightError, match="MW-RANK-008"):
        Meeting(Placement(1, 2, 1, "127.0.0.1", free_port()), timeout_s=1.0)
    assert time.monotonic() - start < 60  # torch waits minutes
    assert capfd.readouterr().err == ""  # no stack of C++ functions
    os.write(2, b"printed")
    assert capfd.readouterr().err == "printed"


def in_threads(world, work, **fields):
    """The result of `work(meeting)` for each rank, or what it raised; the meetings share a store."""
    port, results = free_port(), [None] * world

    def run(rank):
        try:
            results[rank] = work(Meeting(Placement(rank, world, rank, "127.0.0.1", port, **fields), 10.0))
        except MeshwrightError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_ranks_exchange_values_and_only_the_first_failure_is_reported():
    def work(meeting):
        assert meeting.exchange({"rank": meeting.place.rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert meeting.succeed(lambda: meeting.place.rank) == meeting.place.rank

        def fail():
            if meeting.place.rank:
                raise MeshwrightError("MW-TEST-001", f"rank {meeting.place.rank}", exit_code=3)

        meeting.succeed(fail)

    zero, one, two = in_threads(3, work)
    assert str(one) == "MW-TEST-001: rank 1."
    assert isinstance(zero, FailedElsewhere)
    assert isinstance(two, FailedElsewhere)
    assert {error.exit_code for error in (zero, one, two)} == {3}


def test_rank_0_serves_the_store_until_all_ranks_know_of_a_failure(monkeypatch):
    """Its process ends after the error, and the store with it: a slow rank must have read it before."""
    left = []

    def work(meeting):
        if meeting.place.rank == 1:
            leave = meeting._leave
            monkeypatch.setattr(meeting, "_leave", lambda: (time.sleep(0.3), left.append(1), leave()))

        def fail():
            raise MeshwrightError("MW-TEST-001", "wrong input")

        with pytest.raises(MeshwrightError):
            meeting.succeed(fail)
        return list(left)

    assert in_threads(2, work) == [[1], [1]]


def test_a_rendezvous_that_is_lost_is_an_error_in_bounded_time():
    """The store ends, as with the process of torchrun's agent, while a rank waits in it for rank 0."""
    from torch import distributed

    stores = [distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    place = Placement(1, 2, 1, "127.0.0.1", stores[0].port, store_is_running=True)
    timer = threading.Timer(0.3, stores.clear)
    timer.start()
    with pytest.raises(MeshwrightError, match=r"MW-RANK-008: rank 1 lost the rendezvous at 127.0.0.1:") as lost:
        Meeting(place, 30.0)
    timer.join()
    assert "torchrun's agent, which serves it, has ended" in str(lost.value)
    assert lost.value.exit_code == 70


def test_a_store_that_outlived_its_ranks():
    """torchrun keeps its store: a rank that comes before the new rank 0 finds the session of ranks that have ended."""
    from torch import distributed

    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def meeting(rank):
        return Meeting(Placement(rank, 2, rank, "127.0.0.1", server.port, store_is_running=True), 10.0)

    for value in ("first", "second"):
        found = {}
        one = threading.Thread(target=lambda found=found, value=value: found.update(one=meeting(1).exchange(value)))
        one.start()
        time.sleep(0.2)
        assert meeting(0).exchange(value) == [value, value]
        one.join(10)
        assert found["one"] == [value, value]


def test_the_device_of_a_rank(monkeypatch):
    place = Placement(5, 8, 1, "h0", 1234)
    for gpus, device in (
        (0, "cpu"),
        (4, "cuda:1"),
        (1, "cuda:0"),
    ):  # one GPU: `srun --gpus-per-task=1` shows each task its own
        monkeypatch.setattr(join, "gpu_count", lambda gpus=gpus: gpus)
        monkeypatch.setattr("meshwright.training.machine.gpu_count", lambda gpus=gpus: gpus)
        assert device_of("auto", place) == device
        assert device_of("cpu", place) == "cpu"
    monkeypatch.setattr(join, "gpu_count", lambda: 4)
    with pytest.raises(MeshwrightError, match="MW-RANK-002: rank 9 is the process 5 of its host, which has 4 GPUs"):
        device_of("auto", Placement(9, 16, 5, "h0", 1234))


def test_ranks_on_different_devices_are_refused():
    def rank(device, host="h0", number="a"):
        return {"host": f"{host}/1", "device": device, "id": number}

    check_devices([rank("cpu"), rank("cpu")])
    check_devices([rank("cuda:0"), rank("cuda:1", number="b"), rank("cuda:0", "h1")])
    with pytest.raises(MeshwrightError, match="rank 1 uses a GPU and rank 0 the CPU"):
        check_devices([rank("cpu"), rank("cuda:0")])
    with pytest.raises(MeshwrightError, match="ranks 0, 2 use the same GPU of h0"):
        check_devices([rank("cuda:0"), rank("cuda:0", "h1"), rank("cuda:0")])
