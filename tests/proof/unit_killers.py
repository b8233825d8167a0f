"""Tests of single parts as killers: what a plan of the proof never asks for (kernels, tiles, 16 bits, modules of users' own,
messages that leave early) is held by tests of `tests/parallel`. A mutant they fail on is killed.

The mutant is put in their way as a file: a package of links to the true sources, with one module changed. Nothing in it knows
that it is a mutant, and neither do the ranks that a test starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import changes

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 150.0
ATTENTION = ("test_context.py", "every_kind or kernel_that or no_scores or rectangles or zigzag")
SUMS = "over_ranks or kept or owners or definition or survive or powersgd"
# module → (file of tests/parallel, which of its tests: pytest's -k)
UNITS: dict[str, list[tuple[str, str]]] = {
    "tensor": [("test_tensor_hf.py", "computes or follows"), ("test_tensor.py", "patterns or boundaries or input or padding"),
               ("test_told.py", "share")],
    "vocabulary": [("test_tensor.py", "vocabulary")],
    "exchange": [("test_tensor.py", "exchange")],
    "regather": [("test_tensor.py", "gathering_again"), ("test_offload.py", "sequence_parallel")],
    "keep": [("test_offload.py", "sequence_parallel or activations")],
    "zero": [("test_zero.py", "bucket or one_rank or asked"), ("test_options.py", "order or static or summed"),
             ("test_compress.py", "frozen"), ("test_precision.py", "two_ranks_in_16")],
    "recompute": [("test_recompute.py", "gradients or saved_bytes_fall or nth or dropout")],
    "apply": [("test_told.py", "load"), ("test_precision.py", "two_ranks_in_16 or fp8_on_two")],
    "expert": [("test_expert.py", "uneven or shared"), ("test_told.py", "share or load")],
    "order": [("test_told.py", "order")],
    "blocks": [ATTENTION],
    "context": [ATTENTION],
    "ring": [ATTENTION],
    "ulysses": [ATTENTION],
    "mesh": [("test_mesh.py", "groups")],
    "pieces": [("test_zero.py", "pieces or share")],
    "pipeline": [("test_pipeline.py", "action_by_action")],
    "compress": [("test_compress.py", SUMS)],
    "sparse": [("test_compress.py", SUMS)],
    "powersgd": [("test_compress.py", SUMS)],
    "scatter": [("test_compress.py", SUMS)],
    "emulation": [("test_compress.py", SUMS)],
    "precision": [("test_precision.py", "not fp8"), ("test_offload.py", "states")],
    "fp8": [("test_precision.py", "fp8 and not divided")],
    "localsgd": [("test_localsgd.py", "between or averaging")],
    "offload": [("test_offload.py", "activations or recomputed or in_place or smaller or sequence_parallel")],
    "gathering": [("test_options.py", "units or limit or dtypes")],
    "tables": [("test_tensor_hf.py", "computes")],
    "supported": [("test_supported.py", "refused or accepted or mlp")],
}  # fmt: skip

# Where layouts see little of a module they come after its tests.
TESTS_FIRST = ("offload", "gathering", "precision", "supported")


def failing(prepare: str, module: str) -> str:
    """The first of the module's tests that fails with the mutant in place; nothing where none does."""
    with tempfile.TemporaryDirectory(prefix="meshwright-mutant-") as folder:
        if UNITS.get(module):
            link(Path(folder), prepare)
        for file, which in UNITS.get(module, []):
            if fails(Path(folder), file, which) and passes(file, which):
                return f"{file} -k '{which}'"
    return ""


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
    """Plain pytest: neither the suite's settings nor their plugins, which may not be installed."""
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\n", "utf-8")
    plain = ["-c", str(settings), "--rootdir", str(ROOT), "--noconftest", "-p", "no:cacheprovider"]
    asked = [sys.executable, "-m", "pytest", "-x", "-q", *plain, f"tests/parallel/{file}", "-k", which]
    paths = [folder, ROOT / "tests", ROOT / "tests" / "parallel"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


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
