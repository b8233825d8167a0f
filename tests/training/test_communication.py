"""Exposed and hidden communication of recorded steps: made-up events with known answers, and ranks whose waits are known."""

import time
from math import nan

import pytest
import torch

import ranks
from meshwright.describe.config import Config
from meshwright.explain.intervals import intersect, length, of_spans
from meshwright.training.hooks import CommEvent, RankReport, RecordedStep
from meshwright.training.measure.communication import (
    LoweredNames,
    Others,
    busiest,
    by_rank,
    parts_of_step,
)

MODEL = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 32, "vocab": 32, "tied": False}
EXPERTS = {**MODEL, "experts": 4, "top_k": 2, "expert_ffn": 16}
WORKLOAD = {"batch": 4, "seq": 8, "precision": "fp32"}
FP32 = {"param_dtype": "fp32", "master": False}


def config(model=MODEL, **plan):
    return Config.from_parts(model, "laptop", "gloo-cpu", WORKLOAD, {**FP32, **plan})


def event(axis, operation, size, issued, returned, waited=None, resumed=None, done=nan, peer=-1):
    waited = returned if waited is None else waited
    return CommEvent(axis, operation, size, peer, issued, returned, waited, resumed or waited, done)


def divided(made, *steps):
    names = LoweredNames(made)
    others = Others(names, dict(enumerate(steps)))
    return [parts_of_step(names, others, rank, step) for rank, step in enumerate(steps)]


def test_intervals():
    """Of whole nanoseconds and of seconds."""
    assert of_spans([(3, 4), (0, 2), (1, 2.5), (5, 5)]).tolist() == [[0, 2.5], [3, 4]]
    assert intersect(of_spans([(0, 2), (3, 6)]), of_spans([(1, 4), (5, 9)])).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert length(of_spans([(0, 2), (3, 4)])) == 3
    assert length(of_spans([(0.25, 2.0), (3.0, 4.0)])) == 2.75
    assert isinstance(length(of_spans([(0, 2)])), int)
    assert length(of_spans([])) == 0


def test_a_reduction_is_hidden_from_its_last_arrival_to_its_wait():
    """Rank 1 issues at 4 what rank 0 issued at 2; it is complete at 7; rank 0 waits from 6, rank 1 from 8."""
    gradients = 12_345  # bytes of no other message
    early = event("replicate", "all_reduce", gradients, 2, 2.1, 6, 7, done=7)
    late = event("replicate", "all_reduce", gradients, 4, 4.1, 8, 8, done=7)
    (first, hidden), (second, hidden_too) = divided(
        config(replicate=2), RecordedStep(0, 0, 8.5, 10, [early]), RecordedStep(0, 0, 8.5, 10, [late])
    )
    assert first == pytest.approx({"compute": 7.4, "optimizer": 1.5, "dp": 1.1})
    assert second == pytest.approx({"compute": 8.4, "optimizer": 1.5, "dp": 0.1})
    assert hidden["dp"] == pytest.approx(2.0)  # from 4 to 6
    assert hidden_too["dp"] == pytest.approx(2.9)  # from 4.1 to 7


def test_blocked_time_before_the_last_rank_has_issued_is_waiting_and_not_communication():
    """Rank 0 is blocked from 2 to 7 in a collective that rank 1 issues at 5; the second one is asynchronous, and rank 1 comes after its call."""
    early = [event("replicate", "all_reduce", 12_345, 2, 7), event("replicate", "all_reduce", 12_345, 7, 7.2, 9, 9.5)]
    late = [event("replicate", "all_reduce", 12_345, 5, 7), event("replicate", "all_reduce", 12_345, 8, 8.1, 9, 9.5)]
    (first, _), (second, _) = divided(
        config(replicate=2), RecordedStep(0, 0, 10, 10, early), RecordedStep(0, 0, 10, 10, late)
    )
    assert first == pytest.approx({"compute": 4.3, "waiting": 3.0, "dp": 2.7, "optimizer": 0.0})
    assert second == pytest.approx({"compute": 7.4, "dp": 2.6, "optimizer": 0.0})


def test_clocks_of_different_machines_show_no_waiting():
    early, late = (event("replicate", "all_reduce", 12_345, t, t + 5) for t in (2, 1002))
    found = divided(config(replicate=2), RecordedStep(0, 0, 9, 9, [early]), RecordedStep(0, 1000, 1009, 1009, [late]))
    assert [exposed["dp"] for exposed, _ in found] == [5.0, 5.0]


def test_the_sums_of_three_numbers_belong_to_the_optimizer_as_predicted():
    tokens, norm = event("replicate", "all_reduce", 8, 0, 1), event("world", "all_reduce", 16, 8, 9)
    step = RecordedStep(0, 0, 7, 10, [tokens, norm])
    (exposed, hidden), _ = divided(config(replicate=2), step, step)
    assert exposed == pytest.approx({"compute": 6, "optimizer": 4})
    assert hidden == {}


def test_waiting_for_another_stage_is_bubble_until_it_sends():
    """Rank 1 waits from 1 to 5 for a message that rank 0 sends at 4; at the end rank 0 waits from 8 to 9.5 for rank 1, which comes at 9."""
    size = 4 * 8 * 16
    sent = event("pp", "send", size, 4, 4.1, peer=1)
    received = event("pp", "receive", size, 0.5, 0.6, 1, 5, peer=0)
    ends = [event("world", "all_reduce", 16, 8, 8, 8, 9.5), event("world", "all_reduce", 16, 9, 9, 9, 9.5)]
    (first, _), (second, hidden) = divided(
        config(pp=2), RecordedStep(0, 0, 8, 10, [sent, ends[0]]), RecordedStep(0, 0, 9, 10, [received, ends[1]])
    )
    assert first == pytest.approx({"compute": 7.9, "pp": 0.1, "bubble": 1.0, "optimizer": 1.0})
    assert second == pytest.approx({"compute": 4.9, "pp": 1.0, "bubble": 3.1, "optimizer": 1.0})
    assert hidden["pp"] == 0


def test_a_message_that_arrived_unseen_takes_the_time_of_those_that_were_waited_for():
    """The second message was there when its wait began, at 9: it counts 1 second, as the first one took from 2 to 3."""
    size = 4 * 8 * 16
    sends = [event("pp", "send", size, t, t, peer=1) for t in (2, 5)]
    receives = [event("pp", "receive", size, 0, 0, *wait, peer=0) for wait in ((1, 3), (9, 9))]
    _, (_, hidden) = divided(config(pp=2), RecordedStep(0, 0, 9, 9, sends), RecordedStep(0, 0, 9, 9, receives))
    assert hidden["pp"] == pytest.approx(1.0)


def test_the_mean_step_of_the_busiest_rank():
    steps = [RecordedStep(i, 10 * i, 10 * i + 8, 10 * i + 9 + i, []) for i in range(3)]
    reports = [RankReport(r, 0, 0, 0, {}, recorded=tuple(steps)) for r in range(2)]
    found = by_rank(config(replicate=2), reports, warmup=1)
    assert [r.exposed_s for r in found] == [{"compute": 8.0, "optimizer": 2.5}] * 2
    assert busiest(found).step_s == 10.5
    assert by_rank(config(replicate=2), reports, warmup=3) == []


# Ranks


def trainer_of(context, made):
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    parallel = apply(made.model, made.plan, made.workload, context.rank)
    return Trainer(parallel, RandomSamples(made.model, made.workload.seq, 0))


def report_of(context, trainer, steps):
    stage = trainer.parallel.mesh.coordinates["pp"]
    return RankReport(context.rank, stage, 0, 0, {}, recorded=tuple(steps))


def slow_rank(context, made, seconds):
    """Rank 1 sleeps before each forward."""
    from meshwright.training.measure.record_comm import CommRecorder

    trainer = trainer_of(context, made)
    scope = trainer.parallel.microbatch_scope

    def sleep_first(microbatch):
        time.sleep(seconds * context.rank)
        return scope(microbatch)

    trainer.parallel.microbatch_scope = sleep_first
    trainer.train(1)
    with CommRecorder(trainer) as recorder:
        trainer.train(2)
    return report_of(context, trainer, recorder.steps)


@pytest.mark.slow
def test_a_rank_that_sleeps_shows_as_waiting_on_the_other():
    made = config(replicate=2)
    fast, slow = by_rank(made, ranks.run(2, slow_rank, made, 0.1))
    microbatches = 2
    assert fast.exposed_s["waiting"] > 0.9 * microbatches * 0.1
    assert slow.exposed_s["compute"] > microbatches * 0.1
    assert slow.exposed_s.get("waiting", 0.0) < fast.exposed_s["waiting"]
    assert busiest([fast, slow]).rank == 1


def computing_meanwhile(context, made, backend):
    """Every rank computes until its gradients are summed, and only then waits for them."""
    from meshwright.training.measure.record_comm import CommRecorder

    trainer = trainer_of(context, made)
    finish, (buckets,) = trainer.parallel.finish_gradients, trainer.parallel.reductions

    def compute_first():
        while not all(work.is_completed() for work in buckets._work):
            time.sleep(1e-3)
        time.sleep(0.01)
        finish()

    trainer.parallel.finish_gradients = compute_first
    with CommRecorder(trainer) as recorder:
        trainer.train(2)
    return report_of(context, trainer, recorder.steps)


@pytest.mark.parametrize("backend", ["gloo", "meshwright"])
def test_communication_behind_compute_shows_as_hidden(backend):
    made = config(replicate=2)
    reports = ranks.run(2, computing_meanwhile, made, backend, backend=backend)
    reductions = [e for r in reports for step in r.recorded for e in step.events if e.bytes > 16]
    assert len(reductions) == 4
    assert all(e.issued < e.done < e.waited for e in reductions)
    for found in by_rank(made, reports):
        assert found.hidden_s["dp"] > 0
        assert sum(found.exposed_s.values()) == pytest.approx(found.step_s)


PLANS = [
    (MODEL, {"replicate": 2}),
    (MODEL, {"shard": 2, "zero": 3}),
    (MODEL, {"tp": 2, "sp": True}),
    (MODEL, {"pp": 2}),
    (MODEL, {"cp": 2}),
    (EXPERTS, {"replicate": 2, "ep": 2}),
]


def recorded_and_observed(context, cases):
    """What recorder and observer count in the same step, for each plan."""
    from meshwright.training.measure.observe import Observer
    from meshwright.training.measure.record_comm import CommRecorder

    out = []
    for made in cases:
        trainer = trainer_of(context, made)
        trainer.train(1)
        with CommRecorder(trainer) as recorder, Observer(trainer, separate_axes=True) as observer:
            trainer.train(1)
        seen: dict = {}
        for e in recorder.steps[-1].events:
            if e.operation != "receive":
                count, size = seen.get((e.axis, e.operation), (0, 0))
                seen[e.axis, e.operation] = count + 1, size + e.bytes
        out.append((seen, observer.observed().collectives))
    return out


@pytest.mark.parametrize("backend", ["gloo", pytest.param("meshwright", marks=pytest.mark.slow)])
def test_every_collective_that_the_dispatcher_sees_is_recorded(backend):
    cases = [config(model, **plan) for model, plan in PLANS]
    for found in ranks.run(2, recorded_and_observed, cases, backend=backend):
        for recorded, observed in found:
            assert recorded == observed != {}


def counted_traffic(context, cases):
    """By plan: bytes sent as a report says, and as the transport between ranks of one host has delivered them."""
    from meshwright.comm.transport.shared_memory import SharedMemory
    from meshwright.training.measure.observe import Observer
    from meshwright.training.measure.reports import sent_by_axis

    delivered, plain = [], SharedMemory.tell

    def counting(memory, link, slot, call=b"", sent=0, size=0):
        delivered.append(size)  # of a slot that is given back: 0
        plain(memory, link, slot, call, sent, size)

    SharedMemory.tell, out = counting, []
    for made in cases:
        trainer = trainer_of(context, made)
        trainer.train(1)
        delivered.clear()
        with Observer(trainer, separate_axes=True) as observer:
            trainer.train(1)
        out.append((sent_by_axis(trainer, observer.observed()), sum(delivered)))
    return out


def test_bytes_sent_are_those_of_the_group_that_was_used():
    """A tied embedding is summed over the first and the last of four stages: 2·(2−1)/2 of its bytes, not 2·(4−1)/4. A KV head that two of four
    ranks hold is summed over those two."""
    tied = {**MODEL, "layers": 4, "vocab": 48, "tied": True}
    one_kv = {**MODEL, "heads": 4, "kv_heads": 2}
    found = ranks.run(4, counted_traffic, [config(tied, pp=4, microbatch=1), config(one_kv, tp=4)])
    boundary, table = 4 * 8 * 16 * 4, 48 * 16 * 4  # four micro-batches of 8 tokens; the embedding
    norm = 2 * 3 / 4 * 16  # two numbers in float64, summed over all ranks
    ends, middle = boundary + table + norm, 2 * boundary + norm
    assert [rank[0][0]["pp"] for rank in found] == [ends, middle, middle, ends]
    predicted = predict_traffic(config(one_kv, tp=4))
    assert found[0][1][0]["tp"] == pytest.approx(predicted["tp"], abs=100)  # besides sums of a few numbers
    assert predicted["tp"] > 10_000


def predict_traffic(made):
    from meshwright.predict.prediction import predict

    return predict(made).traffic_bytes


def test_bytes_sent_by_our_backend_are_those_that_its_transport_delivered():
    cases = [
        config(replicate=4, microbatch=1),
        config(tp=2, shard=2, zero=3),
        config(EXPERTS, replicate=4, ep=2, microbatch=1),
    ]
    for rank in ranks.run(4, counted_traffic, cases, backend="meshwright"):
        for sent, delivered in rank:
            assert sum(sent.values()) == delivered > 0


def functional(context):
    """A DTensor that is gathered: torch issues a functional collective, and waits when the result is used."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from meshwright.training.measure.record_comm import CommRecorder

    trainer = trainer_of(context, config(replicate=2))
    mesh = trainer.parallel.mesh.device_mesh
    with CommRecorder(trainer) as recorder:
        whole = DTensor.from_local(torch.ones(3), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        total = float(whole.to_local().sum())
        (running,) = recorder.events
    plain = DTensor.from_local(torch.ones(3), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    return total, float(plain.to_local().sum()), running.operation, running.bytes, running.resumed >= running.waited > 0


def test_functional_collectives_are_recorded():
    assert ranks.run(2, functional) == [(6.0, 6.0, "all_gather", 24, True)] * 2
