"""Settings that were migrated go through the target's own parser, and what it parsed is the plan.

A sample of the cases of cases.py, each from the settings of another framework; `make test-frameworks` runs it.
"""

import random
from functools import cache
from typing import Any

import pytest
from cases import expected, facts_of, flags_of
from environments import VERSIONS, drive

from interop.test_migrate import PLANS, first_text, migrated
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.migrated_keys import Migration
from meshwright.view.launch_files.megatron import variables

NUMBER = 10  # migrations for each environment


@cache
def sample(target: str) -> dict[str, Migration]:
    """Migrations to a framework, by case and source."""
    pairs = [(case, source) for case in PLANS for source in FRAMEWORKS if source != target and first_text(case, source)]
    random.Random(target).shuffle(pairs)
    out: dict[str, Migration] = {}
    for case, source in pairs:
        result = migrated(first_text(case, source), FRAMEWORKS[source], FRAMEWORKS[target], case)
        if result.written is not None:
            out[f"{case} from {source}"] = result
        if len(out) == NUMBER:
            break
    return out


@cache
def answers(environment: str) -> dict[str, dict[str, Any]]:
    framework = FRAMEWORKS[VERSIONS[environment]["writes"]]
    jobs = {}
    for name, result in sample(framework.name).items():
        assert result.written is not None
        text = result.written.text
        is_flags = framework.form == "args"
        jobs[name] = {
            **facts_of(result.config),
            "words": flags_of(text) if is_flags else [],
            "text": "" if is_flags else text,
            "variables": dict.fromkeys(variables(result.config.plan) if is_flags else (), "1"),
        }
    return drive(environment, jobs)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("environment", [name for name, entry in VERSIONS.items() if "writes" in entry])
def test_a_framework_parses_migrated_settings(environment: str) -> None:
    all_answers = answers(environment)
    if "" in all_answers:
        pytest.skip(all_answers[""]["refused"])
    migrations = sample(VERSIONS[environment]["writes"])
    assert len(migrations) == NUMBER
    for name, result in migrations.items():
        answer, plan = all_answers[name], expected(result.config)
        assert "refused" not in answer, f"{name}: {answer['refused']}"
        if "skipped" in answer:
            continue
        script = {field.partition(".")[2] for field in result.target.left_to_script}
        parsed = {key: value for key, value in answer.items() if key in plan and key not in script}
        assert parsed == {key: plan[key] for key in parsed}, name
