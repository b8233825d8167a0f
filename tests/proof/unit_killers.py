"""Tests of single parts as killers: what a plan of the proof never asks for (kernels, tiles, 16 bits, modules of users' own,
messages that leave early) is held by tests of `tests/parallel`. A mutant they fail on is killed.

Tests that start no ranks (`ALONE`) run in a copy of this process, which has all imported and in which the mutant is put: tenths
of a second. For others it is put in their way as a file: a package of links to the true sources, with one module changed.
Nothing in it knows that it is a mutant, and neither do the ranks that a test starts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import changes

os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 150.0
ATTENTION = ("test_context.py", "every_kind or kernel_that or no_scores or rectangles or zigzag")
SUMS = [
    ("test_definitions.py", ""),
    ("test_compress.py", "kept or owners or definition or survive or powersgd_keeps or powersgd_comes"),
]
FUSED = ("test_cuts.py", "fused_projections")
# module → (file of tests/parallel, which of its tests: pytest's -k)
UNITS: dict[str, list[tuple[str, str]]] = {
    "tensor": [FUSED, ("test_plain.py", "summed or told"), ("test_tensor_hf.py", "computes or follows"),
               ("test_tensor.py", "patterns or boundaries or input or padding"),
               ("test_told.py", "share")],
    "vocabulary": [("test_tensor.py", "vocabulary")],
    "exchange": [("test_tensor.py", "exchange or sequence_that")],
    "regather": [("test_tensor.py", "gathering_again"), ("test_offload.py", "sequence_parallel")],
    "keep": [("test_offload.py", "sequence_parallel or activations")],
    "zero": [("test_zero.py", "bucket or one_rank or asked"), ("test_options.py", "order or static or summed"),
             ("test_compress.py", "frozen"), ("test_precision.py", "two_ranks_in_16"), ("test_told.py", "kept_back")],
    "recompute": [("test_recompute.py", "gradients or saved_bytes_fall or nth or dropout or share_of or names or otherwise or statistics")],
    "apply": [("test_told.py", "load"), ("test_precision.py", "two_ranks_in_16 or fp8_on_two")],
    "expert": [("test_expert.py", "uneven or shared"), ("test_told.py", "share or load")],
    "order": [("test_told.py", "order")],
    "blocks": [ATTENTION],
    "context": [ATTENTION, ("test_context.py", "refused")],
    "ring": [ATTENTION, ("test_context.py", "refused")],
    "ulysses": [ATTENTION],
    "mesh": [("test_mesh.py", "groups")],
    "pieces": [("test_zero.py", "pieces or share")],
    "plain": [("test_plain.py", "summed or told")],
    "pipeline": [("test_pipeline.py", "action_by_action or ones_own")],
    "scatter": [("test_compress.py", "over_ranks")],
    "precision": [("test_precision.py", "not fp8"), ("test_offload.py", "states")],
    "localsgd": [("test_localsgd.py", "between or averaging or ones_own")],
    "offload": [("test_offload.py", "sequence_parallel")],
    "gathering": [("test_options.py", "units or limit or dtypes"), ("test_precision.py", "two_ranks_in_16 and bf16")],
    "tables": [("test_tensor_hf.py", "computes")],
    "cuts": [FUSED],
}  # fmt: skip

# Likewise, of tests without ranks.
ALONE: dict[str, list[tuple[str, str]]] = {
    "compress": SUMS,
    "sparse": SUMS,
    "powersgd": SUMS,
    "emulation": SUMS,
    "precision": [("test_masters.py", "")],
    "localsgd": [("test_masters.py", "average")],
    "plain": [("test_plain.py", "product or lie")],
    "fp8": [("test_precision.py", "fp8_products or fp8_rounds")],
    "offload": [("test_offload.py", "activations or recomputed or in_place or smaller or views")],
    "gathering": [("test_gathering.py", "")],
    "apart": [("test_apart.py", "")],
    "cuts": [("test_cuts.py", "not fused_projections")],
    "fp8_grouped": [("test_precision.py", "fp8_of_experts")],
    "supported": [("test_supported.py", "")],
    "scatter": [("test_definitions.py", "rows or unit or beside")],
    "tables": [("test_supported.py", "table")],
}


def failing_alone(prepare: str, module: str) -> str:
    """The first of the module's tests without ranks that fails with the mutant in place."""
    for file, which in ALONE.get(module, []):
        if fails_alone(prepare, file, which) and passes_alone(file, which):
            return f"{file} -k '{which}'"
    return ""


@cache
def passes_alone(file: str, which: str) -> bool:
    return not fails_alone("", file, which)


@cache
def imported(file: str) -> bool:
    """All that a file of tests needs, pytest's own parts among it: once, here, not in every copy. False where it is not there."""
    sys.path[:0] = [str(ROOT / "tests" / "parallel")]
    try:
        import pytest

        importlib.import_module(file.removesuffix(".py"))
    except ImportError as error:
        print(f"left out: {file}, {error}", file=sys.stderr, flush=True)
        return False
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main(["--version"])
    gc.freeze()  # no copy looks through what is here
    return True


def fails_alone(prepare: str, file: str, which: str) -> bool:
    if not imported(file):
        return False
    import pytest

    pid = os.fork()
    if pid:
        return not ended_well(pid)
    code = 1
    with contextlib.suppress(BaseException), tempfile.TemporaryDirectory() as folder:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if prepare:
            getattr(changes, prepare.partition(":")[2])()
        code = int(
            pytest.main(["-x", "-q", *plain(Path(folder)), str(ROOT / "tests" / "parallel" / file), "-k", which])
        )
    os._exit(code)


def ended_well(pid: int) -> bool:
    ends = time.monotonic() + TIMEOUT_S / 3
    while time.monotonic() < ends:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def failing(prepare: str, module: str) -> str:
    """The first of the module's tests that fails with the mutant in place; nothing where none does."""
    with tempfile.TemporaryDirectory(prefix="meshwright-mutant-") as folder:
        units = units_of(module)
        if units:
            link(Path(folder), prepare)
        for file, which in units:
            if fails(Path(folder), file, which) and passes(file, which):
                return f"{file} -k '{which}'"
    return ""


def units_of(module: str) -> list[tuple[str, str]]:
    """Of a module that is not in the tables, the file of its name."""
    named = f"test_{module}.py"
    found = [(named, "")] if module not in ALONE and (ROOT / "tests" / "parallel" / named).exists() else []
    return UNITS.get(module, found)


@cache
def passes(file: str, which: str) -> bool:
    """Whether these tests pass where nothing is changed: what fails for want of a library, or of time, kills nothing."""
    with tempfile.TemporaryDirectory(prefix="meshwright-control-") as folder:
        link(Path(folder), "")
        sound = not fails(Path(folder), file, which)
    if not sound:
        print(f"left out, since it fails without a mutant: {file} -k '{which}'", file=sys.stderr, flush=True)
    return sound


def fails(folder: Path, file: str, which: str) -> bool:
    asked = [sys.executable, "-m", "pytest", "-x", "-q", *plain(folder), f"tests/parallel/{file}", "-k", which]
    paths = [folder, ROOT / "tests", ROOT / "tests" / "parallel", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def plain(folder: Path) -> list[str]:
    """Plain pytest: neither the suite's settings nor their plugins, which may not be installed."""
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\n", "utf-8")
    without = [word for plugin in ("cacheprovider", "unraisableexception") for word in ("-p", f"no:{plugin}")]
    return ["-c", str(settings), "--rootdir", str(ROOT), "--noconftest", *without]


def link(folder: Path, prepare: str) -> None:
    """A package `meshwright` whose files are links, but for the one that is changed."""
    source = ROOT / "src" / "meshwright"
    package = folder / "meshwright"
    (package / "parallel").mkdir(parents=True)
    for path in [*source.iterdir(), *(source / "parallel").iterdir()]:
        place = package / path.relative_to(source)
        if path.name not in ("__pycache__", "parallel"):
            place.symlink_to(path)
    if prepare:
        module, _, number = prepare.partition(":")[2].rpartition("_")
        changed = package / "parallel" / f"{module}.py"
        changed.unlink()
        changed.write_text(changes.text(module, int(number)), "utf-8")
