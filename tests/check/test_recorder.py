"""What the recorder meets in training scripts: closures, clipping in the middle of a step, workers of data loaders, a full disk."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.check import writer
from meshwright.check.compare import compare
from meshwright.check.comparison_view import data
from meshwright.check.folder import Recording
from meshwright.check.recorder import StepRecorder
from meshwright.errors import MeshwrightError


@contextmanager
def recording(out: Path, steps: int = 2) -> Iterator[StepRecorder]:
    recorder = StepRecorder(str(out), steps)
    recorder.attach()
    try:
        yield recorder
    finally:
        recorder.close()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


BATCHES = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(out: Path, micro_batches: int = 1, clip: str = "", closure: bool = False) -> Recording:
    """Two steps; `clip`: after the last micro-batch, or after each."""
    with recording(out):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for batch in BATCHES:
            optimizer.zero_grad()

            def backward(batch: torch.Tensor = batch) -> torch.Tensor:
                parts = batch.chunk(micro_batches)
                for i, part in enumerate(parts):
                    loss = (model(part) ** 2).mean() / micro_batches
                    loss.backward()
                    if clip == "each" or (clip and i == len(parts) - 1):
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return loss

            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
    return Recording.read(out)


def test_a_closure_is_recorded_as_the_loop_that_it_replaces(tmp_path: Path) -> None:
    comparison = compare(train(tmp_path / "loop"), train(tmp_path / "closure", closure=True))
    assert comparison.verdict == "equal within rounding", comparison.differences
    assert comparison.compared["gradient"] == comparison.compared["parameter"] == 8


def test_the_gradient_of_a_step_is_that_after_its_last_micro_batch(tmp_path: Path) -> None:
    """A norm that is taken after each, for a log, changes nothing; clipping each does."""
    one = train(tmp_path / "one", clip="last")
    assert compare(one, train(tmp_path / "last", 2, "last")).verdict == "equal within rounding"
    found = compare(one, train(tmp_path / "each", 2, "each")).diagnosis
    assert found is not None
    assert (found.phase, found.pattern.detail) == ("clipping", "clipped 1 time before the last micro-batch")


class ByName(nn.Module):
    """Takes its input by name, as the models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, *, samples: torch.Tensor) -> torch.Tensor:
        return self.inner(samples)


def train_by_name(out: Path, *batch: torch.Tensor) -> Recording:
    with recording(out, 1):
        model = ByName()
        for part in batch:
            (model(samples=part) ** 2).mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return Recording.read(out)


def test_inputs_that_are_given_by_name_are_recorded(tmp_path: Path) -> None:
    whole = BATCHES.flatten(0, 1)
    one, twice = train_by_name(tmp_path / "one", whole), train_by_name(tmp_path / "twice", whole[:4], whole[:4])
    comparison = compare(one, twice)
    found, mark = comparison.diagnosis, data(one, twice, comparison)["first"]
    assert found is not None
    assert (mark["module"], mark["lane"]) == (-1, 0)  # before the first module
    assert (found.phase, found.tensor, found.pattern.detail) == (
        "forward",
        "inputs",
        "4 of 8 samples are read by no rank",
    )
    with pytest.raises(MeshwrightError, match="different samples"):
        compare(one, train_by_name(tmp_path / "other", whole + 1))


def test_recording_takes_a_part_of_the_step(tmp_path: Path) -> None:
    """The learning of the model, and the writing of the files, are parts of the steps that they belong to."""
    many = train(tmp_path / "one")
    for (step,) in map(many.step, range(2)):
        assert 0 < step.recording_seconds <= step.seconds


class ModelInside(torch.utils.data.Dataset):
    """Computes with a network in the workers of a data loader, and tells how much was recorded there."""

    def __init__(self, model: nn.Module, recorder: StepRecorder) -> None:
        self.model, self.recorder = model, recorder

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        self.model(BATCHES[number])
        return BATCHES[number], len(self.recorder.writer.entries)


def test_workers_of_a_data_loader_are_not_recorded(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = ModelInside(model, recorder)
        for batch, entries in torch.utils.data.DataLoader(rows, num_workers=2, multiprocessing_context="fork"):
            assert entries.tolist() == [0]
            model(batch[0]).sum().backward()
            optimizer.step()
    many = Recording.read(tmp_path)
    assert (many.steps, many.ranks[0]["ended"]) == (2, "")
    assert [len(step.of("input")) for number in range(2) for step in many.step(number)] == [1, 1]


def test_a_full_disk_ends_the_recording_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step before is complete."""
    plain, calls = writer.save_file, []

    def save_file(tensors: dict[str, torch.Tensor], path: str) -> None:
        calls.append(path)
        if len(calls) > 1:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(tensors, path)

    monkeypatch.setattr(writer, "save_file", save_file)
    many = train(tmp_path)
    assert "step 1 could not be written, recording ends: [Errno 28] No space left on device" in capsys.readouterr().err
    assert many.steps == 1
    assert compare(many, many).verdict == "equal within rounding"
    with pytest.raises(MeshwrightError, match="MW-CHECK-005"):
        many.step(1)
