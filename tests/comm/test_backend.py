"""The backend against gloo: every collective, dtype and odd shape; and torch's own users of a backend (DDP, fully_shard, DTensor)."""

import pytest
import torch
from torch import distributed

import ranks
from meshwright.comm.communicator import GroupFailure
from meshwright.errors import MeshwrightError

WORLD = 3
SHAPES = [(), (1,), (5,), (7, 3), (0,), (2, 0, 3)]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)


def groups():
    """The same ranks once with gloo and once with our backend."""
    from torch import distributed

    import meshwright.comm.backend  # noqa: F401

    return distributed.group.WORLD, distributed.new_group(backend="meshwright")


def numbers(shape, dtype, seed):
    """Small whole numbers: sums and products are exact in every dtype, so every order gives the same result."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def cases(rank, size):
    """Name → function(group) that returns the resulting tensors."""
    from torch import distributed as d

    found = {}

    def case(name):
        def add(function):
            found[name] = function
            return function

        return add

    for dtype in (*FLOATS, *INTEGERS):
        for reduction in ("SUM", "PRODUCT", "MIN", "MAX", *(["AVG"] if dtype in FLOATS else ["BAND", "BOR", "BXOR"])):

            @case(f"all_reduce {dtype} {reduction}")
            def _(group, dtype=dtype, reduction=reduction):
                tensor = numbers((7, 3), dtype, rank)
                d.all_reduce(tensor, getattr(d.ReduceOp, reduction), group=group)
                return [tensor]

    for shape in SHAPES:

        @case(f"all_reduce {shape}")
        def _(group, shape=shape):
            tensor = numbers(shape, torch.float32, rank)
            d.all_reduce(tensor, group=group)
            return [tensor]

        @case(f"all_gather {shape}")
        def _(group, shape=shape):
            outs = [torch.empty(shape) for _ in range(size)]
            d.all_gather(outs, numbers(shape, torch.float32, rank), group=group)
            return outs

        for root in (0, size - 1):

            @case(f"broadcast {shape} {root}")
            def _(group, shape=shape, root=root):
                tensor = numbers(shape, torch.float32, rank)
                d.broadcast(tensor, root, group=group)
                return [tensor]

    @case("reduce")
    def _(group):
        tensor = numbers((5,), torch.float32, rank)
        d.reduce(tensor, size - 1, group=group)
        return [tensor] if rank == size - 1 else []

    @case("not contiguous")
    def _(group):
        tensor = numbers((6, 4), torch.float32, rank).t()
        d.all_reduce(tensor, group=group)
        other = numbers((6, 4), torch.float32, rank).t()
        d.broadcast(other, 1, group=group)
        return [tensor, other]

    @case("all_gather_into_tensor")
    def _(group):
        out = torch.empty(size * 5)
        d.all_gather_into_tensor(out, numbers((5,), torch.float32, rank), group=group)
        return [out]

    @case("reduce_scatter_tensor")
    def _(group):
        out = torch.empty(4)
        d.reduce_scatter_tensor(out, numbers((size * 4,), torch.float32, rank), group=group)
        return [out]

    @case("reduce_scatter")
    def _(group):
        out = torch.empty(4)
        d.reduce_scatter(out, [numbers((4,), torch.float32, 10 * rank + k) for k in range(size)], group=group)
        return [out]

    @case("all_to_all_single")
    def _(group):
        out = torch.empty(size * 2)
        d.all_to_all_single(out, numbers((size * 2,), torch.float32, rank), group=group)
        return [out]

    @case("all_to_all_single uneven, zero splits")
    def _(group):
        sent, received = [(rank + k) % size for k in range(size)], [(rank + k) % size for k in range(size)]
        out = torch.empty(sum(received), 2)
        d.all_to_all_single(out, numbers((sum(sent), 2), torch.float32, rank), received, sent, group=group)
        return [out]

    @case("gather and scatter")
    def _(group):
        outs = [torch.empty(3) for _ in range(size)] if rank == 1 else None
        d.gather(numbers((3,), torch.float32, rank), outs, dst=1, group=group)
        out = torch.empty(3)
        shards = [numbers((3,), torch.float32, k) for k in range(size)] if rank == 1 else None
        d.scatter(out, shards, src=1, group=group)
        return [*(outs or []), out]

    @case("send and recv")
    def _(group):
        found = []
        for elements in (0, 3, 5000):
            out = torch.empty(elements)
            right, left = (rank + 1) % size, (rank - 1) % size
            ops = [
                d.P2POp(d.irecv, out, left, group),
                d.P2POp(d.isend, torch.full((elements,), float(rank)), right, group),
            ]
            for work in d.batch_isend_irecv(ops):
                work.wait()
            found.append(out)
        return found

    @case("recv from any rank")
    def _(group):
        if rank:
            d.send(torch.full((2000,), float(rank)), 0, group=group)
            return []
        outs = [torch.empty(2000) for _ in range(size - 1)]
        sources = [d.recv(out, group=group) for out in outs]
        assert sorted(sources) == list(range(1, size))
        assert [out[0].item() for out in outs] == sources
        return []

    @case("objects and asynchronous calls")
    def _(group):
        d.barrier(group)
        many = [torch.full((100,), float(rank + k)) for k in range(5)]
        for work in [d.all_reduce(tensor, group=group, async_op=True) for tensor in many]:
            work.wait()
        objects = [None] * size
        d.all_gather_object(objects, {"rank": rank}, group=group)
        assert objects == [{"rank": r} for r in range(size)]
        return many

    @case("coalesced")
    def _(group):
        many = [numbers((k,), torch.float32, rank + k) for k in range(4)]
        d.all_reduce_coalesced(many, group=group)
        return many

    return found


def compare_with_gloo(context):
    gloo, ours = groups()
    wrong = []
    for name, case in cases(context.rank, context.world).items():
        expected, found = case(gloo), case(ours)
        if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
            wrong.append((name, expected, found))
    return [str(w) for w in wrong]


def test_every_collective_gives_gloos_result():
    assert ranks.run(WORLD, compare_with_gloo) == [[]] * WORLD


def beyond_gloo(context):
    """What gloo refuses: averages of integers, uneven gathers and reduce-scatters, other integer types, every second row."""
    from torch import distributed as d

    rank, size = context.rank, context.world
    _, ours = groups()
    tensor = torch.tensor([rank, 5 * rank, -7 * rank])
    d.all_reduce(tensor, d.ReduceOp.AVG, group=ours)
    outs = [torch.empty(k + 1, dtype=torch.int16) for k in range(size)]
    d.all_gather(outs, torch.full((rank + 1,), rank, dtype=torch.int16), group=ours)
    shard = torch.empty(rank + 1, dtype=torch.int16)
    d.reduce_scatter(shard, [torch.full((k + 1,), 10 * k + rank, dtype=torch.int16) for k in range(size)], group=ours)
    unsigned = torch.full((3,), 2**31 + rank, dtype=torch.uint32)
    d.all_reduce(unsigned, d.ReduceOp.MAX, group=ours)
    into = [torch.empty(k) for k in range(size)] if rank == 0 else None
    d.gather(torch.full((rank,), float(rank)), into, dst=0, group=ours)
    return [
        tensor.tolist(),
        [o.tolist() for o in outs],
        shard.tolist(),
        unsigned.tolist(),
        [o.tolist() for o in into or []],
    ]


def test_what_gloo_refuses_against_one_process():
    size = WORLD
    for rank, (average, gathered, shard, unsigned, into) in enumerate(ranks.run(size, beyond_gloo)):
        total = sum(range(size))
        assert average == [int(x / size) for x in (total, 5 * total, -7 * total)]
        assert gathered == [[k] * (k + 1) for k in range(size)]
        assert shard == [10 * rank * size + total] * (rank + 1)
        assert unsigned == [2**31 + size - 1] * 3
        assert into == ([[float(k)] * k for k in range(size)] if rank == 0 else [])


def rounding(context):
    """Sums of random floats: our result, gloo's, and the exact sum."""
    from torch import distributed as d

    gloo, ours = groups()
    everyone = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(context.world)]
    results = []
    for group in (gloo, ours):
        tensor = everyone[context.rank].clone()
        d.all_reduce(tensor, group=group)
        results.append(tensor)
    exact, size = sum(t.double() for t in everyone), sum(t.double().abs() for t in everyone)
    unit = torch.finfo(torch.float32).eps / 2
    bound = (context.world - 1) * unit / (1 - context.world * unit) * size  # of any order of P − 1 additions
    copies = [torch.empty(1000) for _ in range(context.world)]
    d.all_gather(copies, results[1])
    return [bool(((r.double() - exact).abs() <= bound).all()) for r in results], all(
        torch.equal(c, copies[0]) for c in copies
    )


def test_sums_of_floats_are_within_the_rounding_of_any_order_and_equal_on_all_ranks():
    assert ranks.run(WORLD, rounding) == [([True, True], True)] * WORLD


def train(context, backend):
    """DDP, fully_shard, a DTensor and functional collectives on one backend; the resulting numbers."""
    from torch import distributed as d
    from torch.distributed._functional_collectives import all_reduce, wait_tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    assert d.get_backend() == backend
    found = []
    for wrap in ("ddp", "fsdp"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
        mesh = init_device_mesh("cpu", (context.world,))
        if wrap == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(10 * step + context.rank)
            optimizer.zero_grad()
            model(torch.randn(4, 5, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        found += [p.detach().tolist() for p in whole]
    sharded = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])
    found.append((sharded @ sharded.t()).redistribute(placements=[Replicate()]).to_local().tolist())
    found.append(sharded.redistribute(placements=[Shard(1)]).to_local().tolist())
    found.append(wait_tensor(all_reduce(torch.ones(3) * context.rank, "sum", mesh)).tolist())
    return found


def test_ddp_fully_shard_dtensor_and_functional_collectives_train_as_on_gloo():
    silence = 60.0  # two ranks import most of torch, which may take longer than others of our tests are silent
    gloo, ours = (
        ranks.run(2, train, b, backend=b, silence=silence, group_timeout=silence) for b in ("gloo", "meshwright")
    )
    for a, b in zip(gloo, ours, strict=True):
        assert a == b  # two ranks: sums have one order


def mismatched(context, case):
    from torch import distributed as d

    _, ours = groups()
    try:
        if case == "all_reduce":
            d.all_reduce(torch.ones(100 + context.rank), group=ours)
        elif case == "recv":
            if context.rank == 0:
                d.send(torch.ones(5000), 1, group=ours)
                d.barrier(ours)
            else:
                d.recv(torch.empty(4000), 0, group=ours) if context.rank == 1 else d.barrier(ours)
        else:
            d.all_to_all_single(
                torch.empty(6), torch.ones(6), [2, 2, 2], [2, 3, 1] if context.rank == 0 else [2, 2, 2], group=ours
            )
            d.barrier(ours)  # a rank whose own data was right learns of it at the next call
    except MeshwrightError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("case", ["all_reduce", "recv", "all_to_all"])
def test_mismatched_sizes_raise_on_every_rank(case):
    for text in ranks.run(WORLD, mismatched, case):
        assert text.startswith("MW-COMM-00"), text
        assert "rank" in text


def out_of_memory(context):
    """Rank 1 fails while it reduces; then all ranks call again."""
    from torch import distributed as d

    import meshwright.comm.backend  # noqa: F401
    from meshwright.comm import run

    ours, texts = d.new_group(backend="meshwright"), []  # the group's timeout is longer than that of the test
    d.all_reduce(torch.ones(100), group=ours)
    if context.rank == 1:
        run.wait_for = lambda pending: torch.empty(2**60)
    for _ in range(2):
        try:
            d.all_reduce(torch.ones(100), group=ours)
        except MeshwrightError as error:
            texts.append(str(error))
    return texts


def test_a_failure_inside_a_collective_is_raised_at_once_on_every_rank():
    for texts in ranks.run(WORLD, out_of_memory):
        assert len(texts) == 2, texts
        for text in texts:
            assert text.startswith("MW-COMM-005: rank 1 failed in collective 2 of its group: RuntimeError: "), text


def rejected(context):
    """Rank 1 passes a wrong size; then all ranks call again, correctly, on a second group."""
    from datetime import timedelta

    from torch import distributed as d

    import meshwright.comm.backend  # noqa: F401

    ours, other = (d.new_group(backend="meshwright", timeout=timedelta(seconds=2)) for _ in range(2))
    found = []
    try:
        d.all_gather_into_tensor(torch.empty(3 if context.rank == 1 else 4 * context.world), torch.ones(4), group=ours)
    except MeshwrightError as error:
        found.append(str(error))
    for elements in (5, 4):
        try:
            d.all_gather_into_tensor(torch.empty(elements * context.world), torch.ones(4), group=other)
        except MeshwrightError as error:
            found.append(str(error))
    return found


def test_an_argument_that_one_rank_rejects_is_reported_by_its_peers_and_a_group_survives_what_all_reject():
    for rank, texts in enumerate(ranks.run(WORLD, rejected)):
        assert len(texts) == 2, texts
        assert texts[0].startswith("MW-COMM-001" if rank == 1 else "MW-COMM-004: rank"), texts
        assert rank == 1 or "rank 1 did not answer in time" in texts[0]
        assert rank == 1 or "it rejected a call: MW-COMM-001: all_gather" in texts[0]
        assert texts[1].startswith("MW-COMM-001")


def choices(context):
    """The log lines and programs of a group with two ranks a host."""
    import logging

    from meshwright.comm.transport import handshake

    handshake.network_namespace = lambda: context.rank % 2
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("meshwright.comm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    from torch import distributed as d

    _, ours = groups()
    for elements in (10, 10, 1_000_000):
        tensor = torch.ones(elements)
        d.all_reduce(tensor, group=ours)
        assert tensor[-1] == context.world
    return lines, ours.chooser.hosts, {k: v.algorithm for k, v in ours.chooser.choices.items()}


def test_the_cost_model_chooses_the_program_and_says_why():
    results = ranks.run(4, choices)
    lines, hosts, chosen = results[0]
    assert hosts == [(0, 2), (1, 3)]
    assert len(lines) == 2  # one line for each choice
    assert all("the smallest simulated time" in line and "2 hosts" in line for line in lines)
    assert all(result[2] == chosen for result in results)
    assert chosen["all-reduce", 2**22] not in (
        "ring",
        "tree",
    )  # placed round-robin, every hop of a ring leaves its host


class Kept(dict):
    """A store of one process."""

    def set(self, key, value):
        self[key] = value


def test_of_equally_fast_programs_the_one_with_small_messages_and_few_steps_is_chosen():
    """Placed round-robin, halving and doubling is as fast in the walk as two levels, and sends messages twice as large between hosts."""
    from meshwright.comm.backend.program_group import TIE, Chooser
    from meshwright.describe import catalog
    from meshwright.describe.cluster import Level
    from meshwright.programs.collectives.comparison import compare

    slow = catalog.load("links", "ethernet-10").but(bandwidth=25e6)
    cluster = catalog.load("clusters", "laptop")
    inside = cluster.levels[0].but(size=2, link=catalog.load("links", "shared-memory"))
    cluster = cluster.but(levels=(inside, Level(name="nodes", size=4, link=slow, ports=1)), gpus=8)
    round_robin = Chooser(Kept(), 0, [(0, 4), (1, 5), (2, 6), (3, 7)], cluster)
    names = ("halving-doubling", "two-level")
    times = compare("all-reduce", round_robin.cluster, 8, (2.0**26,), names, round_robin.placement).times
    assert times["two-level"][0] == pytest.approx(times["halving-doubling"][0], rel=TIE)
    assert round_robin.uncounted("all-reduce", "halving-doubling", 2**26)[0] == 2**24
    assert round_robin.uncounted("all-reduce", "two-level", 2**26)[0] == 2**23
    assert round_robin.choose("all-reduce", 2**26).algorithm == "two-level"
    assert Chooser(Kept(), 0, [(0, 1, 2, 3)], None).choose("all-reduce", 2**20).algorithm == "direct"


def test_a_reduction_that_torch_has_and_we_have_not():
    from torch import distributed as d

    from meshwright.comm.backend.group import reduction_of

    options = d.AllreduceOptions()
    options.reduceOp = d._make_nccl_premul_sum(2.0)
    with pytest.raises(MeshwrightError, match="MW-COMM-002"):
        reduction_of(options)


def test_a_store_that_has_ended_is_not_asked_again() -> None:
    """It ends with the process that serves it; torch prints a stack of C++ functions for each call after that."""

    class Ended:
        asked = 0

        def check(self, keys):
            self.asked += 1
            raise distributed.DistNetworkError("Broken pipe")

        set = check

    failure = GroupFailure(Ended(), 1)
    for _ in range(3):
        failure.check()
    own = MeshwrightError("MW-COMM-003", "sizes differ")
    assert failure.publish(own) is own
    assert failure.store.asked == 1
