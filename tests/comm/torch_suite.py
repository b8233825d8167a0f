"""Run PyTorch's own process-group tests (`torch.testing._internal.distributed.distributed_test`) on the backend meshwright.

    python tests/comm/torch_suite.py [NAME …]      # default: all tests; prints which pass, fail, and cannot run, with the reason

The tests are those of PyTorch's gloo: its module decides at import which tests a backend can run, so it is imported as for
gloo, and then gets the name of our backend. All tests run in one set of ranks, each in a new group. If a test ends
or hangs a rank, the remaining tests run in a new set.
"""

import importlib.util
import os
import re
import sys
import tempfile
import types
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

WORLD = 3  # as in PyTorch's CI
LIMIT_S = 60.0
ONLY_GLOO = "torch.distributed.monitored_barrier refuses every backend but gloo"
NO_GPU = "needs GPUs; PyTorch skips it only on NCCL"
CANNOT_PASS = {  # test → why
    "test_monitored_barrier_gloo": ONLY_GLOO,
    "test_monitored_barrier_gloo_subgroup": ONLY_GLOO,
    "test_monitored_barrier_gloo_rank_0_timeout": ONLY_GLOO,
    "test_monitored_barrier_failure_order": ONLY_GLOO,
    "test_monitored_barrier_wait_all_ranks": ONLY_GLOO,
    "test_sparse_all_reduce_sum": "sparse tensors are not supported",
    "test_all_to_all_cuda": NO_GPU,
    "test_all_to_all_cuda_complex": NO_GPU,
    "test_all_to_all_full_group_cuda": NO_GPU,
    "test_all_to_all_group_cuda": NO_GPU,
    "test_barrier_group_cuda": NO_GPU,
    "test_barrier_full_group_cuda": NO_GPU,
    "test_new_subgroups_with_group_param": "needs four ranks",
    "test_batch_isend_irecv_op_err": NO_GPU,
    "test_batch_isend_irecv_mixed_backend_err": NO_GPU,
    "test_SyncBatchNorm_process_group": "needs torchvision",
}


def load(backend: str) -> Any:
    """Import PyTorch's tests for a backend."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD))
    if importlib.util.find_spec("expecttest") is None:  # PyTorch's test base needs it; these tests do not
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal import common_distributed

    for feature in ("ddp", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add(backend)
    from torch.testing._internal.distributed import distributed_test

    distributed_test.BACKEND = backend
    os.environ["BACKEND"] = "mpi"  # tests of groups of two ranks ask for eight, except of MPI
    return distributed_test


def names() -> list[str]:
    """All tests, in the order of the file; read in another process, because PyTorch's module changes settings of torch and the
    environment when it is imported."""
    from meshwright.training.launch import local

    return local.run(f"{read_names.__module__}:read_names", 1)[0]


def read_names(context: Any) -> list[str]:
    base = load("gloo").DistributedTest._DistTestBase
    return [name for name in vars(base) if name.startswith("test_")]


def work(context: Any, tests: list[str], folder: str, backend: str) -> None:
    """Run tests one after the other and send (test, state, text) for each: passed, failed or skipped."""
    from torch import distributed

    import meshwright.comm.backend  # noqa: F401

    suite = load(backend)
    from torch.testing._internal.common_distributed import TEST_SKIPS

    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    case_type = type("Case", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})
    distributed.destroy_process_group()
    for test in tests:
        place = Path(folder) / test
        for part in ("barrier", "test_dir", "init_dir"):
            (place / part).mkdir(parents=True, exist_ok=True)
        os.environ["TEMP_DIR"] = str(place)
        os.environ["INIT_METHOD"] = suite.INIT_METHOD = f"file://{place}/init_dir/shared"
        suite.Barrier.barrier_id = 0
        # These tests have code for the backends that they know by name, and none for others.
        suite.BACKEND = "gloo" if test.startswith("test_accumulate_gradients") else backend
        context.send((test, "running", ""))
        context.send((test, *run_one(suite, case_type, test, context, place, backend, reasons)))


def run_one(
    suite: Any, case_type: Any, test: str, context: Any, place: Path, backend: str, reasons: dict[int, str]
) -> tuple[str, str]:
    """Run one test in a new group; return its state and the reason or the traceback."""
    import traceback

    from torch import distributed
    from torch.testing._internal.common_utils import set_rng_seed

    state, text = "passed", ""
    limit = timedelta(seconds=suite.CUSTOM_PG_TIMEOUT.get(test, 20))
    distributed.init_process_group(
        backend, init_method=f"file://{place}/store", world_size=WORLD, rank=context.rank, timeout=limit
    )
    try:
        case = case_type(test)
        case.rank, case.file_name = context.rank, f"{place}/file"
        set_rng_seed()
        case._barrier()
        getattr(case, test)()
        case._barrier()
    except unittest.SkipTest as skip:
        state, text = "skipped", str(skip)
    except SystemExit as left:
        state, text = ("skipped", reasons[left.code]) if left.code in reasons else ("failed", f"exit {left.code}")
    except BaseException:
        state, text = "failed", traceback.format_exc()
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    return state, text


def run(tests: list[str], backend: str = "meshwright", show: bool = False) -> dict[str, tuple[str, str]]:
    """Run tests and return their states: failed if it failed on any rank."""
    from meshwright.errors import MeshwrightError
    from meshwright.training.launch import local

    found: dict[str, dict[int, tuple[str, str]]] = {}
    left = list(tests)
    while left:
        current: list[str] = []

        def listen(rank: int, message: Any, current: list[str] = current) -> None:
            test, state, text = message
            if state == "running":
                current.append(test)
                return
            found.setdefault(test, {})[rank] = (state, text)
            if show and len(found[test]) == WORLD:
                print(f"{worst(found[test])[0]:8} {test}", flush=True)

        with tempfile.TemporaryDirectory() as folder:
            try:
                local.run(
                    f"{work.__module__}:work",
                    WORLD,
                    left,
                    folder,
                    backend,
                    listen=listen,
                    silence=LIMIT_S,
                    group_timeout=30.0,
                )
                break
            except MeshwrightError as error:
                last = current[-1] if current else left[0]
                found[last] = {0: ("failed", str(error))}
                if show:
                    print(f"failed   {last} (a rank ended or hung)", flush=True)
                left = left[left.index(last) + 1 :]
    return {test: worst(found[test]) for test in tests if test in found}


def worst(states: dict[int, tuple[str, str]]) -> tuple[str, str]:
    return min(states.values(), key=lambda state: ("failed", "passed", "skipped").index(state[0]))


def cause(text: str) -> str:
    """The line of a traceback that names the error."""
    lines = text.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Failure)\b", line)]
    return (named or lines)[-1]


def main() -> None:
    results = run(sys.argv[1:] or names(), os.environ.get("SUITE_BACKEND", "meshwright"), show=True)
    for state in ("passed", "skipped", "failed"):
        chosen = {test: text for test, (found, text) in results.items() if found == state}
        print(f"\n{state}: {len(chosen)}")
        for test, text in chosen.items():
            print(f"  {test}: {cause(text)[:220]}" if text.strip() else f"  {test}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from comm import torch_suite

    torch_suite.main()
