"""Who hangs: chains of ranks that wait for each other, silent ranks, links, circles; heartbeat files; slow ranks."""

from dataclasses import replace

from meshwright.host import process_start
from meshwright.training.faults.heartbeat import Heartbeat, HeartbeatFolder, Operation, diagnose, operation_key
from meshwright.training.faults.watchdog import slow_ranks


def beat(rank, operation=None, issued=(), **more):
    counts = {operation.key: operation.count} if operation is not None else {}
    more = {"phase": "step", **more}
    return Heartbeat(rank, "one", 1, "host", operation=operation, issued={**counts, **dict(issued)}, **more)


DP = [Operation("all_reduce", "dp", ranks, 7, 4096) for ranks in ((0, 2), (1, 3))]
TP = [Operation("all_gather", "tp", ranks, 3, 256) for ranks in ((0, 1), (2, 3))]


def verdict_of(*beats, silent=()):
    return diagnose({b.rank: b for b in beats}, set(silent))


def test_a_chain_of_waiting_ranks_ends_at_the_rank_outside_of_any_collective():
    """Rank 0 waits in dp for 2, which waits in tp for 3, which computes; rank 1 waits in dp for 3."""
    found = verdict_of(beat(0, DP[0]), beat(1, DP[1]), beat(2, TP[1]), beat(3, step=5))
    assert (found.kind, found.ranks, found.operation) == ("computing", (3,), TP[1])
    assert (
        found.what
        == "rank 3 hangs in step 5, outside of any collective; rank 2 waits in all_gather of tp (256 B, number 3)"
    )


def test_a_silent_rank_is_named_with_the_collective_that_waits_for_it():
    last = beat(3, issued={TP[1].key: 2}, step=9)  # from before it was stopped
    found = verdict_of(beat(0, DP[0]), beat(1, DP[1]), beat(2, TP[1]), last, silent={3})
    assert (found.kind, found.ranks, found.moment) == ("silent", (3,), "in step 9")
    assert found.operation in (DP[1], TP[1])
    assert (
        "rank 3 does not respond (last seen in step 9); rank 1 waits in all_reduce of dp (4 KiB, number 7)"
        in found.what
    )


def test_a_rank_that_never_wrote_is_silent_too():
    everyone = Operation("all_reduce", "world", (0, 1), 1)
    found = verdict_of(beat(0, everyone, step=4), silent={1})
    assert (found.kind, found.ranks, found.moment, found.operation) == ("silent", (1,), "in step 4", everyone)


def test_if_all_ranks_are_inside_the_same_operation_the_link_hangs():
    found = verdict_of(beat(0, DP[0]), beat(2, DP[0]))
    assert (found.kind, found.ranks, found.operation) == ("link", (0, 2), DP[0])


def test_if_the_gpu_of_one_rank_has_not_started_the_operation_it_hangs_before():
    found = verdict_of(beat(0, DP[0]), beat(2, replace(DP[0], started=False), step=3))
    assert (found.kind, found.ranks, found.waiting) == ("device", (2,), (0,))
    assert "the GPU of rank 2 hangs in step 3" in found.what


def test_ranks_in_different_operations_of_a_group_wait_for_the_one_behind():
    behind = replace(DP[0], count=6, operation="broadcast")
    found = verdict_of(beat(0, DP[0]), beat(2, behind, issued={DP[0].key: 6}))
    assert (found.kind, found.operation.operation) == ("link", "broadcast")  # rank 0 has issued number 6 as well


def test_ranks_that_issue_in_different_orders_wait_in_a_circle():
    a, b = Operation("all_reduce", "a", (0, 1), 1), Operation("all_reduce", "b", (0, 1), 1)
    found = verdict_of(beat(0, a), beat(1, b))
    assert (found.kind, found.ranks) == ("circle", (0, 1))
    assert "ranks 0, 1 wait for each other" in found.what


def test_a_receive_waits_for_its_sender_alone():
    receive = Operation("receive", "pp", (0, 1), 4)
    sent = {operation_key("pp", (0, 1), "send"): 3}
    assert verdict_of(beat(1, receive), beat(0, issued=sent)).ranks == (0,)
    sent = {operation_key("pp", (0, 1), "send"): 4}
    assert verdict_of(beat(1, receive), beat(0, issued=sent)).kind == "link"


def test_without_any_collective_the_rank_that_is_behind_hangs():
    found = verdict_of(beat(0, step=3), beat(1, step=2, phase="hooks"), beat(2, step=3))
    assert (found.kind, found.ranks, found.operation) == ("computing", (1,), None)
    assert found.what == "rank 1 hangs after step 2, outside of any collective"


# Files


def test_heartbeats_are_read_back_and_those_of_another_attempt_are_ignored(tmp_path):
    folder = HeartbeatFolder(tmp_path, "one")
    beats = [beat(0, DP[0], step=3), beat(2, own_s=0.5)]
    for one in beats:
        folder.write(one)
    assert folder.read_all(4) == {0: beats[0], 2: beats[1]}
    assert HeartbeatFolder(tmp_path, "two").read_all(4) == {}


def test_a_damaged_heartbeat_is_as_none(tmp_path):
    folder = HeartbeatFolder(tmp_path, "one")
    folder.write(beat(0))
    for damage in ("", "{", "[]", '{"rank": 0}', '{"operation": 3}'):
        folder.path(0).write_text(damage)
        assert folder.read(0) is None


def test_a_process_is_known_by_its_start():
    import os

    assert process_start(os.getpid()) == process_start(os.getpid()) > 0
    assert process_start(2**22 + 1) == 0


# Slow ranks


def test_a_rank_is_slow_against_those_with_the_same_work():
    usual = [beat(rank, stage=rank // 4, own_s=1.0 + rank // 4, step_s=4.0) for rank in range(8)]
    assert slow_ranks(usual) == []  # the second stage has twice the work by design
    usual[2] = replace(usual[2], own_s=1.6)
    (slow,) = slow_ranks(usual)
    assert (slow.rank, slow.own_s, slow.peers_s) == (2, 1.6, 1.0)
    assert "rank 2 on host is slow" in slow.text


def test_a_small_excess_or_a_rank_alone_is_not_slow():
    assert slow_ranks([beat(0, own_s=0.1, step_s=4.0), beat(1, own_s=0.2, step_s=4.0)]) == []
    assert slow_ranks([beat(0, own_s=1.0, step_s=4.0), beat(1, stage=1, own_s=3.0, step_s=4.0)]) == []
    lone = [beat(0, own_s=1.0, step_s=4.0, usual_s=0.9), beat(1, stage=1, own_s=3.0, step_s=4.0, usual_s=1.0)]
    (slow,) = slow_ranks(lone)
    assert (slow.rank, slow.peers_s) == (1, 1.0)
    assert "before 1 s" in slow.text
    assert slow_ranks([beat(0), beat(1, own_s=1.0, step_s=1.0)]) == []
