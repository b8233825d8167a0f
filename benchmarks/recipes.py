"""How many published mistakes `lint --recipes` finds, and how many misspelt keys it notices.

    python benchmarks/recipes.py PAIRS.jsonl RECIPES.jsonl

A pair is found if the wrong version is flagged for its reason (illegal, does not fit, slow) and the corrected one is not. The pairs are split by a
hash of the mistake's number: rules were written while looking at the first half (`build`), the second (`held`) only counts.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.interop.frameworks import find
from meshwright.interop.reading import merged_settings
from meshwright.planner.advice.lint.recipes import judge

WRONG = {"illegal": lambda v: v.legal is False, "does not fit": lambda v: v.fits is False, "slow": lambda v: v.slow}


def half(number: object) -> str:
    """The half of a mistake: by the parity of the SHA-256 of its number."""
    return ("build", "held")[hashlib.sha256(str(number).encode()).digest()[-1] % 2]


def is_found(pair: dict[str, Any]) -> bool:
    """Whether the wrong version is flagged for the expected reason, and the corrected one is not."""
    wrong = WRONG[pair["expected"]]
    before, after = (judge({**pair[k], "id": k}) if pair[k] else None for k in ("before", "after"))
    return bool(wrong(before)) and not (after and wrong(after))


def misspelt(name: str, rng: random.Random) -> str:
    """The name of a key with one letter of its last part left out, doubled or replaced."""
    start = name.rfind(".") + 1
    letters = [i for i in range(start, len(name)) if name[i].isalpha()]
    at = rng.choice(letters)
    return rng.choice(
        (name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], name[:at] + "qjxz"[at % 4] + name[at + 1 :])
    )


def unnoticed(recipe: dict[str, Any], rng: random.Random) -> Iterator[tuple[str, bool]]:
    """For every key of a recipe, misspelt by one letter: the misspelling, and whether it was reported as unknown."""
    framework = find(recipe["framework"])
    if framework is None:
        return
    settings = merged_settings(framework, recipe.get("settings") or {}, recipe.get("args") or [])
    for name in settings:
        if sum(c.isalpha() for c in name.rpartition(".")[2]) > 2:
            wrong = misspelt(name, rng)
            yield (
                f"{framework.name}: {wrong}",
                wrong not in framework.table.names and framework.table.kind_of(wrong) == "unknown",
            )


def main(pairs: str, recipes: str, sample: int = 40) -> None:
    """Print both counts; with -v also the misspellings that were not noticed."""
    rows = [json.loads(line) for line in Path(pairs).read_text("utf-8").splitlines()]
    total: Counter[tuple[str, str]] = Counter()
    found: Counter[tuple[str, str]] = Counter()
    for pair in rows:
        kind = half(pair["mistake"]["n"]), pair["expected"]
        total[kind] += 1
        found[kind] += is_found(pair)
    for kind in sorted(total):
        print(f"{kind[0]:6} {kind[1]:13} {found[kind]} of {total[kind]}")
    rng = random.Random(0)
    published = [json.loads(line) for line in Path(recipes).read_text("utf-8").splitlines()]
    keys = [each for recipe in rng.sample(published, sample) for each in unnoticed(recipe, rng)]
    print(f"misspelt keys noticed: {sum(noticed for _, noticed in keys)} of {len(keys)}")
    if "-v" in sys.argv:
        print(*sorted(name for name, noticed in keys if not noticed), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
