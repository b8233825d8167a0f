"""Hooks of the trainer: their order, what they may change, and how they end a training."""

from dataclasses import replace

import ranks
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.training.hooks import Hook

MODEL = Model(hidden=8, layers=1, heads=2, ffn=8, vocab=16)
WORKLOAD = Workload(batch=2, seq=4)


class Noted(Hook):
    """Notes its calls; the second of two sees the record that the first returned, and stops after step 1."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def start(self, trainer):
        self.calls.append((self.name, "start"))

    def before_step(self, trainer):
        self.calls.append((self.name, "before_step", trainer.step))

    def after_gradients(self, trainer):
        assert any(piece.gradient.any() for piece in trainer.parallel.pieces)
        self.calls.append((self.name, "after_gradients", trainer.step))

    def after_step(self, trainer, record):
        assert not any(piece.gradient.any() for piece in trainer.parallel.pieces)  # updated, and set to zero
        self.calls.append((self.name, "after_step", record.step, trainer.step, record.tokens))
        trainer.stopped = record.step == 1
        return replace(record, tokens=-1) if self.name == "first" else None

    def finish(self, trainer):
        self.calls.append((self.name, "finish"))


def calls_of(context):
    from meshwright.parallel.apply import apply
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    calls = []
    trainer = Trainer(apply(MODEL, Plan(), WORKLOAD, context.rank), RandomSamples(MODEL, WORKLOAD.seq, 0))
    trainer.hooks = [Noted("first", calls), Noted("second", calls)]
    records = trainer.train(5)
    return calls, [(r.step, r.tokens) for r in records]


def test_the_order_of_hooks_and_the_end_by_a_hook():
    calls, records = ranks.run(1, calls_of)[0]
    tokens = WORKLOAD.tokens_per_step

    def step(i):
        return [
            ("second", "before_step", i),
            ("first", "before_step", i),  # the nearest to the step
            ("first", "after_gradients", i),
            ("second", "after_gradients", i),
            ("first", "after_step", i, i + 1, tokens),
            ("second", "after_step", i, i + 1, -1),
        ]

    around = [[(name, what) for name in ("first", "second")] for what in ("start", "finish")]
    assert calls == [*around[0], *step(0), *step(1), *around[1]]
    assert records == [(0, -1), (1, -1)]
