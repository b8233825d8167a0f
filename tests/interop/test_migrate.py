"""Settings migrated from framework to framework and back keep degrees, batch, precision and recompute, or the refusal says why."""

import json
import random
import shlex
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from frameworks.cases import CASES
from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.interop.files import parse, recognise
from meshwright.interop.frameworks import FRAMEWORKS, READABLE, find
from meshwright.interop.keys import Framework, plain
from meshwright.interop.migrate import MANNER, in_manner_of, migrate, nearest_change, with_settings
from meshwright.interop.migrated_keys import Migration
from meshwright.interop.reading import SettingsReading, merged_settings, understand
from meshwright.interop.recipes import rows
from meshwright.interop.write import check_runnable, settings_of

# A plan for every case of tests/frameworks; what a framework does not run of it is changed to the nearest that it does.
PLANS = {
    "1b one gpu": {"microbatch": 2},
    "1b one node": {"shard": 8, "zero": 3, "microbatch": 2, "recompute": "full"},
    "8b one node": {"shard": 8, "zero": 3},
    "8b 64": {"tp": 2, "sp": True, "shard": 32, "zero": 1, "microbatch": 2},
    "8b fp8": {"shard": 64, "zero": 3, "recompute": "full"},
    "8b 128k": {"cp": 8, "tp": 2, "sp": True, "shard": 4, "zero": 3, "recompute": "full"},
    "8b zero 0": {"tp": 4, "sp": True, "replicate": 16},
    "8b zero 1": {"shard": 64, "zero": 1},
    "8b zero 2": {"shard": 64, "zero": 2, "recompute": "full"},
    "8b zero 3": {"replicate": 8, "shard": 8, "zero": 3, "reshard": False},
    "8b pipeline": {"pp": 4, "tp": 2, "sp": True, "shard": 8, "zero": 1},
    "8b interleaved": {"pp": 2, "virtual": 4, "schedule": "interleaved", "shard": 32, "zero": 1, "microbatch": 2},
    "8b recompute": {"shard": 64, "zero": 3, "recompute": "full", "microbatch": 4},
    "8b selective": {"shard": 64, "zero": 3, "recompute": "selective"},
    "qwen3 8b": {"tp": 2, "shard": 32, "zero": 3, "microbatch": 4},
    "70b 64": {"tp": 8, "sp": True, "pp": 4, "shard": 2, "zero": 1, "recompute": "selective"},
    "70b 512": {"tp": 8, "sp": True, "shard": 64, "zero": 3, "recompute": "full"},
    "70b 128k": {"tp": 8, "sp": True, "cp": 8, "cp_kind": "all-gather", "shard": 8, "zero": 3, "recompute": "full"},
    "405b 512": {"tp": 8, "sp": True, "pp": 16, "shard": 4, "zero": 1, "recompute": "full"},
    "405b 8192": {"tp": 8, "sp": True, "pp": 16, "shard": 64, "zero": 1},
    "mixtral 64": {"tp": 2, "sp": True, "shard": 32, "zero": 1, "ep": 8, "expert_tp": 1},
    "mixtral experts": {"shard": 64, "zero": 3, "ep": 8, "recompute": "full"},
    "deepseek lite 64": {"shard": 64, "zero": 1, "ep": 8, "expert_tp": 1},
    "deepseek lite experts": {"shard": 64, "zero": 3, "ep": 8, "recompute": "full"},
    "deepseek v3 2048": {"pp": 16, "shard": 128, "zero": 1, "ep": 64, "expert_tp": 1, "recompute": "full"},
}  # fmt: skip
KEPT = ("plan.tp", "plan.cp", "plan.pp", "plan.virtual", "plan.ep", "plan.replicate", "plan.shard", "plan.zero", "plan.microbatch", "workload.batch",
        "workload.seq", "workload.precision", "plan.param_dtype", "plan.recompute", "plan.recompute_every", "plan.recompute_layers")  # fmt: skip
ENDINGS = {"toml": ".toml", "yaml": ".yaml", "json": ".json", "args": ".sh", "python": ".py"}
DAILY = ("1b one gpu", "8b fp8", "8b 128k", "8b zero 2", "8b interleaved", "70b 64", "mixtral experts")


@cache
def first_text(case: str, name: str) -> str:
    """The settings of a case's plan, or of the nearest that the framework runs; "" if there is none."""
    question, framework = CASES[case], FRAMEWORKS[name]
    precision = dict(word.partition("=")[::2] for word in question.settings).get("workload.precision", "bf16")
    config = in_manner_of(
        Config.from_parts(
            question.model, {"extends": "dgx-h100", "gpus": question.gpus}, catalog.load("stacks", framework.stack),
            {"batch": question.batch, "seq": question.seq, "precision": precision}, PLANS[case],
        ),
        framework,
    )  # fmt: skip
    try:
        check_runnable(config, framework, MANNER)
    except MeshwrightError:
        change = nearest_change(config, framework)
        if change is None:
            return ""
        config = with_settings(config, change)
    return settings_of(config, framework).text


def read(text: str, framework: Framework, case: str) -> SettingsReading:
    settings, args, _ = parse("settings" + ENDINGS[framework.form], text)
    assert recognise(settings, args, "settings", framework) is framework
    return understand(framework, settings, args, gpus=CASES[case].gpus, model=CASES[case].model)


def migrated(text: str, source: Framework, target: Framework, case: str, overrides: tuple[str, ...] = ()) -> Migration:
    settings, args, _ = parse("settings" + ENDINGS[source.form], text)
    question = CASES[case]
    return migrate(source, settings, args, target, gpus=question.gpus, model=question.model, overrides=overrides)


def value(reading: SettingsReading, field: str) -> object:
    section, _, name = field.partition(".")
    return getattr(getattr(reading, section), name)


def there_and_back(case: str, a: Framework, b: Framework) -> str:
    """Migrate a case from a to b and back; return "written" or "refused"."""
    text = first_text(case, a.name)
    there = migrated(text, a, b, case)
    if there.refusal is not None:
        assert there.refusal.code
        assert there.refusal.what
        words = shlex.split(there.refusal.fix)
        if words and words[0] == "--set":
            mended = migrated(text, a, b, case, tuple(words[1::2]))
            assert mended.refusal is None, f"the fix {there.refusal.fix} is refused too: {mended.refusal}"
        return "refused"
    assert there.written is not None
    back = migrated(there.written.text, b, a, case)
    assert back.refusal is None, f"{there.written.text}\n{back.refusal}"
    assert back.written is not None
    first, last = read(text, a, case), read(back.written.text, a, case)
    script = {*a.left_to_script, *b.left_to_script}
    changed = {
        f: (value(first, f), value(last, f)) for f in KEPT if value(first, f) != value(last, f) and f not in script
    }
    assert not changed, f"{changed}\n{text}\n{there.written.text}\n{back.written.text}"
    return "written"


PAIRS = [(a, b) for a in FRAMEWORKS for b in FRAMEWORKS if a != b]
HALF = [(a, b) for i, a in enumerate(FRAMEWORKS) for j, b in enumerate(FRAMEWORKS) if (i + j) % 2]


@pytest.mark.parametrize("case", DAILY)
def test_half_of_the_pairs_make_a_round_trip(case: str) -> None:
    """Half of the pairs, each framework in both places, with one of these cases."""
    pairs = HALF[DAILY.index(case) :: len(DAILY)]
    assert [there_and_back(case, FRAMEWORKS[a], FRAMEWORKS[b]) for a, b in pairs if first_text(case, a)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_round_trips_keep_degrees_batch_precision_and_recompute(case: str) -> None:
    """Every pair with every case."""
    results = [there_and_back(case, FRAMEWORKS[a], FRAMEWORKS[b]) for a, b in PAIRS if first_text(case, a)]
    assert "written" in results


VALUES = (None, True, 0, 3, 8, -1, 1.5, 10**18, float("nan"), float("inf"), "", "auto", "8", "bf16", [1], {}, date(2026, 1, 1))  # fmt: skip


def test_any_values_are_migrated_or_refused() -> None:
    rng = random.Random(7)
    for name in [*READABLE] * 2:
        source, target = READABLE[name], FRAMEWORKS[rng.choice([*FRAMEWORKS])]
        keys = rng.sample(sorted(source.table.names), min(len(source.table.names), rng.randint(1, 20)))
        model = rng.choice(("", "llama3-8b", "mixtral-8x7b"))
        try:
            result = migrate(
                source, {key: rng.choice(VALUES) for key in keys}, [], target, gpus=rng.choice((8, 64)), model=model
            )
        except MeshwrightError:
            continue
        json.dumps(result.as_dict(), allow_nan=False)


# --- Published recipes: every key of the source is in one of the three lists, and a change of a carried key changes what is written.

RECIPES = random.Random(38).sample(list(rows(Path(__file__).parent / "recipes.jsonl")), 40)


def of_recipe(row: dict[str, Any], target: str, settings: dict[str, Any], overrides: tuple[str, ...] = ()) -> Migration:
    source = find(row["framework"])
    assert source is not None
    return migrate(
        source, settings, [], FRAMEWORKS[target], gpus=row.get("gpus") or 64, model=row.get("model") or "", shape=row.get("shape"),
        overrides=overrides,
    )  # fmt: skip


def written_recipes(number: int) -> Iterator[tuple[dict[str, Any], str, dict[str, Any], tuple[str, ...], Migration]]:
    """Recipes for three targets each, with the change that a refusal offers."""
    for row in RECIPES[:number]:
        source = find(row["framework"])
        assert source is not None
        settings = merged_settings(source, row.get("settings") or {}, [str(word) for word in row.get("args") or []])
        for target in random.Random(row["id"]).sample([name for name in FRAMEWORKS if name != source.name], 3):
            overrides: tuple[str, ...] = ()
            result = of_recipe(row, target, settings)
            if result.refusal and result.refusal.fix.startswith("--set"):
                overrides = tuple(shlex.split(result.refusal.fix)[1::2])
                result = of_recipe(row, target, settings, overrides)
            yield row, target, settings, overrides, result


@pytest.mark.parametrize("number", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_every_key_of_a_recipe_is_accounted_for(number: int) -> None:
    results = list(written_recipes(number))
    for row, target, settings, _, result in results:
        if result.refusal is None:
            lists = [key.key for key in (*result.carried, *result.lost)] + result.other
            assert set(settings) <= set(lists), f"{row['id']} to {target}: {set(settings) - set(lists)}"
            assert len(set(lists)) == len(lists)
            assert all(key.target for key in result.lost)
    assert sum(result.refusal is None for *_, result in results) >= number


@pytest.mark.slow
def test_a_carried_degree_batch_or_length_is_in_what_is_written() -> None:
    """Twice the value of such a key gives other settings, or a refusal."""
    facts = {"tp", "cp", "pp", "ep", "microbatch", "batch", "seq", "model.layers", "model.hidden", "learning_rate"}
    tried = 0
    for row, target, settings, overrides, result in written_recipes(40):
        sources = {key: fact for fact, key in result.source.understood.sources.items()}
        for key in result.carried:
            if sources.get(key.key) in facts and isinstance(plain(key.value), int | float) and result.written:
                tried += 1
                changed = of_recipe(row, target, {**settings, key.key: 2 * plain(key.value)}, overrides)
                same = changed.written is not None and changed.written.settings == result.written.settings
                assert not same, f"{row['id']} to {target}: {key.key} = {key.value}"
    assert tried > 200


def test_a_line_names_the_keys_of_what_a_value_states() -> None:
    """A key with several meanings counts by those that its value has; a named model goes to a framework that states shapes by its shape."""
    bridge, automodel = FRAMEWORKS["megatron-bridge"], FRAMEWORKS["automodel"]
    settings = {
        "optimizer.optimizer": "adam",
        "ddp.use_distributed_optimizer": False,
        "optimizer.use_distributed_optimizer": False,
        "model.tensor_model_parallel_size": 8,
    }
    found = {
        key.key: key.target for key in migrate(bridge, settings, [], automodel, gpus=8, model="llama3.1-70b").carried
    }
    assert "strategy" not in found["optimizer.optimizer"]
    titan = {"model.name": "llama3", "model.flavor": "8B", "training.seq_len": 8192}
    carried = migrate(FRAMEWORKS["torchtitan"], titan, [], FRAMEWORKS["megatron-lm"], gpus=64).carried
    assert {key.key: key.target for key in carried}["model.flavor"] == "by the shape of the model"
