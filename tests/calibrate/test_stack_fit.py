"""The numbers of stacks from runs: the fit recovers the numbers that runs were generated with, and a source left out is not seen."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.calibrate.runs import accuracy, left_out, stack_fit, validate
from meshwright.calibrate.runs.left_out import leave_out
from meshwright.calibrate.runs.normal import Normal
from meshwright.calibrate.runs.stack_fit import (
    BETWEEN_SOURCES,
    BETWEEN_STACKS,
    NUMBERS,
    TYPICAL,
    UNCERTAIN,
    Response,
    evidence,
    fields_of,
    grid,
    numbers_of,
    posterior,
    step_times,
)
from meshwright.describe import catalog
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload

MODEL = catalog.load("models", "gpt2-xl")
CLUSTER = catalog.load("clusters", "dgx-a100").with_gpus(16)
WORK = Workload(batch=64, seq=1024)
PLANS = [
    Plan(replicate=16, microbatch=1),
    Plan(replicate=16, microbatch=4),
    Plan(shard=16, zero=3, microbatch=2),
    Plan(replicate=8, tp=2, sp=True, microbatch=2),
    Plan(replicate=2, tp=8, sp=True, microbatch=8),
    Plan(replicate=4, pp=4, microbatch=4),
]
TRUE = TYPICAL + np.array([0.5, 0.08, -0.1, 0.2, 0.15, 0.0])


@pytest.fixture(scope="module")
def response():
    points = grid()
    every = [plan for plan in PLANS for _ in points]
    times = step_times(MODEL, CLUSTER, every, WORK, Stack(), np.tile(points, (len(PLANS), 1)))
    return Response.of(times.reshape(len(PLANS), -1), [0.0] * len(PLANS))


def exact(x):
    return np.log(step_times(MODEL, CLUSTER, PLANS, WORK, Stack(), np.tile(x, (len(PLANS), 1))))


def test_the_numbers_of_a_stack_are_its_coordinates():
    x = numbers_of(Stack())
    fields = fields_of(x, Stack())
    assert [fields[k] for k in ("launch", "products", "network", "hides")] == pytest.approx([5e-6, 1.0, 1.0, 0.85])
    assert list(fields) == [
        "launch",
        "collective_launch",
        "products",
        "attention_rate",
        "elementwise",
        "network",
        "hides",
    ]
    assert len(NUMBERS) == 6
    assert fields_of(x, Stack(collective_operators=0.5))["collective_launch"] == pytest.approx(0.5 * fields["launch"])


def test_the_response_interpolates_the_cost_model(response):
    """At the points of the grid exactly; between them within 3%, below the 5% noise of a run (`stack_fit.NOISE`)."""
    for point in grid()[::17]:
        assert response.log_time(point) == pytest.approx(exact(point), abs=1e-9)
    for move in (TRUE, TYPICAL, TYPICAL - np.array([0.7, 0.1, 0.1, 0.3, 0.3, 0.4])):
        assert np.abs(response.log_time(move) - exact(move)).max() < 0.03


def test_the_gradient_is_that_of_the_response(response):
    for p in range(len(NUMBERS)):
        step = 1e-5 * np.eye(len(NUMBERS))[p]
        difference = (response.log_time(TRUE + step) - response.log_time(TRUE - step)) / 2e-5
        assert response.with_gradient(TRUE)[1][:, p] == pytest.approx(difference, abs=1e-6)


def test_more_time_with_every_number(response):
    """Coordinates grow with the step time, so that their common part is a scale of the step."""
    assert (response.with_gradient(TYPICAL)[1] >= -1e-9).all()


def test_messages_are_sums_of_normal_variables():
    prior = Normal.of(TYPICAL, UNCERTAIN)
    moved = prior.through(BETWEEN_STACKS)
    assert moved.mean == pytest.approx(TYPICAL)
    assert moved.covariance == pytest.approx(UNCERTAIN + BETWEEN_STACKS)
    flat = Normal.flat().through(BETWEEN_STACKS)
    assert np.abs(flat.precision).max() == 0


def test_the_numbers_of_generated_runs_are_recovered(response):
    """Many exact runs: predictions with the posterior mean are right to a third of the noise, whatever combination of
    numbers explains them."""
    prior = Normal.of(TYPICAL, BETWEEN_STACKS + BETWEEN_SOURCES)
    found = prior * evidence(response, exact(TRUE), prior)
    before, after = (np.abs(response.log_time(x) - exact(TRUE)) for x in (TYPICAL, found.mean))
    assert after.max() < 0.3 * before.max()


def test_one_run_moves_less_than_runs_that_agree_and_those_more_than_runs_that_do_not(response):
    """How far a source is from its stack is learned from its runs. Where the offsets of runs are all +15%, they are followed; where they
    cancel, or where there is one run only, little of them is."""
    prior = Normal.of(TYPICAL, BETWEEN_STACKS + BETWEEN_SOURCES)
    expected = response.log_time(TYPICAL)

    def moved(offsets, update):
        seen = response.take(np.arange(len(offsets)))
        x = update(seen, expected[: len(offsets)] + np.array(offsets), prior).mean
        return float(np.mean(response.log_time(x) - expected))

    def at_once(*arguments):
        return arguments[2] * evidence(*arguments)

    one, agreeing, cancelling = [0.15], [0.15] * 5, [0.15, -0.15, 0.15, -0.15, 0.15]
    assert 0 < moved(one, posterior) < 0.6 * moved(one, at_once)
    assert moved(agreeing, posterior) > 0.6 * moved(agreeing, at_once)
    assert moved(agreeing, posterior) > 2 * moved(one, posterior)
    assert abs(moved(cancelling, posterior)) < abs(moved(cancelling, at_once))


def test_several_priors_are_answered_as_one_by_one(response):
    """Rows that need more steps of Newton's method than others, and rows with other noises."""
    covariances = [scale * BETWEEN_SOURCES for scale in (0.01, 1.0, 25.0)]
    noises = np.array([1.0, 4.0, 0.5])
    together = evidence(
        response, exact(TRUE), Normal.of(np.tile(TYPICAL, (3, 1)), np.array(covariances)), noises, np.ones(len(PLANS))
    )
    for k, (covariance, noise) in enumerate(zip(covariances, noises, strict=True)):
        alone = evidence(response, exact(TRUE), Normal.of(TYPICAL, covariance), noise, np.ones(len(PLANS)))
        assert together.precision[k] == pytest.approx(alone.precision, rel=1e-9)
        assert together.shift[k] == pytest.approx(alone.shift, rel=1e-9)


def test_a_mixture_has_the_mean_and_the_spread_of_its_parts(response):
    prior = Normal.of(TYPICAL, BETWEEN_STACKS + BETWEEN_SOURCES)
    found = posterior(response, exact(TRUE), prior)
    assert np.linalg.eigvalsh(found.covariance).min() > 0
    assert np.all(np.diag(found.covariance) <= np.diag(prior.covariance) * (1 + 1e-9))
    assert posterior(response.take(np.arange(0)), np.array([]), prior) is prior


def test_a_stalled_run_moves_little(response):
    """One run that took four times as long as expected: the others move by less than 3%, where an ordinary run moves them more."""
    prior = Normal.of(TYPICAL, BETWEEN_STACKS + BETWEEN_SOURCES)
    first = response.take(np.array([1]))

    def moved(factor):
        x = (prior * evidence(first, first.log_time(TYPICAL) + np.log(factor), prior)).mean
        return np.abs(response.log_time(x) - response.log_time(TYPICAL)).max()

    assert moved(4.0) < 0.03 < moved(1.2)


def test_an_obsolete_stack_does_not_move_the_typical_one(response):
    """Two sources of two stacks, one of them twice as slow: the typical stack follows it only if it is in use."""
    measured = np.concatenate([exact(TYPICAL), exact(TYPICAL) + np.log(1.5)])
    twice = response.take(np.tile(np.arange(len(PLANS)), 2))
    first, second = np.arange(len(PLANS)), np.arange(len(PLANS), 2 * len(PLANS))

    def typical(obsolete):
        leaves = [stack_fit.Leaf("a", "x", first), stack_fit.Leaf("b", "y", second, obsolete)]
        return stack_fit.fit(twice, measured, leaves).population().mean

    assert (typical(False)[:5] > typical(True)[:5]).all()
    alone = stack_fit.fit(response, measured[first], [stack_fit.Leaf("a", "x", first)]).population().mean
    assert typical(True) == pytest.approx(alone, abs=1e-9)


def rows(source, stack, scale, gpus=("8", "16", "32")):
    base = {
        "file": source, "model": "GPT", "layers": "24", "hidden": "2048", "ffn_hidden": "8192", "heads": "16", "kv_heads": "16",
        "vocab": "51200", "seq_len": "1024", "gpu_type": "A100-80GB", "gpus_per_node": "8", "cp": "1", "sp": "0", "zero": "1",
        "global_batch": "64", "recompute_mode": "full", "dtype": "fp16", "flash_attn": "0", "schedule": "1f1b", "stack": stack,
        "pair_ratio": "", "vpp": "", "notes": "",
    }  # fmt: skip
    made = []
    for k, (count, tp, micro) in enumerate((g, t, m) for g in gpus for t in ("1", "4") for m in ("1", "2")):
        cells = {
            "row_id": f"{source}-{k}",
            "gpus": count,
            "tp": tp,
            "pp": "1",
            "micro_batch": micro,
            "step_time_s": "1",
        }
        made.append({**base, **cells})
    for row, o in zip(made, validate.predict_rows(made), strict=True):
        row["step_time_s"] = str(o.prediction.step_time_s * scale)
    return made


@pytest.fixture(scope="module")
def left():
    """Two sources of one stack whose runs take 20% longer than the catalog says, and one of a stack without a name."""
    table = [*rows("a", "megatron-lm", 1.2), *rows("b", "megatron-lm", 1.2), *rows("c", "", 1.3)]
    return leave_out(validate.predict_rows(table, respond=left_out.responding(table)))


def test_a_source_left_out_is_predicted_by_others_of_its_stack(left):
    found = left_out.scores(left)
    assert found["a"].stack_known
    assert not found["c"].stack_known
    assert found["a"].median < 0.06  # the catalog's numbers are off by 20%, the other source's runs are not
    assert found["c"].median > 0.06


def test_runs_of_the_source_improve_its_prediction(left):
    found = left_out.scores(left)["c"]
    assert found.after[1] < found.median
    assert found.after[5] < 0.5 * found.median


@pytest.fixture(scope="module")
def unnamed(left):
    return left_out.without_stacks(left.runs)


def test_runs_without_their_stacks_are_predicted_with_the_default_one(left, unnamed):
    """No source knows the stack of another one then: what two sources have in common is only what all stacks have in common."""
    assert {o.case.stack.name for o in unnamed.runs} == {"default"}
    assert not unnamed.named.any()
    assert left_out.scores(unnamed)["a"].median > left_out.scores(left)["a"].median


def test_free_text_does_not_name_the_stack_of_such_runs(left):
    changed = [replace(o, case=replace(o.case, row={**o.case.row, "notes": "DualPipe"})) for o in left.runs]
    assert {o.case.stack.name for o in left_out.without_stacks(changed).runs} == {"default"}


def test_few_runs_of_a_large_source_are_predicted_without_their_stacks(left, monkeypatch):
    monkeypatch.setattr(left_out, "MOST_UNNAMED", 3)
    counts = {name: s.runs for name, s in left_out.scores(left_out.without_stacks(left.runs)).items()}
    assert set(counts) == {"a", "b", "c"}
    assert all(1 < count <= 3 for count in counts.values())


def test_bands_hold_the_runs_they_are_from(left, unnamed):
    found = accuracy.bands(left, unnamed)
    assert set(found) == set(accuracy.LEVELS)
    assert found["typical"].half_width > found["published"].half_width
    assert found["typical"].runs == len(unnamed.runs)
    assert found["calibrated-typical"].runs == len(unnamed.runs)
    assert all(b.low > 0 and b.half_width > 0 for b in found.values())
    assert set(accuracy.bands(left, None)) == {"published", "calibrated"}


def test_the_median_half_width_weighs_sources_not_rows():
    """Of three sources one has wide bands: the median is that of the narrow ones, the mean of medians is above it."""
    half = np.concatenate([np.full(1000, 0.4), np.full(10, 0.1), np.full(10, 0.1)])
    sources = np.repeat(["wide", "a", "b"], [1000, 10, 10])
    median, mean = accuracy.quantiles(half, sources, [0.5])[0], accuracy.macro_median(half, sources)
    assert median == pytest.approx(0.1)
    assert mean == pytest.approx(0.2)


def test_a_source_that_is_far_off_widens_the_bands_of_all(monkeypatch):
    """Of four sources one has five times the residuals: without it the half-width of the level is smaller, without another it is not."""
    sources = np.repeat(["a", "b", "c", "wild"], 100)
    scaled = np.random.default_rng(0).normal(size=400) * np.repeat([0.05, 0.05, 0.05, 0.25], 100)
    monkeypatch.setattr(accuracy, "residuals_of", lambda *_: (scaled, np.ones(400), sources, 400))
    all_of_them = accuracy.bands(object(), None)["published"].half_width
    without = accuracy.half_width_without(object(), "published")
    assert without["wild"] < 0.5 * all_of_them
    assert min(without[name] for name in "abc") > 0.9 * all_of_them


def test_quantiles_weigh_sources_not_rows():
    """A source of a thousand rows counts as much as one of two."""
    values = np.concatenate([np.full(1000, 0.01), [0.3, 0.3]])
    sources = np.array(["big"] * 1000 + ["small"] * 2)
    assert accuracy.quantiles(values, sources, [0.05, 0.95]) == pytest.approx([0.01, 0.3])


def test_the_fit_file_names_every_stack_of_the_catalog(left, unnamed):
    numbers = accuracy.stack_numbers(left.fit)
    assert set(numbers) == set(catalog.names("stacks")) - {"gloo-cpu", "meshwright"}
    assert numbers["megatron-lm"]["evidence"] == "published"
    assert numbers["torchtitan"]["evidence"] == "typical"
    import tomllib

    table = tomllib.loads(accuracy.to_toml(left.fit, accuracy.bands(left, unnamed)))
    for name, fields in table["stacks"].items():
        assert Stack(**{**catalog.tables("stacks")[name], **fields, "name": name}).evidence == fields["evidence"]


def test_a_stack_of_few_runs_has_the_band_of_a_typical_one(left):
    """Two runs give the numbers of a stack, and do not show how far other runs are from them."""
    few = replace(left.fit, leaves=[replace(leaf, runs=leaf.runs[:2]) for leaf in left.fit.leaves])
    found = [accuracy.stack_numbers(fit)["megatron-lm"] for fit in (left.fit, few)]
    assert [numbers["evidence"] for numbers in found] == ["published", "typical"]
    assert found[0]["launch"] == found[1]["launch"]


def test_the_catalog_has_the_fitted_numbers():
    assert catalog.load("stacks", "megatron-lm").evidence == "published"
    assert catalog.load("stacks", "default").evidence == "typical"
    assert catalog.load("stacks", "gloo-cpu").products == 1.0
    assert stack_fit.MOST_RUNS > 1


def test_published_rows_have_a_source_and_a_licence():
    table = accuracy.runs()
    assert len(table) > 3000
    assert all(row["source"] and row["licence"] for row in table)
    assert len(accuracy.failed()) > 900
    assert "Apache" in accuracy.licences()["llm_foundry"]


def names_of(half, count):
    """Names of sources of one half."""
    return [name for name in (f"source {k}" for k in range(100)) if left_out.half_of(name) == half][:count]


def test_a_band_covers_nine_of_ten_runs_of_a_source_that_it_has_not_seen():
    """Sources of different spread: the spread of the others is too small for the widest one, so the band is widened until it has its share."""
    random = np.random.default_rng(0)
    names = names_of(left_out.BUILDING, 6)
    sources = np.repeat(names, 200)
    scaled = random.normal(size=1200) * np.repeat([0.04, 0.05, 0.06, 0.07, 0.08, 0.2], 200)
    found = accuracy._band(scaled, np.ones(1200), sources, 1200)
    assert found.coverage == found.inside(left_out.BUILDING) >= accuracy.INSIDE
    assert accuracy.FEWEST <= found.by_source[names[-1]][0] < accuracy.FEWEST + 0.02
    assert found.low == found.high > 1.7 * accuracy.spread(scaled, sources)


def test_sources_of_the_testing_half_do_not_choose_the_factor_of_a_band():
    """A source with wide residuals raises the factor if it is in the building half, and only the spread if it is in the testing half."""
    random = np.random.default_rng(2)
    scaled = random.normal(size=1200) * np.repeat([0.05] * 5 + [0.3], 200)

    def factor(wild):
        sources = np.repeat([*names_of(left_out.BUILDING, 5), wild], 200)
        return accuracy._band(scaled, np.ones(1200), sources, 1200).low / accuracy.spread(scaled, sources)

    assert factor(names_of(left_out.BUILDING, 6)[-1]) > 1.5 * factor(names_of(left_out.TESTING, 1)[0])


def test_a_framework_left_out_takes_all_its_sources_with_it(response):
    """Two sources of one framework are twice as slow as a third: as one framework, none of them says what the other needs."""
    count = len(PLANS)
    runs = response.take(np.tile(np.arange(count), 3))
    measured = np.concatenate([exact(TYPICAL) + np.log(2.0), exact(TYPICAL) + np.log(2.0), exact(TYPICAL)])

    def expected_of_a(frameworks):
        leaves = [
            stack_fit.Leaf(name, name, np.arange(k * count, (k + 1) * count), framework=frameworks.get(name, ""))
            for k, name in enumerate("abc")
        ]
        return stack_fit.fit(runs, measured, leaves).source(leaves[0]).mean

    alone, together = expected_of_a({}), expected_of_a({"a": "x", "b": "x"})
    assert (together[1:4] < alone[1:4]).all()
    assert together == pytest.approx(expected_of_a({"a": "x", "b": "x", "c": "y"}))


def test_forks_and_releases_are_one_framework(left):
    assert left_out.frameworks_of(left.runs) == {"a": "Megatron", "b": "Megatron", "c": "default"}


def test_a_band_covers_a_source_that_is_off_as_a_whole():
    """Runs of a source share an error, so the runs of few sources are few independent errors, however many they are."""
    random = np.random.default_rng(1)
    offsets = {name: random.normal(0, 0.1) for name in names_of(left_out.BUILDING, 10)}
    counts = dict.fromkeys(offsets, 15) | {next(iter(offsets)): 300}
    scaled = np.concatenate([random.normal(offsets[name], 0.02, counts[name]) for name in offsets])
    sources = np.concatenate([[name] * counts[name] for name in offsets])
    found = accuracy._band(scaled, np.ones(len(scaled)), sources, len(scaled))
    assert found.coverage >= accuracy.INSIDE
    assert min(share for share, _ in found.by_source.values()) >= accuracy.FEWEST
    spread = accuracy.spread(scaled, sources)
    assert spread == pytest.approx(np.hypot(np.sqrt(1.1 * np.mean(np.square(list(offsets.values())))), 0.02), rel=0.1)
    once = np.concatenate([np.flatnonzero(sources == name)[:15] for name in offsets])
    assert accuracy.spread(scaled[once], sources[once]) == pytest.approx(
        spread, rel=0.02
    )  # every source counts the same
