"""The interpreter against numpy: every program of the registry, every dtype and reduction, odd sizes, several lanes."""

import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch

import ranks
from comm import in_threads
from meshwright.comm.call import Call
from meshwright.comm.run import execute, prepare
from meshwright.comm.schedule import schedule
from meshwright.comm.transport.base import combiner, divide
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives import ALGORITHMS, build
from meshwright.programs.collectives.arrays import chunks_of, run_on_arrays
from meshwright.programs.collectives.comparison import SWITCHED
from meshwright.programs.collectives.registry import accepts

PAIRS = [(op, name) for op, names in ALGORITHMS.items() for name in names if name not in SWITCHED]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


def inputs_of(program, dtype=torch.int64, seed=0):
    """One tensor per rank with the chunks it starts with, of small whole numbers: sums are exact in every dtype."""
    random = np.random.default_rng(seed)
    found = []
    for rank in range(program.ranks):
        size = sum(int(program.sizes[c]) for c in chunks_of(program, program.starts, rank))
        found.append(torch.from_numpy(random.integers(0, 5, size)).to(dtype))
    return found


def outputs_of(program, rank, dtype):
    size = sum(int(program.sizes[c]) for c in chunks_of(program, program.ends, rank))
    return torch.full((size,), 77).to(dtype)


def run_in_threads(program, inputs, lanes=1, in_place=False, reduction="sum"):
    def work(transport):
        plan = schedule(program, transport.rank, lanes)
        source = inputs[transport.rank].clone()
        result = source if in_place else outputs_of(program, transport.rank, source.dtype)
        call = Call(1, program.operation, program.algorithm, "int64", reduction, program.root, program.elements)
        execute(prepare(plan, transport, source.dtype, call), source, result, call)
        assert in_place or torch.equal(source, inputs[transport.rank])
        return result

    return in_threads.run(program.ranks, work)


def programs(operation, name, elements):
    for size in (1, 2, 3, 4, 6):
        for root in {0, size - 1} if "root" in accepts(operation, name) else (0,):
            options = {"root": root} if "root" in accepts(operation, name) else {}
            yield build(operation, name, size, elements, **options)


@pytest.mark.parametrize(("operation", "name"), PAIRS)
def test_every_program_computes_what_numpy_computes(operation, name):
    for elements, lanes in ((1, 1), (37, 3)):
        for program in programs(operation, name, elements):
            inputs = inputs_of(program)
            expected = run_on_arrays(program, [x.numpy() for x in inputs])
            results = run_in_threads(program, inputs, lanes)
            for rank, (a, b) in enumerate(zip(results, expected, strict=True)):
                assert a.tolist() == b.tolist(), (program, rank, lanes)


@pytest.mark.parametrize("name", [name for op, name in PAIRS if op == "all-reduce"])
def test_an_all_reduce_in_place(name):
    for size in (2, 3, 6):
        program = build("all-reduce", name, size, 23)
        inputs = inputs_of(program)
        for result in run_in_threads(program, inputs, lanes=2, in_place=True):
            assert torch.equal(result, sum(inputs))


@pytest.mark.parametrize("name", SWITCHED)
def test_a_switch_is_not_a_process(name):
    with pytest.raises(MeshwrightError, match=r"MW-COMM-001.*switch is not a process"):
        schedule(build("all-reduce", name, 4, 8), 0)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_reductions_of_every_dtype(dtype):
    a, b = (torch.tensor(x).to(dtype) for x in ([1, 2, 3, 0], [3, 1, 3, 1]))
    expected = {"product": [3, 2, 9, 0], "min": [1, 1, 3, 0], "max": [3, 2, 3, 1], "sum": [4, 3, 6, 1]}
    for reduction, values in expected.items():
        out = torch.empty_like(a)
        combiner(reduction, dtype)(a, b, out)
        assert out.tolist() == torch.tensor(values).to(dtype).tolist(), reduction
    if dtype in INTEGERS:
        for reduction, values in {"band": [1, 0, 3, 0], "bor": [3, 3, 3, 1], "bxor": [2, 3, 0, 1]}.items():
            out = torch.empty_like(a)
            combiner(reduction, dtype)(a, b, out)
            assert out.tolist() == values


def test_averages_of_integers_are_truncated():
    for dtype in INTEGERS:
        values = [7, 5, 0] if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64) else [7, -5, 0]
        tensor = torch.tensor(values).to(dtype)
        divide(tensor, 2)
        assert tensor.tolist() == [3, 2 if values[1] > 0 else -2, 0]


@pytest.mark.parametrize(
    ("reduction", "dtype"), [("bor", torch.float32), ("max", torch.complex64), ("most", torch.int32)]
)
def test_a_reduction_that_a_dtype_lacks(reduction, dtype):
    with pytest.raises(MeshwrightError, match="MW-COMM-002"):
        combiner(reduction, dtype)


def communicator_of(context, transport):
    """A communicator over gloo, over shared memory, or with two ranks a host, which is over gloo too."""
    from meshwright.comm.communicator import Communicator
    from meshwright.comm.transport import handshake
    from meshwright.comm.transport.point_to_point import PointToPoint
    from meshwright.comm.transport.shared_memory import SharedMemory

    handshake.SLOT, handshake.SLOTS = 4096, 5  # so that messages of a test need more than the slots of an area hold

    if transport == "two hosts":
        handshake.network_namespace = lambda: context.rank // 2
    made = Communicator.of_group(shared_memory=transport != "gloo")
    assert type(made.transport) is (SharedMemory if transport == "shared memory" else PointToPoint)
    return made


def every_program(context, size, transport):
    """Every program, and the dtypes and reductions of an all-reduce, between processes; what differs from numpy."""
    from meshwright.comm.communicator import with_sizes

    communicator = communicator_of(context, transport)
    wrong = []

    def compare(program, dtype, reduction, lanes):
        inputs = inputs_of(program, dtype)
        communicator.lanes = lambda program, width: lanes
        communicator.prepared.cache_clear()
        output = outputs_of(program, context.rank, dtype)
        communicator.run(program, inputs[context.rank], output, reduction=reduction)
        arrays = [x.double().numpy() for x in inputs]
        expected = run_on_arrays(program, arrays)[context.rank]
        if reduction == "max":
            expected = np.maximum.reduce(arrays)
        if reduction == "avg":
            expected = torch.from_numpy(expected).to(dtype)
            divide(expected, size)
            expected = expected.double().numpy()
        if output.double().tolist() != expected.tolist():
            wrong.append((repr(program), str(dtype), reduction, lanes))

    for operation, name in PAIRS:
        compare(build(operation, name, size, 1001), torch.float32, "sum", 1)
    for elements, lanes in ((0, 1), (3, 1), (50_000, 1), (50_001, 5)):
        compare(build("all-reduce", "ring", size, elements), torch.float64, "sum", lanes)
        compare(build("all-gather", "bruck", size, elements), torch.float64, "sum", lanes)
    for dtype in (*FLOATS, *INTEGERS):
        for reduction in ("sum", "avg", "max"):
            compare(build("all-reduce", "halving-doubling", size, 37), dtype, reduction, 1)
            compare(build("all-reduce", "ring", size, 20_001), dtype, reduction, 1)
    for name in ALGORITHMS["scatter"]:  # only the last rank receives: those between may have nothing to do
        scattered = with_sizes(build("scatter", name, size, 30_000 * size), [0] * (size - 1) + [30_000])
        compare(scattered, torch.float32, "sum", 1)
    for name in ("ring", "multi-ring", "hierarchical", "direct"):
        compare(build("all-reduce", name, size, 50_001), torch.float64, "sum", 2)
    return wrong


@pytest.mark.parametrize(
    ("size", "transport"),
    [(3, "gloo"), (4, "shared memory")],
)
def test_every_program_between_processes(size, transport):
    assert ranks.run(size, every_program, size, transport) == [[]] * size


def reused_memory(context, shared_memory):
    """Sums of tensors whose memory other tensors have had, of a tensor that needs gradients, and of one that overflows."""
    from meshwright.comm.communicator import Communicator

    communicator = Communicator.of_group(shared_memory=shared_memory)
    program = build("all-reduce", "ring", context.world, 5000)
    found = []
    for k in range(4):
        tensor, copy = torch.full((5000,), float(k)), torch.zeros(5000)
        communicator.run(program, tensor, copy)
        communicator.run(program, tensor)
        found.append((tensor.unique().tolist(), copy.unique().tolist()))
        del tensor, copy  # the next tensors get their memory
    learned = torch.ones(5000, requires_grad=True)
    communicator.run(program, learned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        huge = torch.full((5000,), 3e38)
        communicator.run(program, huge)
    return found, learned.unique().tolist(), bool(huge.isinf().all())


@pytest.mark.parametrize("shared_memory", [True, False])
def test_messages_of_tensors_that_follow_each_other_in_memory(shared_memory):
    sums = [([2.0 * k], [2.0 * k]) for k in range(4)]
    assert ranks.run(2, reused_memory, shared_memory) == [(sums, [2.0], True)] * 2


def asynchronous(context):
    from meshwright.comm.communicator import Communicator

    communicator = Communicator.of_group()
    tensors = [torch.full((1000,), float(context.rank + k)) for k in range(8)]
    program = build("all-reduce", "ring", context.world, 1000)
    works = [communicator.run(program, tensor, async_op=True) for tensor in tensors]
    halves = torch.arange(20.0).view(4, 5).t()[::2]  # not contiguous
    communicator.run(build("all-reduce", "ring", context.world, halves.numel()), halves)
    for work in reversed(works):
        assert work.wait()
    assert works[0].is_completed()
    assert works[0].get_future().wait()[0] is tensors[0]
    ordered = torch.full((200_000,), float(context.rank))
    large = build("all-reduce", "direct", context.world, ordered.numel())
    work = communicator.run(large, ordered, async_op=True)
    communicator.run(large, ordered, reduction="max")  # waits for its turn: in the other order the result is 6
    assert work.is_completed()
    assert bool((ordered == 3.0).all())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a sum that overflows is infinite, without a warning of numpy
        huge = torch.full((1000,), 3e38, requires_grad=True)
        communicator.run(program, huge)
    assert huge.isinf().all()
    return [tensor[0].item() for tensor in tensors], halves.tolist()


def test_asynchronous_calls_and_tensors_that_are_not_contiguous():
    halves = (torch.arange(20.0).view(4, 5).t()[::2] * 3).tolist()
    assert ranks.run(3, asynchronous) == [([3.0 * k + 3 for k in range(8)], halves)] * 3


def disagree(context, case, transport):
    communicator = communicator_of(context, transport)
    odd = context.rank == 1
    elements, dtype, operation = 100, torch.float32, "all-reduce"
    if case == "longer":
        elements = 100_000 if odd else 50_000
    elif case == "small and large":
        elements = 100_000 if odd else 100
    elif case == "dtype":
        dtype = torch.float64 if odd else torch.float32
    elif case == "operation":
        operation = "broadcast" if odd else "all-reduce"
    name = "ring" if operation == "all-reduce" else "chain"
    try:
        communicator.run(build(operation, name, context.world, elements), torch.ones(elements, dtype=dtype))
    except MeshwrightError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "transport"),
    [(case, "gloo") for case in ("longer", "small and large", "dtype", "operation")]
    + [("longer", "shared memory"), ("small and large", "shared memory"), ("operation", "two hosts")],
)
def test_ranks_that_disagree_all_raise_the_cause(case, transport):
    for rank, text in enumerate(ranks.run(4, disagree, case, transport)):
        assert text.startswith("MW-COMM-003: rank "), (rank, text)
        assert "step" in text


def one_ends(context, transport):
    import os

    communicator = communicator_of(context, transport)
    program = build("all-reduce", "ring", context.world, 100_000)
    communicator.run(program, torch.ones(100_000))
    if context.rank == 2:
        os._exit(9)
    try:
        communicator.run(program, torch.ones(100_000))
    except MeshwrightError as error:
        context.send(str(error))
        raise


@pytest.mark.parametrize("transport", ["gloo", "shared memory"])
def test_a_rank_that_ends_is_an_error_on_every_other_rank(transport):
    messages = {}
    with pytest.raises(MeshwrightError, match="rank 2 died"):
        ranks.run(4, one_ends, transport, listen=messages.__setitem__)
    assert sorted(messages) == [0, 1, 3]
    for text in messages.values():
        assert text.startswith("MW-COMM-004: rank ")
        assert "rank 2 " in text


def without_memory(context, refused):
    """Anonymous memory, or that of its peers, is refused to rank 1: all messages use gloo, and the result is the same."""
    import logging
    import os

    from meshwright.comm.communicator import Communicator

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("meshwright.comm").addHandler(handler)
    if context.rank == 1:

        def refuse(*_):
            raise OSError(28, "No space left on device")

        setattr(os, refused, refuse)
    communicator = Communicator.of_group(timeout=timedelta(seconds=15))
    tensor = torch.ones(5)
    communicator.run(build("all-reduce", "ring", context.world, 5), tensor)
    return tensor.tolist(), messages


@pytest.mark.parametrize("refused", ["memfd_create", "pidfd_open"])
def test_without_memory_a_rank_falls_back_to_gloo_and_says_so(refused):
    results = ranks.run(3, without_memory, refused)
    assert all(values == [3.0] * 5 for values, _ in results)
    assert any("No space left on device" in line and "gloo" in line for line in results[1][1])


def slow(context):
    import time

    from meshwright.comm.communicator import Communicator

    communicator = Communicator.of_group(timeout=timedelta(seconds=2))
    if context.rank == 1:
        time.sleep(6)
        return "late"
    try:
        communicator.run(build("all-reduce", "ring", context.world, 5), torch.ones(5))
    except MeshwrightError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_does_not_answer_is_named_within_the_timeout():
    results = ranks.run(3, slow)
    for rank in (0, 2):
        assert results[rank].startswith("MW-COMM-004: rank ")
        assert "rank 1 did not answer in time" in results[rank]


def many(context, iterations, largest):
    """All-reduces of random sizes and programs, over gloo and shared memory, one after the other; what is wrong."""
    from meshwright.comm.communicator import Communicator

    kinds = [Communicator.of_group(shared_memory=False), Communicator.of_group()]
    random = np.random.default_rng(context.world)
    names = ("ring", "direct", "halving-doubling", "two-level")
    wrong = []
    for number in range(iterations):
        elements = int(2 ** random.uniform(8, np.log2(largest / 4)))
        program = build("all-reduce", names[random.integers(len(names))], context.world, elements)
        kind = int(random.integers(len(kinds)))
        tensor = torch.full((elements,), number + context.rank, dtype=torch.int32)
        kinds[kind].run(program, tensor, async_op=bool(number % 3)).wait()
        expected = context.world * number + sum(range(context.world))
        if not bool((tensor == expected).all()):
            wrong.append((number, repr(program), kind))
        if number % 20 == 0:
            context.send(number)
    return wrong


@pytest.mark.parametrize(
    ("size", "iterations", "largest"),
    [(3, 40, 2**18), *ranks.soak([(2, 400, 2**24), (3, 300, 2**24), (4, 300, 2**24)])],
)
def test_many_collectives_of_random_sizes(size, iterations, largest):
    assert ranks.run(size, many, iterations, largest, listen=lambda rank, message: None) == [[]] * size
