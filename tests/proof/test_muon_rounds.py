"""Muon in several rounds: messages travel while other rounds are computed, and the update is that of one device."""

import layouts
import pytest
from test_matrix import BOUND, assert_issues_what_is_lowered

import ranks
from meshwright.describe.plan import Plan
from meshwright.proof.compare import compare

SMALL = 1  # elements of a round: one matrix on each rank
CASES = [
    layouts.Layout("llama", Plan(shard=2, zero=3, tp=2, sp=True), optimizer="muon", layers=2),  # two axes
    layouts.Layout("mlp", Plan(shard=4, zero=1), optimizer="muon", layers=16),
    layouts.Layout("mlp", Plan(shard=4, zero=2, overlap=()), optimizer="muon", layers=16),
]
EXPERTS = layouts.Layout("deepseek", Plan(shard=4, zero=1, ep=2), optimizer="muon")  # some of its matrices are whole


def train(context, jobs):
    """The traces of the jobs, and the order of messages and products in the last step of each."""
    from importlib import import_module

    from torch import distributed

    from meshwright.training.optimizer import muon

    import_module("meshwright.describe.sharding.boxes").ROUND = SMALL  # the package exports a function of this name
    order, send, orthogonalise, use = [], distributed.all_to_all_single, muon.orthogonalise, muon.Muon._step_adamw
    step = muon.Muon.step

    class Waited:
        def __init__(self, work, name):
            self.work, self.name = work, name

        def wait(self):
            order.append(("wait", self.name))
            self.work.wait()

    def issue(received, sent, into, out, group, async_op):
        name = sum(event == "send" for event, _ in order)
        order.append(("send", name))
        work = send(received, sent, into, out, group, async_op)
        return Waited(work, name) if async_op else None

    def compute(whole):
        order.append(("compute", len(order)))
        return orthogonalise(whole)

    def adamw(self):
        order.append(("adamw", 0))
        use(self)

    def restarted(self, closure=None):
        order.clear()
        step(self)

    muon.distributed = type("Recorded", (), {"all_to_all_single": staticmethod(issue)})
    muon.orthogonalise, muon.Muon._step_adamw, muon.Muon.step = compute, adamw, restarted
    found = []
    for job in jobs:
        found.append((layouts.train_all(context, [job])[0], [*order]))
    return found


@pytest.fixture(scope="module")
def trained():
    return ranks.run(4, train, [case.job() for case in CASES])


def check(case, traces):
    one = ranks.run(1, layouts.train_all, [case.reference.job()])[0][0]
    agreement = compare(one, traces)
    assert not agreement.breaks, [str(b) for b in agreement.breaks[:5]]
    assert all(error < BOUND for error in agreement.errors.values()), agreement.errors
    assert_issues_what_is_lowered(case, traces)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_several_rounds_train_what_one_device_trains(case, trained):
    check(case, [rank[CASES.index(case)][0] for rank in trained])


@pytest.mark.slow
def test_experts_in_several_rounds_train_what_one_device_trains():
    check(EXPERTS, [rank[0][0] for rank in ranks.run(4, train, [EXPERTS.job()])])


@pytest.mark.parametrize(("case", "axes", "exposed"), [(0, 2, 5), (1, 1, 1)])
def test_messages_travel_while_another_round_is_computed(case, axes, exposed, trained):
    """Between the issue of a message and its wait another round is computed, or AdamW's update. Over one axis only the last message back has
    nothing to hide behind; over two also the other messages of the first two and the last two rounds."""
    orders = [rank[case][1] for rank in trained]
    assert all(order[:2] == [("send", 0), ("adamw", 0)] for order in orders)
    order = max(
        orders, key=lambda order: sum(event == "compute" for event, _ in order)
    )  # it has a matrix in every round
    sent = [name for event, name in order if event == "send"]
    assert len(sent) >= 4 * 2 * axes
    between = {name: order[order.index(("send", name)) : order.index(("wait", name))] for name in sent}
    idle = [name for name, events in between.items() if not {"compute", "adamw"} & {event for event, _ in events}]
    assert len(idle) <= exposed, order


def test_a_plan_without_overlap_waits_at_once(trained):
    for rank in trained:
        events = [event for event, _ in rank[2][1]]
        assert "send" in events
        assert "wait" not in events
