"""The comparison finds every bug of the corpus, and the first difference is at the place of the bug."""

from dataclasses import replace
from functools import cache

import bugs
import bugs_axes
import bugs_lossy
import layouts
import pytest

import ranks
from meshwright.describe.plan import Plan
from meshwright.proof import prove as proof
from meshwright.proof.compare import Agreement, compare
from meshwright.proof.diagnosis import diagnose
from meshwright.proof.emulation.update import replay

MEANINGS = {  # phase and pattern, as the bug was planted
    ("reduction", "factor"): ["gradient_averaged_twice", "reduce_scatter_averages", "expert_gradients_not_scaled"],
    ("reduction", "zero"): ["never_synchronised"],
    ("reduction", "missing sum"): [
        "replicas_not_reduced",
        "accumulation_zeroed_every_microbatch",
        "stale_bucket_views",
        "hooks_miss_split_backward",
        "norms_not_summed_over_sequence",
        "head_norms_not_summed",
        "row_bias_not_summed_over_sequence",
        "kv_copies_not_summed",
        "context_ranks_not_summed",
        "tied_embedding_not_summed",
        "expert_copies_not_summed",
        "router_not_summed",
    ],
    ("reduction", "counted twice"): [
        "every_microbatch_synchronises",
        "kv_copies_summed_over_all_ranks",
        "experts_summed_over_data_ranks",
        "compressed_experts_summed_over_data_ranks",
    ],
    ("reduction", "stale"): ["gradients_not_zeroed"],
    ("reduction", "part"): ["last_bucket_not_sent"],
    ("forward", "other"): [
        "replicas_start_differently",
        "initialised_by_local_shape",
        "softmax_without_a_common_maximum",
        "positions_start_at_zero_on_every_rank",
        "tensor_parallel_ranks_read_different_samples",
        "rotation_starts_at_zero_on_every_rank",
    ],
    ("forward", "missing sum"): ["embedding_not_summed"],
    ("forward", "counted twice"): ["bias_on_every_row_parallel_rank", "expert_bias_on_every_rank"],
    ("forward", "permutation"): [
        "every_rank_reads_the_same_samples",
        "data_loader_without_zigzag",
        "targets_in_another_order",
    ],
    ("forward", "part"): [
        "causal_by_local_position",
        "uneven_vocabulary_by_floor",
        "same_dropout_on_every_tp_rank",
        "different_dropout_on_every_tp_rank",
        "same_dropout_on_every_data_rank",
    ],
    ("forward", "factor"): ["microbatch_loss_not_divided", "padding_counted", "loss_normalised_per_rank"],
    ("clipping", "factor"): ["clip_by_local_norm"],
    ("clipping", "counted twice"): ["norm_counts_copies", "norm_counts_the_tied_copy", "norm_counts_each_kv_copy"],
    ("update", "other"): ["update_before_reduction"],
    ("update", "factor"): ["weight_decay_twice"],
    ("backward", "missing sum"): ["backward_of_column_parallel_not_summed", "key_copies_not_summed"],
    ("reduction", "other"): [
        "error_feedback_dropped",
        "decoded_with_the_first_ranks_scale",
        "positions_drawn_separately",
    ],
    ("backward", "factor"): ["whole_gradient_summed_again"],
    ("backward", "other"): [
        "dropout_differs_when_recomputed",
        "gradients_of_keys_not_exchanged_back",
        "output_gradient_sent_back",
        "balance_of_each_rank",
    ],
    ("backward", "zero"): ["rank_zero_is_false", "shards_freed_between_halves"],
    ("reduction", "noise"): ["partial_sums_compressed"],
    ("reduction", "permutation"): ["owners_rows_by_neighbour"],
}
# Compressed, weighted by a router, or lost between two halves of backward: the numbers do not show it.
NOT_NAMED = [
    "expert_bias_on_every_rank",
    "compressed_experts_summed_over_data_ranks",
    "key_copies_not_summed",
    "shards_freed_between_halves",
    "partial_sums_compressed",
    "owners_rows_by_neighbour",
]
PLACES = {  # the first tensor that differs, where it is not a gradient of a parameter
    "replicas_start_differently": "initial weights of embedding.tokens.weight",
    "initialised_by_local_shape": "initial weights of embedding.tokens.weight",
    "every_rank_reads_the_same_samples": "batch of targets",
    "tensor_parallel_ranks_read_different_samples": "batch of targets",
    "targets_in_another_order": "batch of targets",
    "data_loader_without_zigzag": "batch of targets",
    "embedding_not_summed": "output of embedding.tokens",
    "positions_start_at_zero_on_every_rank": "output of embedding.norm",
    "same_dropout_on_every_data_rank": "output of embedding.drop",
    "same_dropout_on_every_tp_rank": "output of embedding.drop",
    "rotation_starts_at_zero_on_every_rank": "output of layers.0.attention.o",
    "causal_by_local_position": "output of layers.0.attention.o",
    "bias_on_every_row_parallel_rank": "output of layers.0.attention.o",
    "expert_bias_on_every_rank": "output of layers.0.moe",
    "softmax_without_a_common_maximum": "loss of each micro-batch",
    "backward_of_column_parallel_not_summed": "gradient of the output of head.norm",
    "dropout_differs_when_recomputed": "recomputed output of layers.1.attention.o",
    "rank_zero_is_false": "gradient of the output of layers.1",
}

HOMES = (bugs, bugs_axes, bugs_lossy)


def home_of(bug):
    return next(home.__name__ for home in HOMES if hasattr(home, bug.name))


def layout_of(bug, prepare=""):
    return layouts.Layout(bug.model, Plan(**bug.plan), prepare, bug.router)


def job_of(bug):
    """Of the ranks. They record the step in which the bug shows, as `verify` does in a second run."""
    job = layout_of(bug, f"{home_of(bug)}:{bug.name}").job()
    return replace(job, watch=False, updates=bug.what == "parameter", activations_of=bug.step)


def jobs_alone(bug, many=()):
    """Of one device: the whole training, and those that record a step."""
    job = replace(job_of(bug), activations_of=-1)
    alone = proof.one_device(job, many)
    return [alone, *proof.activation_jobs(job, alone, bug.step)[1:]]


@cache
def one_device():
    """Trainings of one device, except for bugs whose ranks must first report their lossy sums."""
    jobs = {bug.name: jobs_alone(bug) for bug in FIRST if not Plan(**bug.plan).lossy}
    distinct = list({repr(job): job for some in jobs.values() for job in some}.values())
    traces = dict(zip(map(repr, distinct), ranks.run(1, layouts.train_all, distinct)[0], strict=True))
    return {name: [traces[repr(job)] for job in some] for name, some in jobs.items()}


def agreements(bug):
    """Of the ranks with one device, and of their updates with a replay."""
    job = job_of(bug)
    traces = [rank[0] for rank in ranks.run(job.plan.world, layouts.train_all, [job])]
    if bug in FIRST and not job.plan.lossy:
        one, shown, *stale = one_device()[bug.name]
    else:
        jobs = jobs_alone(bug, [{"fp64": trace} for trace in traces])
        one, shown, *stale = ranks.run(1, layouts.train_all, jobs)[0]
    compared = compare(one, traces)
    compared.rerun = shown, traces, stale[0] if stale else None
    return [compared, Agreement("fp64", {}, replay(traces, job, job.plan) if job.updates else [])]


def factors(bug):
    plan = Plan(**bug.plan)
    axes = {axis: getattr(plan, axis) for axis in ("dp", "tp", "cp", "pp", "ep", "replicate", "shard")}
    return axes | {"micro-batches": plan.microbatches(layout_of(bug).job().workload)}


def title(bug):
    return f"{bug.name}-{Plan(**bug.plan).title()}"


# One bug of each phase and pattern every day, in one layout; the others, and other layouts, in the soak.
DAILY = {names[0] for names in MEANINGS.values()}
FIRST = [bug for bug in {bug.name: bug for bug in reversed(bugs.CORPUS)}.values() if bug.name in DAILY]
OTHERS = [(bug,) for bug in bugs.CORPUS if bug not in FIRST]


@pytest.mark.parametrize("bug", [*FIRST, *ranks.soak(OTHERS)], ids=title)
def test_a_historical_bug_is_caught_where_it_is(bug):
    compared = agreements(bug)
    found = compared[0].breaks
    assert found, "the comparison found nothing"
    first = found[0]
    assert (first.what, first.step) == (bug.what, bug.step), str(first)
    assert bug.tensor in first.name, str(first)
    if bug.ratio:
        assert first.ratio == pytest.approx(bug.ratio, rel=1e-6)
    meaning = diagnose(compared, factors(bug))
    named = bug.name in MEANINGS.get((meaning.phase, meaning.pattern.kind), ())
    assert named == (bug.name not in NOT_NAMED), str(meaning)
    assert PLACES.get(bug.name, "") in str(meaning)


def test_the_meaning_of_four_in_five_bugs_is_named():
    names = [name for group in MEANINGS.values() for name in group]
    assert sorted(names) == sorted({bug.name for bug in bugs.CORPUS})
    assert len(NOT_NAMED) <= 0.2 * len(names)


def test_the_corpus_is_complete_and_every_bug_is_tried():
    names = {bug.name for bug in bugs.CORPUS}
    assert len(names) >= 25
    written = {
        name
        for home in HOMES
        for name, f in vars(home).items()
        if callable(f) and getattr(f, "__module__", "") == home.__name__
    }
    assert {name for name in written if name[0].islower()} == names
