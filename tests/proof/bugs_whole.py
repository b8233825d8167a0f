"""Bugs of a run around its steps: schedules, evaluation, checkpoints, the order of samples, random states.

Each is a function that puts one bug into a process: into the ranks and into one device, as it would be in the source. `WHOLE` lists the settings
that show a bug and the kind of the first difference; a bug with `default` is found without `--whole`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.parallel import apply, recompute
from meshwright.training import loop, worker
from meshwright.training.checkpoint import load, save
from meshwright.training.data import samples, sources
from meshwright.training.optimizer import average, schedule

# Schedule


def cosine_that_rises():
    plain = schedule.share_at
    loop.share_at = lambda settings, step: plain(settings, max(0, settings.warmup + settings.decay_steps - step))


def schedule_begins_again_after_the_resume():
    plain = load.restore_numbers

    def again(trainer, *more):
        plain(trainer, *more)
        first, share = trainer.step, schedule.share_at
        loop.share_at = lambda settings, step: share(settings, max(step - first, 0))

    load.restore_numbers = again


# Evaluation


def evaluation_is_a_mean_of_batches():
    def loss(self):
        trainer, parallel, total = self.trainer, self.trainer.parallel, 0.0
        for i in range(self.samples.batches):
            batch = self.loader.batch(i, trainer.indices)
            tokens = parallel.all_reduce(batch.valid.double(), "dp_cp")
            part = parallel.evaluate(batch.inputs, batch.targets, batch.documents_BS)
            total += float(parallel.all_reduce(trainer.counted_loss(part), "world") / tokens.clamp(min=1))
        return total / self.samples.batches

    worker.Evaluation.loss = loss


def evaluation_counts_the_tokens_of_one_rank():
    plain = worker.Evaluation.loss

    def loss(self):
        parallel = self.trainer.parallel
        reduce = parallel.all_reduce
        parallel.all_reduce = lambda x, axis: x * parallel.mesh.size("dp") if axis == "dp_cp" else reduce(x, axis)
        value = plain(self)
        parallel.all_reduce = reduce
        return value

    worker.Evaluation.loss = loss


def evaluation_of_the_first_batch_only():
    plain = worker.Evaluation.loss

    def loss(self):
        batches, self.samples.batches = self.samples.batches, 1
        value = plain(self)
        self.samples.batches = batches
        return value

    worker.Evaluation.loss = loss


def evaluation_with_dropout():
    plain = torch.nn.Module.train
    torch.nn.Module.train = lambda self, mode=True: plain(self, True)


def dropout_stays_off_after_an_evaluation():
    torch.nn.Module.train = lambda self, mode=True: (
        self if mode else [setattr(m, "training", False) for m in self.modules()] and self
    )


def evaluation_keeps_gathered_weights():
    """Weights that ZeRO-3 gathered for an evaluation are used in all later steps."""
    kept: dict[int, torch.Tensor] = {}
    plain_evaluate, plain_run = apply.Parallel.evaluate, apply.Parallel.forward_backward

    def evaluate(self, *batch):
        value = plain_evaluate(self, *batch)
        kept.update({i: piece.local.detach().clone() for i, piece in enumerate(self.pieces)})
        return value

    def forward_backward(self, *batch):
        now = [piece.local.detach().clone() for piece in self.pieces]
        for i, old in kept.items():
            self.pieces[i].local.data.copy_(old)
        value = plain_run(self, *batch)
        for piece, weight in zip(self.pieces, now, strict=True):
            piece.local.data.copy_(weight)
        return value

    apply.Parallel.evaluate, apply.Parallel.forward_backward = evaluate, forward_backward


def evaluation_moves_a_weight():
    plain = apply.Parallel.evaluate

    def evaluate(self, *batch):
        with torch.no_grad():
            self.pieces[0].local.mul_(1 + 1e-6)
        return plain(self, *batch)

    apply.Parallel.evaluate = evaluate


def padding_of_the_last_batch_counts():
    def sample(self, step, index):
        source, sequence = self.order.draw(min(step * self.batch + index, self.count - 1))
        return self.sources[source][sequence]

    samples.ValidationSamples.sample = sample


# Save and resume


def after_load(change):
    plain = load.load

    def loaded(trainer, path, manifest):
        messages = plain(trainer, path, manifest)
        with torch.no_grad():
            change(trainer)
        return messages

    load.load = loaded


def resume_one_step_later():
    after_load(lambda trainer: setattr(trainer, "step", trainer.step + 1))


def resume_at_step_zero():
    after_load(lambda trainer: setattr(trainer, "step", 0))


def moments(trainer):
    return [state for state in trainer.optimizer.state.values() if "exp_avg" in state]


def count_of_adam_starts_again():
    after_load(lambda trainer: [state["step"].zero_() for state in moments(trainer)])


def moments_start_again():
    after_load(lambda trainer: [state["exp_avg_sq"].zero_() for state in moments(trainer)])


def moments_of_one_tensor_start_again():
    after_load(lambda trainer: moments(trainer)[-1]["exp_avg"].zero_())


def average_starts_again():
    plain = average.WeightAverage.restart
    after_load(lambda trainer: plain(trainer.average))


def random_states_not_restored():
    load.restore_random = lambda *a: None


def loss_scale_not_restored():
    after_load(lambda trainer: setattr(trainer.scale, "good_steps", 0))


def masters_rounded_at_the_resume():
    after_load(lambda trainer: [p.local.copy_(p.local.bfloat16()) for p in trainer.parallel.updated])


def save_of_tensors_that_later_steps_change():
    save.Saver._copy = lambda self, entry: entry.tensor.detach()
    plain = save.Saver._save

    def late(self, state):
        import time

        time.sleep(0.5)
        plain(self, state)

    save.Saver._save = late


# Samples


def data_start_again_after_the_resume():
    def again(trainer):
        first, plain = trainer.step, trainer.loader.batch
        trainer.loader.batch = lambda step, indices: plain(step - first, indices)

    after_load(again)


def draws(number):
    def sample(self, step, index):
        source, sequence = self.order.draw(number(step, index, self.batch))
        return self.sources[source][sequence]

    samples.TokenSamples.sample = sample


def the_same_sample_on_two_ranks():
    draws(lambda step, index, batch: step * batch + index % (batch // 2))


def every_second_sample_twice():
    draws(lambda step, index, batch: step * batch + index - index % 2)


def steps_overlap_by_one_sample():
    draws(lambda step, index, batch: step * (batch - 1) + index)


def a_sample_left_out_after_each_step():
    draws(lambda step, index, batch: step * (batch + 1) + index)


def each_epoch_begins_with_the_second_sequence():
    plain = sources.Order.locate
    sources.Order.locate = lambda self, sample: (plain(self, sample)[0], max(plain(self, sample)[1], 1))


def windows_begin_one_token_later():
    plain = sources.Documents.window
    sources.Documents.window = lambda self, start, stop: plain(self, start + 1, stop + 1)


def targets_cross_documents():
    plain = samples.Sequences.__getitem__

    def item(self, index):
        inputs, targets, *documents = plain(self, index)
        targets[:-1] = inputs[1:]
        return inputs, targets, *documents

    samples.Sequences.__getitem__ = item


def validation_documents_are_trained_on():
    samples.training_documents = lambda data: [sources.Documents(sources.open_tokens(path)) for path in data.path]
    sources.training_documents = samples.training_documents


# Recompute


def recompute_draws_new_numbers():
    recompute.torch = Without(torch, set_rng_state=lambda state: None)


def recompute_moves_the_generator():
    class Unforked:
        def __init__(self, *a, **k): ...
        def __enter__(self): ...
        def __exit__(self, *a): ...

    recompute.torch = Without(torch, random=Without(torch.random, fork_rng=Unforked))


class Without:
    """A module with some of its functions replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@dataclass(frozen=True)
class WholeBug:
    name: str
    what: str  # the kind of the first difference
    default: bool = False
    plan: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    daily: bool = False


DROPOUT = {"dropout_rate": 0.2}
COSINE = {"schedule": "cosine", "warmup": 10}
BF16 = {"param_dtype": "bf16", "master": True}
FP16 = {"param_dtype": "fp16", "master": True}
STATE, COUNT, LOSS = "restored state", "count after the resume", "evaluation loss"
WHOLE = [
    WholeBug("cosine_that_rises", "parameter", optimizer=COSINE),
    WholeBug("schedule_begins_again_after_the_resume", "parameter", optimizer=COSINE),
    WholeBug("evaluation_is_a_mean_of_batches", LOSS, default=True),
    WholeBug("evaluation_counts_the_tokens_of_one_rank", LOSS, default=True),
    WholeBug("evaluation_of_the_first_batch_only", LOSS, default=True),
    WholeBug("evaluation_with_dropout", LOSS, default=True, model=DROPOUT),
    WholeBug("dropout_stays_off_after_an_evaluation", "loss", model=DROPOUT),
    WholeBug("evaluation_keeps_gathered_weights", "loss", daily=True),
    WholeBug("evaluation_moves_a_weight", "parameter", default=True),
    WholeBug("padding_of_the_last_batch_counts", "samples"),
    WholeBug("resume_one_step_later", COUNT, default=True),
    WholeBug("resume_at_step_zero", COUNT),
    WholeBug("count_of_adam_starts_again", COUNT, default=True),
    WholeBug("moments_start_again", STATE, default=True),
    WholeBug("moments_of_one_tensor_start_again", STATE),
    WholeBug("average_starts_again", STATE, optimizer={"ema": 0.9}),
    WholeBug("random_states_not_restored", STATE, default=True),
    WholeBug("loss_scale_not_restored", STATE, plan=FP16),
    WholeBug("masters_rounded_at_the_resume", STATE, plan=BF16),
    WholeBug("save_of_tensors_that_later_steps_change", COUNT),
    WholeBug("data_start_again_after_the_resume", "loss", daily=True),
    WholeBug("the_same_sample_on_two_ranks", "samples"),
    WholeBug("every_second_sample_twice", "samples"),
    WholeBug("steps_overlap_by_one_sample", "samples"),
    WholeBug("a_sample_left_out_after_each_step", "samples"),
    WholeBug("each_epoch_begins_with_the_second_sequence", "samples"),
    WholeBug("windows_begin_one_token_later", "samples"),
    WholeBug("targets_cross_documents", "samples", data={"document_mask": True}),
    WholeBug("validation_documents_are_trained_on", "samples", data={"validation": 0.2}),
    WholeBug("recompute_draws_new_numbers", "random numbers", default=True, plan={"recompute": "full"}),
    WholeBug("recompute_moves_the_generator", "random numbers", default=True, plan={"recompute": "full"}),
]
