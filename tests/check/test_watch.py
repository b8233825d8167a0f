"""`meshwright check watch`: what must hold between ranks, in healthy runs and in broken ones."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import ranks
import watched_training
from meshwright.check.exchange import BEHIND, NoteExchange
from meshwright.check.fingerprint import bits_hash
from meshwright.check.invariants import Judge
from meshwright.check.live import LiveWatch
from meshwright.errors import MeshwrightError

SCRIPT = watched_training.__file__


def watched(context: Any, out: Path, cases: list[tuple[str, str]]) -> list[list[float]]:
    """The losses of several trainings, one after the other."""
    losses = []
    for layout, bug in cases:
        live = LiveWatch(str(out / f"{layout} {bug}"), every=1)
        live.attach()
        losses.append(watched_training.train(layout, bug, context.rank, distributed.get_world_size()))
        live.close()
        distributed.barrier()
    return losses


def unwatched(context: Any, layout: str) -> list[float]:
    return watched_training.train(layout, "", context.rank, distributed.get_world_size())


def report(out: Path, layout: str, bug: str = "") -> dict[str, Any]:
    about: dict[str, Any] = json.loads((out / f"{layout} {bug}" / "watch.json").read_text())
    return about


# By bug: the layout, and the codes of what does not hold.
BROKEN = {
    "broadcast": ("ddp", {"MW-WATCH-001"}),
    "rate": ("ddp", {"MW-WATCH-001"}),
    "norm": ("fsdp1", {"MW-WATCH-002"}),  # each rank clips by the norm of its shards
    "seed": ("ddp", {"MW-WATCH-003"}),
    "tensor seed": ("tp", {"MW-WATCH-001", "MW-WATCH-004"}),
    "samples": ("ddp", {"MW-WATCH-005"}),
    "tensor samples": ("tp", {"MW-WATCH-001", "MW-WATCH-006"}),
    "skip": ("local", {"MW-WATCH-001", "MW-WATCH-002", "MW-WATCH-007"}),
    "states": ("ddp", {"MW-WATCH-001", "MW-WATCH-008"}),
    "late": ("local", {"MW-WATCH-001", "MW-WATCH-002", "MW-WATCH-008"}),
    "forgotten": ("ddp", {"MW-WATCH-009"}),
    "detached": ("ddp", {"MW-WATCH-009", "MW-WATCH-010"}),
    "zero": ("fsdp2", {"MW-WATCH-010"}),
}
ALL = {f"MW-WATCH-{number:03d}" for number in range(1, 11)}
LATER = ("broadcast", "rate", "states", "zero")  # whose codes the others show every day
DAILY = [bug for bug in BROKEN if bug not in LATER]


HEALTHY = ("ddp", "tp", "fsdp2", "fsdp1")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reports of the daily trainings on two ranks."""
    folder = tmp_path_factory.mktemp("watched")
    cases = [(layout, "") for layout in HEALTHY] + [(BROKEN[bug][0], bug) for bug in DAILY]
    losses = ranks.run(2, watched, folder, cases, backend="gloo")
    (folder / "losses.json").write_text(json.dumps([rank[0] for rank in losses]))
    return folder


def held(about: dict[str, Any], world: int) -> None:
    assert not about["violations"]
    assert about["ranks"] == world
    assert about["checks"] == watched_training.STEPS - 1


@pytest.mark.parametrize("layout", HEALTHY)
def test_a_healthy_run_breaks_nothing(out: Path, layout: str) -> None:
    held(report(out, layout), 2)


@pytest.mark.slow
def test_a_healthy_run_on_two_axes_breaks_nothing(tmp_path: Path) -> None:
    ranks.run(4, watched, tmp_path, [("fsdp2-tp", "")], backend="gloo")
    about = report(tmp_path, "fsdp2-tp")
    held(about, 4)
    assert {"dropout on tensor-parallel ranks", "samples of data-parallel ranks"} <= set(about["held"])


def is_named(out: Path, bug: str) -> None:
    layout, codes = BROKEN[bug]
    about = report(out, layout, bug)
    assert {violation["code"] for violation in about["violations"]} == codes, about["violations"]


@pytest.mark.parametrize("bug", DAILY)
def test_a_broken_invariant_is_named(out: Path, bug: str) -> None:
    is_named(out, bug)


@pytest.mark.slow
def test_further_broken_invariants_are_named(tmp_path: Path) -> None:
    ranks.run(2, watched, tmp_path, [(BROKEN[bug][0], bug) for bug in LATER], backend="gloo")
    for bug in LATER:
        is_named(tmp_path, bug)


def test_every_invariant_has_a_broken_run() -> None:
    assert set().union(*(BROKEN[bug][1] for bug in DAILY)) == ALL


def test_the_training_is_the_same_to_the_last_bit(out: Path) -> None:
    """Also with dropout: no random number is drawn in the watch."""
    losses = ranks.run(2, unwatched, "ddp", backend="gloo")
    assert json.loads((out / "losses.json").read_text()) == losses


def test_names_and_ranks_are_reported(out: Path) -> None:
    (violation,) = report(out, "ddp", "forgotten")["violations"]
    assert violation["what"] == "a parameter never changes: head.bias"
    assert violation["ranks"] == [0, 1]
    assert violation["step"] == 3  # the third check


def train_with(*words: str) -> subprocess.CompletedProcess[str]:
    many = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    command = [sys.executable, "-m", "meshwright", "check", "watch", *words[:-2], "--", *many, *words[-2:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "code"), [(True, 1), (False, 0)])
def test_a_script_is_watched_without_a_change(tmp_path: Path, stop: bool, code: int) -> None:
    done = train_with("--every", "2", "--out", str(tmp_path), *(["--stop"] if stop else []), "ddp", "samples")
    assert done.returncode == code, done.stderr
    assert done.stderr.count("MW-WATCH-005: step 1: data-parallel ranks read the same samples: ranks 0, 1.") == 1
    assert "Usual causes: a sampler" in done.stderr
    assert ("trained" in done.stdout) is not stop


def test_a_code_that_does_not_exist_is_an_error() -> None:
    assert "MW-WATCH-005" not in {invariant.code for invariant in Judge(["MW-WATCH-005"]).invariants}
    with pytest.raises(MeshwrightError, match=r"'MW-WATCH-05'.*Valid: MW-WATCH-001, "):
        Judge(["MW-WATCH-05"])


def test_a_script_without_training_is_an_error(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "check",
        "watch",
        "--out",
        str(tmp_path),
        "--",
        sys.executable,
        "-c",
        "0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "MW-WATCH-011" in done.stderr


# Without ranks


def test_a_failure_of_the_watch_leaves_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 4)
    live = LiveWatch(str(tmp_path / "file" / "below"), every=1)
    (tmp_path / "file").write_text("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live.attach(model, optimizer)
    for _ in range(4):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert "the watch ends, the training goes on" in capsys.readouterr().err
    assert not model._forward_pre_hooks
    assert not live.active


def test_the_norm_is_the_one_that_gradients_are_clipped_with(tmp_path: Path) -> None:
    """`get_total_norm` may still be summed over ranks."""
    live, weight = LiveWatch(str(tmp_path)), nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    live.attach()
    live.note = {}
    total = nn.utils.get_total_norm([weight.grad])
    assert live.norm is None
    nn.utils.clip_grads_with_norm_([weight], 1.0, 2 * total)
    assert live.norm == 2 * total
    live.norm = None
    nn.utils.clip_grad_norm_([weight], 1.0)
    assert live.norm is not None
    live.detach()
    assert nn.utils.clip_grad_norm_ is nn.utils.clip_grad.clip_grad_norm_


def test_rank_0_waits_for_nobody() -> None:
    exchange = NoteExchange()
    exchange.ranks, exchange.patience = [0, 1], 0.0
    seen: list[tuple[list[dict[str, Any]], list[int]]] = []
    began = time.monotonic()
    for step in range(BEHIND + 2):
        exchange.send({"step": step, "rank": 0})
        if step == 0:
            exchange.store.set("0/1", json.dumps({"step": 0, "rank": 1}))
        exchange.look(lambda notes, late: seen.append((notes, late)))
    assert [late for _, late in seen] == [[], [1], [], [], []]  # from then on without it
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [1, 7, 9000, 70001])
def test_one_changed_bit_changes_the_hash(dtype: torch.dtype, size: int) -> None:
    tensor = (torch.arange(size + 1) % 100).to(dtype)[1:]  # its storage begins between two 64-bit integers
    value = bits_hash(tensor)
    assert value == bits_hash(tensor.clone())
    for at in (0, size // 2, size - 1):
        other = tensor.clone()
        other.view(torch.uint8)[at * tensor.element_size()] ^= 1
        assert bits_hash(other) != value
    if size > 1:
        assert bits_hash(tensor.flip(0)) != value
