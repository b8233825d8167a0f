"""Bugs in code that one device and the ranks share: only formulas written a second time find them (`proof.oracle`).

Each is a function that puts one bug into a process, as in `bugs`; `undo` takes them out, so that one process tries all of them. `SHARED`
lists the model and the settings that show a bug, and the kind of the first difference.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import layouts

from meshwright.describe.model import Model
from meshwright.models import attention, dropout, initialise, loss, moe, router, transformer
from meshwright.parallel import apply
from meshwright.parallel.context import blocks, sequence
from meshwright.parallel.expert import balance
from meshwright.proof.compare import INITIAL
from meshwright.training import loop
from meshwright.training.optimizer import make, muon, schedule

PATCHED: list[tuple[Any, str, Any]] = []


def patch(owner: Any, name: str, value: Any) -> None:
    PATCHED.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def undo() -> None:
    while PATCHED:
        setattr(*PATCHED.pop())


# Initial weights


def block_outputs_start_too_large():
    patch(initialise, "BLOCK_OUTPUTS", ())


def norms_start_at_zero():
    patch(initialise, "ZERO", ("bias", "norm.weight"))


def layers_start_alike():
    plain = initialise.generator
    patch(initialise, "generator", lambda seed, name: plain(seed, re.sub(r"\d+", "0", name)))


# The network


def rotary_angles_in_bf16():
    plain = attention.angles
    patch(attention, "angles", lambda *a: tuple(x.bfloat16().double() for x in plain(*a)))


def frequencies_of_a_longer_rope_not_scaled():
    plain = attention.angles
    patch(attention, "angles", lambda m, *a: plain(m.but(rope={}), *a))


def rotation_counts_from_one():
    plain = attention.Geometry._positions
    patch(attention.Geometry, "_positions", lambda self, length: plain(self, length) * 2)


def document_mask_ignored():
    for room in (attention, sequence):
        plain = room.current
        patch(room, "current", lambda plain=plain: replace(plain(), documents_BS=None))


def window_off_by_one():
    plain = attention.Geometry._position_mask
    patch(
        attention.Geometry,
        "_position_mask",
        lambda self, n, rule, d: plain(self, n, rule._replace(window=rule.window + bool(rule.window)), d),
    )


def every_layer_has_the_window():
    patch(attention, "rule_of", lambda model, layer: attention.AttentionRule(window=model.window))


def attention_not_scaled_by_the_width():
    plain = attention.rule_of
    patch(attention, "rule_of", lambda model, layer: plain(model, layer)._replace(scale=1.0))


def window_off_by_one_in_tiles():
    plain = blocks._mask
    patch(blocks, "_mask", lambda rows, columns, p: plain(rows, columns, p._replace(window=p.window + bool(p.window))))


def sinks_left_out():
    plain = sequence.tiled_attention
    patch(sequence, "tiled_attention", lambda q, k, v, pattern, dropped, sinks: plain(q, k, v, pattern, dropped, None))


def the_same_dropout_mask_in_every_step():
    plain = apply.sample_hashes
    patch(apply, "sample_hashes", lambda seed, step, *a: plain(seed, 0, *a))


def the_same_dropout_mask_at_every_site():
    plain = dropout.key_of
    patch(dropout, "key_of", lambda text: plain("" if text.startswith("layers") else text))


def kept_elements_not_scaled():
    plain = dropout.drop
    patch(dropout, "drop", lambda x, token, rate: plain(x, token, rate) * (1 - rate))


def norms_with_another_epsilon():
    plain = transformer.make_norm
    patch(transformer, "make_norm", lambda model, *a: plain(model.but(norm_epsilon=1e-6), *a))


def residual_not_scaled():
    patch(transformer.Layer, "scaled", lambda self, y: y)


def padding_in_the_loss():
    plain = loss.loss_and_gradient
    patch(loss, "loss_and_gradient", lambda logits, target, factor: plain(logits, target.clamp(min=0), factor))


def loss_of_each_micro_batch_averaged():
    """A mean over the tokens of a micro-batch, then a mean of means: wrong where padding differs."""
    patch(apply.Parallel, "set_tokens", lambda self, tokens, scale: setattr(self, "tokens", tokens * 0 + 48.0))


# Experts


def balancing_loss_without_its_factor():
    plain = router.Router.losses
    patch(router.Router, "losses", lambda self, *a: plain(self, *a) / self.experts)


def balancing_loss_not_averaged_over_micro_batches():
    def sums(modules, scale):
        for part in (part for module in modules for part in module.modules()):
            if isinstance(part, moe.MixtureOfExperts):
                part.placement.share = scale

    patch(balance, "scale_losses", sums)


def loss_on_logits_not_squared():
    def losses(self, logits, scores, chosen, tokens):
        return self.options.z * logits.logsumexp(-1).sum() / len(logits)

    patch(router.Router, "losses", losses)


def weights_not_normalised():
    patch(router.Router, "_weights", lambda self, scores: scores * self.options.scale)


def balancing_bias_moves_towards_the_load():
    plain = router.Router.balance
    patch(router.Router, "balance", lambda self, load: -plain(self, load))


# The update


def weight_decay_on_norms_and_biases():
    patch(make, "weight_decay", lambda role, kind, settings: settings.weight_decay)


def no_decay_of_the_head():
    plain = make.weight_decay
    patch(make, "weight_decay", lambda role, *a: 0.0 if role == "head" else plain(role, *a))


def epsilon_times_thousand():
    plain = make.adamw
    patch(make, "adamw", lambda g, settings, rate: plain(g, settings.but(epsilon=settings.epsilon * 1000), rate))


def betas_ignored():
    plain = make.adamw
    patch(make, "adamw", lambda g, settings, rate: plain(g, settings.but(betas=(0.9, 0.999)), rate))


def muon_with_other_coefficients():
    patch(muon, "COEFFICIENTS", (3.0, -3.2, 1.2))


def muon_without_its_size():
    patch(muon, "MATCH_ADAMW", 1.0)


def warm_up_off_by_one():
    plain = schedule.share_at
    patch(loop, "share_at", lambda settings, step: plain(settings, max(step - 1, 0)))


def cosine_that_rises():
    plain = schedule.share_at

    def rises(settings, step):
        turned = 2 * settings.warmup + settings.decay_steps - step
        return plain(settings, turned if settings.schedule == "cosine" and step > settings.warmup else step)

    patch(loop, "share_at", rises)


def linear_decay_to_zero():
    plain = schedule.share_at
    linear = {"min_learning_rate": 0.0}
    patch(loop, "share_at", lambda s, step: plain(s.but(**linear) if s.schedule == "linear" else s, step))


def gradients_clipped_twice():
    plain = loop.clip

    def twice(pieces, norm, *more):
        plain(pieces, norm, *more)
        plain(pieces, norm, *more)

    patch(loop, "clip", twice)


@dataclass(frozen=True)
class SharedBug:
    name: str
    model: Model
    what: str = "loss"
    how: dict[str, Any] = field(default_factory=dict)  # options of `test_oracle.job_of`


M = layouts.MODELS
LLAMA, MIXTRAL, DEEPSEEK = M["llama"].but(layers=2), M["mixtral"].but(layers=2), M["deepseek"].but(layers=2)
DROPS = LLAMA.but(dropout_rate=0.2)
BALANCED = MIXTRAL.but(router={"aux": 0.1})
YARN = LLAMA.but(rope=layouts.YARN)
MUON = {"optimizer": "muon"}
SHARED = [
    SharedBug("block_outputs_start_too_large", LLAMA, INITIAL),
    SharedBug("norms_start_at_zero", LLAMA, INITIAL),
    SharedBug("layers_start_alike", LLAMA, INITIAL),
    SharedBug("rotary_angles_in_bf16", LLAMA),
    SharedBug("frequencies_of_a_longer_rope_not_scaled", YARN),
    SharedBug("rotation_counts_from_one", LLAMA),
    SharedBug("document_mask_ignored", LLAMA, how={"documents": True}),
    SharedBug("window_off_by_one", LLAMA.but(window=3)),
    SharedBug("window_off_by_one_in_tiles", M["gemma"]),
    SharedBug("every_layer_has_the_window", LLAMA.but(window=3, full_every=2)),
    SharedBug("attention_not_scaled_by_the_width", LLAMA),
    SharedBug("sinks_left_out", LLAMA.but(sinks=True)),
    SharedBug("the_same_dropout_mask_in_every_step", DROPS),
    SharedBug("the_same_dropout_mask_at_every_site", DROPS),
    SharedBug("kept_elements_not_scaled", DROPS),
    SharedBug("norms_with_another_epsilon", LLAMA),
    SharedBug("residual_not_scaled", LLAMA.but(residual_scale=0.5)),
    SharedBug("padding_in_the_loss", LLAMA),
    SharedBug("loss_of_each_micro_batch_averaged", LLAMA),
    SharedBug("balancing_loss_without_its_factor", BALANCED, "gradient"),
    SharedBug("balancing_loss_not_averaged_over_micro_batches", BALANCED, "gradient", {"size": 2}),
    SharedBug("loss_on_logits_not_squared", MIXTRAL.but(router={"z": 0.1}), "gradient"),
    SharedBug("weights_not_normalised", MIXTRAL),
    SharedBug("balancing_bias_moves_towards_the_load", DEEPSEEK, "parameter"),
    SharedBug("weight_decay_on_norms_and_biases", LLAMA, "parameter"),
    SharedBug("no_decay_of_the_head", LLAMA, "parameter"),
    SharedBug("epsilon_times_thousand", LLAMA, "parameter"),
    SharedBug("betas_ignored", LLAMA, "parameter"),
    SharedBug("muon_with_other_coefficients", LLAMA, "parameter", MUON),
    SharedBug("muon_without_its_size", LLAMA, "parameter", MUON),
    SharedBug("warm_up_off_by_one", LLAMA, "parameter"),
    SharedBug("cosine_that_rises", LLAMA, "learning rate"),
    SharedBug("linear_decay_to_zero", LLAMA, "learning rate"),
    SharedBug("gradients_clipped_twice", LLAMA, "parameter"),
]


def traces_of_all(context: Any, jobs: list[Any]) -> list[Any]:
    """The trace of one device with each bug of `SHARED`, in one process."""
    out = []
    for bug, job in zip(SHARED, jobs, strict=True):
        globals()[bug.name]()
        out += layouts.train_all(context, [job])
        undo()
    return out
