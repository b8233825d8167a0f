"""The phases of a run beside its steps, compared: evaluation, saving, resuming, and the order of the samples.

    evaluation    the validation loss of the ranks, with plain formulas on the weights of one device that never stopped
    resume        on the layout that saved, by a trainer that has evaluated before, as one that goes back to a checkpoint: every number equals, bit
                  by bit, that of the run which went on. The step and the counts of the optimizer equal the number of steps
    another       the steps after a resume on another layout, with one device that never stopped
    samples       each data-parallel rank reads its share, together the global batch, each sample once (`windows`)
    recompute     a recomputed forward draws the random numbers of the original

Each becomes an `Agreement` of the proof.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.run import Data
from meshwright.describe.workload import Workload
from meshwright.proof.compare import Agreement, Break, compare
from meshwright.proof.records import Phases, PieceTrace, Trace
from meshwright.proof.small import SmallCopy
from meshwright.proof.tolerance import FP64_BOUND, KINDS, tensor_error
from meshwright.proof.windows import misread, shared_documents
from meshwright.training.data.token_file import DOCUMENTS, FORMAT, HEADER, TOKENS, VERSION

EVALUATION = "evaluation, from plain formulas"
RESUME = "resumed, from the run that went on"
SAMPLES = "samples, from the token files"
RECOMPUTE = "recomputed draws, from the original"
COUNT = "count after the resume"
EVALUATED_BATCHES = 2


def default_phases(config: Config, small: SmallCopy, steps: int, documents: bool, folder: Path) -> Phases:
    """One evaluation and one save before the last step, and a resume on the same layout."""
    model, workload = small.model, small.workload
    phases = Phases(folder, replace(config, model=model, workload=workload), max(1, steps - 1), resumes=True)
    if model.kind != "transformer":
        return phases
    own = replace(phases.config, data=random_data(folder, model, workload, documents))
    return replace(phases, config=own, evaluate_every=phases.save_after)


def random_data(folder: Path, model: Model, workload: Workload, documents: bool, sequences: int = 1) -> Data:
    """Token files of random documents: as many training sequences as asked for, and validation sequences for one and a half batches."""
    sizes = {"training": sequences, "validation": workload.batch + workload.batch // 2 + 1}
    for seed, (name, count) in enumerate(sizes.items()):
        write_random_tokens(folder / name, model.vocab, count * workload.seq + 2, workload.seq, seed)
    paths = {"path": (str(folder / "training"),), "validation_path": (str(folder / "validation"),)}
    return Data(**paths, document_mask=documents, eval_every=1, eval_batches=EVALUATED_BATCHES)


def write_random_tokens(folder: Path, vocabulary: int, count: int, seq: int, seed: int) -> None:
    """A token file of random documents, the mean of their lengths a little below that of a sequence."""
    random = np.random.default_rng(seed)
    ends = np.unique(random.integers(1, count, max(1, count * 4 // (3 * seq))))
    offsets = np.concatenate(([0], ends, [count])).astype("<i8")
    dtype = next(name for name in ("uint8", "uint16", "uint32") if vocabulary <= np.iinfo(name).max + 1)
    tokens = random.integers(0, vocabulary, count).astype(np.dtype(dtype).newbyteorder("<"))
    folder.mkdir(parents=True)
    tokens.tofile(folder / TOKENS)
    offsets.tofile(folder / DOCUMENTS)
    header = {"format": FORMAT, "version": VERSION, "dtype": dtype, "tokens": count, "documents": len(offsets) - 1}
    header |= {"vocabulary": vocabulary, "largest_token": int(tokens.max()), "end_token": None}
    header |= {"tokenizer": "random", "tokenizer_hash": "", "hashes": {}, "sources": []}
    (folder / HEADER).write_text(json.dumps(header))


# Comparisons


def compare_phases(one: Trace | None, many: list[Trace], phases: Phases) -> list[Agreement]:
    """Agreements of what the ranks did between their steps; `one`: one device that never stopped, None if its weights are not those of the ranks."""
    out = []
    if one is not None and one.evaluations:
        out.append(compare_evaluations(one, many))
    if all(trace.resumed is not None for trace in many):
        out.append(compare_resumed(many, phases))
    if wrong := [event(0, "random numbers", "a recomputed forward", t.rank, t.dtype) for t in many if not t.redrawn]:
        out.append(agreement(RECOMPUTE, wrong, many))
    return out


def agreement(phase: str, breaks: list[Break], many: list[Trace], errors: dict[str, float] | None = None) -> Agreement:
    errors, dtype = dict.fromkeys(KINDS, 0.0) | (errors or {}), many[0].dtype
    phase = phase if dtype == "fp64" else f"{phase}, in {dtype}"
    return Agreement(dtype, errors, breaks, many[0].losses, phase=phase)


def event(step: int, what: str, name: str, rank: int, dtype: str) -> Break:
    """A value that must be equal and is not."""
    return Break(step, what, name, rank, float("inf"), 0.0, dtype)


def compare_evaluations(one: Trace, many: list[Trace]) -> Agreement:
    """The validation losses after each evaluation."""
    breaks, worst = [], 0.0
    for trace in many:
        for step, expected in one.evaluations.items():
            whole = np.array([expected])
            error, ratio = tensor_error(np.array([trace.evaluations.get(step, np.nan)]), whole, whole, 0.0)
            worst = max(worst, error)
            if not error <= FP64_BOUND:
                breaks.append(Break(step - 1, "evaluation loss", "", trace.rank, error, FP64_BOUND, trace.dtype, ratio))
    return agreement(EVALUATION, sorted(breaks, key=lambda b: (b.step, b.rank)), many, {"loss": worst})


def compare_resumed(many: list[Trace], phases: Phases) -> Agreement:
    """The resumed run equals the run that went on, bit by bit."""
    breaks: list[Break] = []
    errors = dict.fromkeys(KINDS, 0.0)
    for trace in many:
        resumed = trace.resumed
        assert resumed is not None
        breaks += wrong_counts(resumed, phases.save_after)
        for step, before, after in (
            (phases.save_after, trace.state, resumed.state),
            (phases.save_after + len(resumed.losses), trace.end_state, resumed.end_state),
        ):
            names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            breaks += [event(step, "restored state", name, trace.rank, trace.dtype) for name in names]
        for step in resumed.evaluations:
            if resumed.evaluations[step] != trace.evaluations.get(step):
                breaks.append(event(step - 1, "evaluation loss", "", trace.rank, trace.dtype))
        for what, name, step, got, expected in values_after(trace, resumed):
            error, ratio = tensor_error(np.asarray(got), np.asarray(expected), np.asarray(expected), 0.0)
            errors[what] = max(errors[what], error)
            if error:
                breaks.append(Break(step, what, name, trace.rank, error, 0.0, trace.dtype, ratio))
    return agreement(RESUME, sorted(breaks, key=lambda b: (b.what != COUNT, b.step)), many, errors)


def wrong_counts(resumed: Trace, steps: int) -> Iterator[Break]:
    """The step, and the number of updates that the optimizer counts, are the number of steps that were done."""
    for name, value in resumed.state.items():
        if (name == "step" or name.startswith("step of ")) and value != steps and resumed.dtype == "fp64":
            ratio = value / steps
            yield Break(steps, COUNT, name, resumed.rank, abs(ratio - 1), 0.0, "fp64", ratio)


def values_after(trace: Trace, resumed: Trace) -> Iterator[tuple]:
    """Pairs of values of the resumed run and of the run that went on: kind, name, step, the two."""
    for i in range(len(resumed.losses)):
        step = resumed.first_step + i
        if not trace.first_step <= step < trace.first_step + len(trace.losses):
            continue  # its count is reported
        at = step - trace.first_step
        yield "loss", "", step, resumed.losses[i], trace.losses[at]
        yield "norm", "", step, resumed.norms[i], trace.norms[at]
        for piece, original in zip(resumed.pieces, trace.pieces, strict=True):
            yield "gradient", piece.name, step, piece.gradients[i], original.gradients[at]
            yield "parameter", piece.name, step, piece.parameters[i], original.parameters[at]


def compare_elsewhere(one: Trace, many: list[Trace], steps: int, phase: str, batch: int, end: int) -> Agreement:
    """The steps after a resume on another layout than the one that saved, until the step `end`, with one device that never stopped."""
    breaks = [b for trace in many for b in wrong_counts(trace, steps)]
    if many[0].reads:
        breaks += misplaced(one, many, batch, end)
    if {trace.first_step for trace in many} != {steps}:
        return agreement(phase, breaks, many)
    made = compare(steps_from(one, steps), many)
    made.breaks = breaks + [replace(b, step=b.step + steps) for b in made.breaks]
    made.phase = phase
    return made


def steps_from(trace: Trace, step: int) -> Trace:
    """A trace without its first steps."""

    def cut(piece: PieceTrace) -> PieceTrace:
        return replace(piece, gradients=piece.gradients[step:], parameters=piece.parameters[step:])

    pieces = [cut(piece) for piece in trace.pieces]
    return replace(trace, losses=trace.losses[step:], norms=trace.norms[step:], pieces=pieces, first_step=step)


def compare_samples(one: Trace, runs: Sequence[list[Trace]], config: Config, steps: int) -> Agreement:
    """The samples that ranks read: `runs` are the ranks of a run, and those of runs that resumed from it."""
    breaks = []
    for part in ("training", "validation"):
        rows = [
            row
            for (read, step, _), row in sorted(one.reads.items(), key=lambda r: r[0])
            if read == part and step < steps
        ]
        if part == "validation":
            rows = [row for row in rows if (row[1] >= 0).any()]  # without the padding of the last batch
        breaks += [event(0, "samples", text, 0, "fp64") for text in misread(config, rows, part)]
    if shared_documents(config):
        breaks.append(event(0, "samples", "training and validation share documents", 0, "fp64"))
    for ranks in runs:
        breaks += misplaced(one, ranks, config.workload.batch, steps)
    return agreement(SAMPLES, breaks, runs[0])


def misplaced(one: Trace, ranks: list[Trace], batch: int, steps: int) -> Iterator[Break]:
    """Each sample of a global batch is read by one data-parallel rank, and is the one that one device reads there."""
    readers: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for trace in ranks:
        place = trace.coordinates["replicate"], trace.coordinates["shard"]
        for (part, step, index), row in trace.reads.items():
            if part == "training" and step < steps:
                readers.setdefault((step, index), set()).add(place)
                expected_row = one.reads.get((part, step, index))
                if expected_row is None or not np.array_equal(row, expected_row):
                    yield event(step, "sample", str(index), trace.rank, trace.dtype)
    expected = {(step, i) for step in range(ranks[0].first_step, steps) for i in range(batch)}
    for step, index in sorted(expected ^ set(readers)):
        how = "not read" if (step, index) in expected else "read again after the resume"
        yield event(step, "sample", f"{index}, {how}", 0, ranks[0].dtype)
    for (step, index), places in readers.items():
        if len(places) > 1:
            yield event(step, "sample", f"{index}, read by {len(places)} data-parallel ranks", 0, ranks[0].dtype)
