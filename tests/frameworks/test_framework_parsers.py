"""What Meshwright writes for a framework goes through the framework's own parser, and what it parsed is the plan.

`make test-frameworks` runs this; `make test` does not. Every case (cases.py) is planned for the framework, written as `plan --write` and as
`launch` write it, and given to a driver in the framework's environment (environments.py). Large worlds are given by their size alone.
"""

from functools import cache
from typing import Any

import pytest
from cases import CASES, Offer, expected, facts_of, flags_of, offer
from environments import VERSIONS, drive

from meshwright.interop.frameworks import FRAMEWORKS

FORMS = ("write", "launch", "flags")


def job(framework: str, result: Offer, form: str) -> dict[str, Any]:
    """A case as a driver reads it: the world, the words of the command line, the text of the settings file, the environment."""
    texts = {"write": result.written, "launch": result.file, "flags": result.flags}
    is_flags = FRAMEWORKS[framework].form == "args" or form == "flags"
    return {
        **facts_of(result.config),
        "words": list(result.words[1:]) if form == "launch" else flags_of(texts[form]) if is_flags else [],
        "text": "" if is_flags else texts[form],
        "variables": dict(result.variables),
    }


@cache
def answers(environment: str) -> dict[str, dict[str, Any]]:
    """What the parser of an environment says of every case and form, by `case/form`."""
    framework = VERSIONS[environment]["writes"]
    offers = {name: offer(name, framework) for name in CASES}
    jobs = {
        f"{name}/{form}": job(framework, result, form)
        for name, result in offers.items()
        for form in FORMS
        if not result.refused and not result.launch_refused and (form != "flags" or result.flags)
    }
    return drive(environment, jobs)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("environment", [name for name, entry in VERSIONS.items() if "writes" in entry])
def test_a_framework_parses_what_the_planner_chose(environment: str, name: str, form: str) -> None:
    result = offer(name, VERSIONS[environment]["writes"])
    if result.refused:
        pytest.skip(f"not offered: {result.refused[:300]}")
    assert not result.launch_refused, result.launch_refused
    if form == "flags" and not result.flags:
        pytest.skip("settings are in a file")
    all_answers = answers(environment)
    if "" in all_answers:
        pytest.skip(all_answers[""]["refused"])
    answer = all_answers[f"{name}/{form}"]
    if "skipped" in answer:
        pytest.skip(answer["skipped"])
    assert "refused" not in answer, answer["refused"]
    plan = expected(result.config)
    assert {key: value for key, value in answer.items() if key in plan} == {
        key: plan[key] for key in answer if key in plan
    }
