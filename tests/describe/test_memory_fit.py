"""How sure a plan is to fit is one word and one chance, and the quantiles behind it are those of the published runs."""

import math

import numpy as np
import pytest

from meshwright.calibrate.runs import accuracy, validate
from meshwright.describe.result import QUANTILES, chance_to_fit, fit_word, fit_words
from meshwright.interop.files import configure
from meshwright.planner.advice.alternatives import PlanTrials
from meshwright.planner.advice.explain import memory_words
from meshwright.planner.advice.lint.finding import Seen
from meshwright.planner.advice.lint.rules import thin_memory
from meshwright.predict.estimate import verdicts_of
from meshwright.view.page.verdict import headline
from meshwright.view.tables import as_text


@pytest.mark.parametrize(
    ("share", "word"),
    [
        (0.5, "fits"),
        (0.81, "fits"),
        (0.90, "probably fits"),
        (0.949, "probably fits"),
        (0.97, "may not fit"),
        (1.01, "does not fit"),
    ],
)
def test_the_word_of_a_share_of_the_memory(share, word):
    assert fit_word(80 * share, 80.0) == word
    assert fit_words(80 * share, 80.0).startswith(f"{word} (")


def test_the_chance_falls_with_the_predicted_memory():
    chances = [chance_to_fit(share, 1.0) for share in np.linspace(0.4, 1.3, 40)]
    assert chances == sorted(chances, reverse=True)
    assert 0.55 < chance_to_fit(0.949, 1.0) < 0.70


@pytest.mark.parametrize("sequence", [6144, 8192, 9216, 11264, 16384])
def test_every_place_says_the_same_word(sequence):
    config = configure(
        "", plan="examples/llama3-70b-64xh100.toml", set=[f"workload.seq={sequence}", "plan.recompute=none"]
    )
    trial = PlanTrials(config)
    now = trial.of(config.plan)
    words, p = now.prediction.memory_fit, now.prediction
    assert words in memory_words(p)
    assert headline(now).lower().startswith(words)
    memory = next(v for v in verdicts_of(now) if v.name == "memory")
    assert words in memory.target
    assert words in " ".join(as_text(now.__rich__()).split())
    assert (p.as_dict()["memory_fit"], p.as_dict()["fit_chance"]) == (
        p.fit_word,
        chance_to_fit(p.memory_gib, p.memory_limit_gib),
    )
    assert memory.good == (p.fit_word in ("fits", "probably fits"))
    finding = thin_memory(Seen(config, now, trial))
    assert (finding is None) == memory.good
    assert finding is None or words in finding.what


@pytest.mark.slow
def test_the_quantiles_are_those_of_the_published_runs():
    found = [o for o in validate.predict_rows(accuracy.runs()) if o.memory_error is not None]
    ratios = np.array([-math.log1p(o.memory_error) for o in found])
    sources = np.array([o.source for o in found])
    computed = np.exp(accuracy.quantiles(ratios, sources, list(QUANTILES)))
    assert list(QUANTILES.values()) == pytest.approx(computed.tolist(), abs=0.04)
