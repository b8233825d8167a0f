"""The adapter to torch's pipeline runtime: torch has the names that it needs, and it runs our program."""

import pytest
import torch
from torch.distributed.pipelining import schedules
from torch.torch_version import TorchVersion

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.parallel.apply import apply
from meshwright.parallel.pipeline import actions_of, check_adapter, check_messages, check_split_products, receive_early
from meshwright.programs.pipelines import build
from meshwright.training.fake_group import fake_group

MODEL = Model(hidden=16, layers=4, heads=2, ffn=24, vocab=32)


def order_run(context, plan, workload):
    """The actions that torch performs on this rank, as (stage, kind, micro-batch)."""
    from meshwright.parallel.pipeline import Stage
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    log = []
    forward, backward, weight = Stage.forward_one_chunk, Stage.backward_one_chunk, Stage.backward_weight_one_chunk

    def f(self, chunk, *args, **kwargs):
        log.append((self.stage_index, "F", chunk))
        return forward(self, chunk, *args, **kwargs)

    def b(self, chunk, *args, full_backward=True, **kwargs):
        log.append((self.stage_index, "B" if full_backward else "I", chunk))
        return backward(self, chunk, *args, full_backward=full_backward, **kwargs)

    def w(self, chunk, *args, **kwargs):
        log.append((self.stage_index, "W", chunk))
        return weight(self, chunk, *args, **kwargs)

    Stage.forward_one_chunk, Stage.backward_one_chunk, Stage.backward_weight_one_chunk = f, b, w
    parallel = apply(MODEL, plan, workload, context.rank)
    Trainer(parallel, RandomSamples(MODEL, workload.seq, 0)).train_step()
    return sorted(parallel.stages), log


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_torch_runs_our_program_action_by_action(schedule, virtual):
    plan = Plan(pp=2, schedule=schedule, virtual=virtual)
    program = build(schedule, 2, 4, virtual)
    for rank, (stages, log) in enumerate(ranks.run(2, order_run, plan, Workload(batch=4, seq=4))):
        assert log == [tuple(action) for action in program.actions(rank)]
        assert stages == [s for s in range(2 * virtual) if program.rank_of[s] == rank]
    if schedule == "zbv":
        assert list(program.rank_of) == [0, 1, 1, 0]


def test_the_adapter_supports_this_torch():
    check_adapter()
    program = build("zbv", 2, 4, 2)
    actions = actions_of(program)
    assert [len(actions[r]) for r in range(2)] == [len(program.actions(r)) for r in range(2)]
    letters = {"F": "F", "I": "I", "W": "W", "B": "B"}
    first = program.actions(0)[0]
    assert str(actions[0][0]) == f"{first.stage}{letters[first.kind]}{first.microbatch}"


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_receives_are_posted_before_unrelated_computations(schedule, virtual):
    program = build(schedule, 4, 8, virtual)
    lists = schedules._add_send_recv(actions_of(program), lambda stage: program.rank_of[stage], 4 * virtual)
    moved = 0
    for actions in lists.values():
        early = receive_early(actions)
        moved += early != actions
        for kind in (True, False):
            assert [a for a in early if is_message(a) == kind] == [a for a in actions if is_message(a) == kind]
        for i, action in enumerate(early):
            if "RECV" in str(action):
                assert i < early.index(needs(action, early))
    assert moved
    if schedule == "1f1b":
        last = " ".join(map(str, receive_early(lists[0])[-5:]))
        assert last == "0RECV_B6 0B5 0RECV_B7 0B6 0B7"


def is_message(action):
    return any(word in str(action) for word in ("SEND", "RECV"))


def needs(receive, actions):
    """The computation that needs a message."""
    kinds = "F" if "RECV_F" in str(receive) else "BI"
    wanted = {f"{receive.stage_index}{kind}{receive.microbatch_index}" for kind in kinds}
    return next(action for action in actions if str(action) in wanted)


@pytest.mark.parametrize("name", ["_Action", "_PipelineScheduleRuntime", "_ComputationType"])
def test_a_torch_without_the_private_names_gives_a_clear_error(name, monkeypatch):
    monkeypatch.delattr(schedules, name)
    with pytest.raises(MeshwrightError, match=f"MW-PIPE-040: torch .* has no .*{name}"):
        check_adapter()
    monkeypatch.undo()
    monkeypatch.delattr(schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms")
    with pytest.raises(MeshwrightError, match="_prepare_schedule_with_comms"):
        check_adapter()


def test_custom_products_in_a_split_backward_are_refused_on_older_torch(monkeypatch):
    plan, split = Plan(pp=2, schedule="zb-h1"), build("zb-h1", 2, 4, 1)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cpu"))
    check_split_products(plan, split)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu129"))
    check_split_products(plan, build("1f1b", 2, 4, 1))
    with pytest.raises(MeshwrightError, match=r"MW-PIPE-041: fp8 products under the schedule zb-h1 need torch 2\.13"):
        check_split_products(plan, split)


def test_integers_between_stages_are_refused_on_older_torch(monkeypatch):
    tokens, activations = torch.ones(2, dtype=torch.int64), torch.ones(2)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cpu"))
    check_messages(1, (activations, tokens))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1+cu129"))
    check_messages(1, (activations,))
    with pytest.raises(MeshwrightError, match=r"MW-PIPE-043: pipeline stage 1 receives integers, and torch 2\.12"):
        check_messages(1, (activations, tokens))


def test_a_count_of_tokens_does_not_widen_the_loss():
    """torch 2.11 refuses a last stage whose output has another dtype than it states."""
    with fake_group(0, 1):
        parallel = apply(MODEL, Plan(), Workload(batch=2, seq=4), 0, dtype=torch.float32)
        parallel.set_tokens(torch.tensor(8.0, dtype=torch.float64), scale=1.0)
        assert parallel.tokens.dtype == torch.float32


def own_stages(context, schedule, virtual):
    """Networks in which some stages have no trained parameters: whether gradients equal those of one device, by network."""
    from torch import nn

    from meshwright.describe.layout import Layout
    from meshwright.parallel.data.reduction import LocalGradients
    from meshwright.parallel.mesh import Mesh
    from meshwright.parallel.pipeline import Pipeline, Stage

    def parts(*, frozen=(), empty=()):
        torch.manual_seed(0)
        made = [
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double().requires_grad_(i not in frozen) for i in range(count)
        ]
        return [nn.Tanh() if i in empty else part for i, part in enumerate(made)]

    program, count = build(schedule, 2, 4, virtual), 2 * virtual
    mesh = Mesh(Layout(Plan(pp=2, schedule=schedule, virtual=virtual)), context.rank)
    mine = [i for i in range(count) if program.rank_of[i] == context.rank]
    between = torch.empty(2, 4, dtype=torch.float64, device="meta", requires_grad=True)
    x = torch.arange(32, dtype=torch.float64).view(8, 4) / 32
    out = []
    for how in ({}, {"frozen": [0]}, {"frozen": [1]}, {"empty": [0]}, {"empty": [1]}):
        own, twin = parts(**how), parts(**how)
        alone = {i: LocalGradients(own[i].parameters()) for i in mine}
        ends = [between.detach() if i == 0 else between for i in range(count)]
        stages = [Stage(own[i], i, count, mesh, alone[i], ends[i], between) for i in mine]
        pipeline = Pipeline(program, stages, mesh, lambda y, target: (y - target).square().sum())
        for _ in range(2):
            pipeline.run(x, x)
            for reduction in alone.values():
                reduction.finish()
            (nn.Sequential(*twin)(x) - x).square().sum().backward()
            pairs = [(a, b) for i in mine for a, b in zip(own[i].parameters(), twin[i].parameters(), strict=True)]
            out += [torch.allclose(a.grad, b.grad) if b.requires_grad else a.grad is None for a, b in pairs]
            for parameter in (p for pair in pairs for p in pair):
                parameter.grad = None
    with pytest.raises(MeshwrightError, match="MW-PIPE-042"):
        pipeline.run(x[:7], x[:7])
    return out


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("zbv", 2)])
def test_users_networks_may_have_stages_without_trained_parameters(schedule, virtual):
    for right in ranks.run(2, own_stages, schedule, virtual):
        assert right
        assert all(right)
