"""Join the other ranks that a launcher started (`rank.placement`), and make the default process group.

One process uses one GPU: that of its local rank, or the only one that it sees (`srun --gpus-per-task=1`).

Ranks meet in the store (`Meeting`) before any process group is made. So a missing rank is named after `timeout_s`, on every
rank that is there, instead of an error about sockets; a rank whose checks fail reports it before the others wait for it; and ranks that
share a GPU, or use different kinds of devices, are found.

torchrun keeps its store when it restarts ranks, and its agents may count restarts differently, so that ranks would look for each
other under the addresses of processes that have ended. Therefore rank 0 names a session for each meeting, and confirms it to the
processes that have signed in to it.
"""

import contextlib
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import distributed

from meshwright.comm.bench.backends import host_name
from meshwright.errors import MeshwrightError, listed
from meshwright.training.launch.rank import (
    GROUP_TIMEOUT_S,
    INTERNAL_ERROR,
    FailedElsewhere,
    Placement,
    RankContext,
    compute_as_batch,
    make_group,
    redirected,
)
from meshwright.training.machine import SHARED, gpu_count, resolve_backend, resolve_device

JOIN_TIMEOUT_S = 60.0
LEAVE_S = 5.0  # rank 0 serves the store this long after a failure
POLL_S = 0.02
Result = TypeVar("Result")


class Meeting:
    """The store in which the ranks of a launcher exchange small texts before they have a process group."""

    def __init__(self, place: Placement, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        self.place, self.timeout = place, timedelta(seconds=timeout_s)
        self.host, self.exchanges = host_name(), 0
        try:
            with without_stacks():
                serves = place.rank == 0 and not place.store_is_running
                server = distributed.TCPStore(place.address, place.port, place.world, serves, self.timeout, False)
        except (RuntimeError, ValueError) as error:
            raise self._unreachable(error) from None
        lobby = distributed.PrefixStore("meshwright", server)
        with self._reachable():
            self.session = self._open_session(lobby) if place.rank == 0 else self._find_session(lobby)
        self.store = distributed.PrefixStore(self.session, lobby)

    def _open_session(self, lobby: Any) -> str:
        """Rank 0 names a new session, waits until all ranks have signed in, and confirms who is in it."""
        session = uuid4().hex
        lobby.set("session", session)
        signed = [f"{session}/{rank}" for rank in range(1, self.place.world)]
        self._wait(lobby, ["", *signed], signed)
        lobby.set(
            f"{session}/members", json.dumps([text.decode() for text in lobby.multi_get(signed)] if signed else [])
        )
        return session

    def _find_session(self, lobby: Any) -> str:
        """The session that rank 0 confirms for this process. The name that is found first may be that of an earlier session, in a
        store that outlived its ranks."""
        own, session, until = uuid4().hex, "", time.monotonic() + self.timeout.total_seconds()
        while time.monotonic() < until:
            if lobby.check(["session"]) and (found := lobby.get("session").decode()) != session:
                session = found
                lobby.set(f"{session}/{self.place.rank}", own)
            if session and lobby.check([f"{session}/members"]) and own in json.loads(lobby.get(f"{session}/members")):
                return session
            time.sleep(POLL_S)
        signed = [f"{session}/{rank}" for rank in range(1, self.place.world)] if session else []
        missing = [str(rank) for rank, key in enumerate(signed, 1) if not lobby.check([key])]
        raise self._missing(missing or ["0"])

    def _wait(self, store: Any, keys: Sequence[str], needed: Sequence[str]) -> None:
        """Wait until the store has all needed keys; `keys` has one for each rank, to name the missing ones."""
        try:
            store.wait(list(needed), self.timeout)
        except distributed.DistStoreError:
            raise self._missing([str(r) for r, key in enumerate(keys) if key and not store.check([key])]) from None

    def exchange(self, value: Any) -> list[Any]:
        """The values (plain data) of all ranks, by rank. Raises on every rank with the names of ranks that do not come."""
        keys = [f"{self.exchanges}/{rank}" for rank in range(self.place.world)]
        self.exchanges += 1
        with self._reachable():
            self.store.set(keys[self.place.rank], json.dumps(value))
            self._wait(self.store, keys, keys)
            return [json.loads(text) for text in self.store.multi_get(keys)]

    def succeed(self, action: Callable[[], Result]) -> Result:
        """The result of an action that all ranks perform. If it fails on some ranks, the first of these raises its error, and all
        others raise `FailedElsewhere`."""
        error: MeshwrightError | None = None
        try:
            result = action()
        except MeshwrightError as found:
            error = found
        failed = {rank: code for rank, code in enumerate(self.exchange(error and error.exit_code)) if code is not None}
        if not failed:
            return result
        self._leave()
        first = min(failed)
        if error is not None and self.place.rank == first:
            raise error
        raise FailedElsewhere("MW-RANK-009", f"rank {first} failed and reports why", exit_code=failed[first])

    def _leave(self) -> None:
        """Tell the others that this rank has read what it needs. Rank 0 waits for them: the store ends with its process."""
        keys = [f"left/{rank}" for rank in range(self.place.world)]
        with contextlib.suppress(RuntimeError):  # a rank that has ended does not leave
            self.store.set(keys[self.place.rank], "")
            if self.place.rank == 0:
                self.store.wait(keys, timedelta(seconds=LEAVE_S))

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        """Raise one error if the process that serves the store ends while this rank uses it."""
        try:
            yield
        except distributed.DistNetworkError as error:
            owner = "torchrun's agent" if self.place.store_is_running else "rank 0"
            raise MeshwrightError(
                "MW-RANK-008",
                f"rank {self.place.rank} lost the rendezvous at {self.place.address}:{self.place.port}",
                why=f"{owner}, which serves it, has ended: {str(error).splitlines()[0][:200]}",
                fix=f"look at the output of {owner}",
                exit_code=INTERNAL_ERROR,
            ) from None

    def _unreachable(self, error: Exception) -> MeshwrightError:
        place = self.place
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            why, fix = "Another process uses the port", f"MASTER_PORT={place.port + 1}"
        else:
            why, fix = str(error).splitlines()[0][:200], "check MASTER_ADDR, MASTER_PORT and the firewall"
        return MeshwrightError(
            "MW-RANK-008",
            f"rank {place.rank} cannot reach the rendezvous address {place.address}:{place.port} "
            f"within {self.timeout.total_seconds():.0f} s",
            why=why,
            fix=fix,
        )

    def _missing(self, ranks: list[str]) -> MeshwrightError:
        return MeshwrightError(
            "MW-RANK-007",
            f"rank {listed(ranks)} of {self.place.world} did not join within {self.timeout.total_seconds():.0f} s",
            why=f"Either it was not started, or it ended, or it cannot reach {self.place.address}:{self.place.port}",
            fix="look at the output of that rank",
        )


@contextlib.contextmanager
def without_stacks() -> Iterator[None]:
    """Hold back what C++ code writes to stderr; print it on success, drop it if an exception is raised. torch's store writes the stack of its
    C++ functions for each attempt to connect; the exception has the reason. stderr belongs to the process: other threads than the first leave it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with tempfile.TemporaryFile() as held, redirected(held.fileno(), (2,)) as stderr:
        yield
        held.seek(0)
        os.write(stderr, held.read())


def device_of(kind: str, place: Placement) -> str:
    """This rank's device. `auto` uses a GPU if this host has one."""
    if kind == "auto":
        kind = "cuda" if gpu_count() else "cpu"
    if resolve_device(kind, 1) == "cpu":
        return "cpu"
    count = gpu_count()
    if kind == SHARED:
        return f"cuda:{place.local_rank % count}"
    if place.local_rank >= count > 1:
        raise MeshwrightError(
            "MW-RANK-002",
            f"rank {place.rank} is the process {place.local_rank} of its host, which has {count} GPUs",
            why="Each process needs its GPU",
            fix=f"torchrun --nproc-per-node {count}",
        )
    return f"cuda:{place.local_rank if count > 1 else 0}"


@contextlib.contextmanager
def joined(
    place: Placement,
    device: str = "auto",
    backend: str = "auto",
    timeout_s: float = JOIN_TIMEOUT_S,
    group_timeout_s: float = GROUP_TIMEOUT_S,
) -> Iterator[RankContext]:
    """This rank in the default process group of all ranks, which ends with the block. A group that exists already (Ray makes one) is
    used, and kept."""
    exists = distributed.is_initialized()
    context = join(place, device, backend, group_timeout_s, None if exists else Meeting(place, timeout_s))
    try:
        yield context
    finally:
        if not exists and distributed.is_initialized():
            distributed.destroy_process_group()


def join(
    place: Placement, device: str, backend: str, group_timeout_s: float, meeting: Meeting | None = None
) -> RankContext:
    """This rank, with its device. With a meeting, all its ranks make the default process group; without one, it exists already."""
    compute_as_batch()
    if meeting is None:
        device = device_of(device, place)
    else:
        kind, device = device, meeting.succeed(lambda: device_of(device, place))
        ranks = meeting.exchange({"host": meeting.host, "device": device, "id": device_id(device)})
        meeting.succeed(lambda: check_devices(ranks, kind == SHARED))
        if backend == "auto":
            backend = resolve_backend(backend, kind if kind == SHARED else device.partition(":")[0])
        join_group(meeting, backend, device, group_timeout_s)
    return RankContext(place.rank, place.world, device, lambda message: None)


def join_group(meeting: Meeting, backend: str, device: str, timeout_s: float) -> None:
    """Make the default process group of the ranks of a meeting."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    store, place = distributed.PrefixStore("group", meeting.store), meeting.place
    try:
        make_group(backend, store, place.rank, place.world, timeout_s)
    except RuntimeError as error:
        raise connection_failed(error) from error


def device_id(device: str) -> str:
    """The GPU itself, whatever its number is in this process."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.startswith("cuda") else ""


def check_devices(ranks: list[dict[str, str]], share: bool = False) -> None:
    """Raise if some ranks use GPUs and others the CPU, or if two ranks use one GPU and may not `share` it."""
    kinds = [rank["device"].partition(":")[0] for rank in ranks]
    if len(set(kinds)) > 1:
        raise MeshwrightError(
            "MW-RANK-002",
            f"rank {kinds.index('cuda')} uses a GPU and rank {kinds.index('cpu')} the CPU",
            fix="--device cpu, or start ranks on hosts with GPUs only",
        )
    gpus = [(rank["host"], rank["id"]) for rank in ranks]
    (gpu, users), *_ = Counter(gpus).most_common(1)
    if kinds[0] == "cuda" and users > 1 and not share:
        same = [str(rank) for rank, found in enumerate(gpus) if found == gpu]
        raise MeshwrightError(
            "MW-RANK-002",
            f"ranks {listed(same)} use the same GPU of {gpu[0].partition('/')[0]}",
            why="Each process needs its GPU",
            fix="start as many processes on a host as it has GPUs, or --share-device for a test",
        )


def connection_failed(error: Exception) -> MeshwrightError:
    """The error for ranks that met but cannot exchange messages."""
    return MeshwrightError(
        "MW-RANK-008",
        "the ranks met but cannot exchange messages",
        why=str(error).splitlines()[0][:200],
        fix="GLOO_SOCKET_IFNAME=eth0 (an interface that all hosts share); NCCL_SOCKET_IFNAME for NCCL",
    )
