"""How many published mistakes `lint --recipes` finds, and how many misspelt keys it notices.

    python benchmarks/recipes.py [PAIRS.jsonl] [RECIPES.jsonl] [-v]

A pair is found if the wrong version is flagged for its reason (illegal, does not fit, slow) and the corrected one is not. The pairs are split by a
hash of the mistake's number: rules were written while looking at the first half (`build`), the second (`held`) only counts. `recipe_threads.jsonl`
has further mistakes, from public threads (`threads`): written down with the error message before the first run on them; `second` ones were
added after the misses of the first had been mended, and nothing was mended for them; `third` ones were written down before a first run, too.
"""

import argparse
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.interop.frameworks import find
from meshwright.interop.reading import merged_settings
from meshwright.planner.advice.lint.recipes import judge

HERE = Path(__file__).parent
# The fields of a plan that a reason is about: a faster value of one of them, found by the costs (MW-LINT-020), names the same mistake.
FIELDS = {
    "MW-LINT-001": ("tp",), "MW-LINT-005": ("microbatch",), "MW-LINT-007": ("zero", "shard", "replicate", "reshard"), "MW-LINT-014": ("recompute",),
    "MW-LINT-016": ("overlap",), "MW-LINT-018": ("offload",),
}  # fmt: skip
WRONG = {"illegal": lambda v: v.legal is False, "does not fit": lambda v: v.fits is False, "slow": lambda v: v.slow}


def half(number: object) -> str:
    """The half of a mistake: by the parity of the SHA-256 of its number."""
    return ("build", "held")[hashlib.sha256(str(number).encode()).digest()[-1] % 2]


def is_found(pair: dict[str, Any]) -> bool:
    """Whether the wrong version is flagged for the expected reason, and the corrected one is not. A slow pair may name the code of its reason: a
    corrected version may be slow for another one."""
    wrong = WRONG[pair["expected"]]
    if code := pair.get("reason"):
        wrong = lambda verdict: verdict.slow and any(has_reason(f, code) for f in verdict.findings)  # noqa: E731
    before, after = (judge({**pair[k], "id": k}) if pair[k] else None for k in ("before", "after"))
    return bool(wrong(before)) and not (after and wrong(after))


def has_reason(finding: dict[str, Any], code: str) -> bool:
    """Whether a finding has a code, or names a faster value of a field that the code is about."""
    by_costs = finding["code"] == "MW-LINT-020" and any(
        f"plan.{name}=" in finding["fix"] for name in FIELDS.get(code, ())
    )
    return finding["code"] == code or by_costs


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


def count_mistakes(rows: list[dict[str, Any]], name: str, verbose: bool) -> None:
    """Print how many mistakes of each kind are found; `name` is that of the set, or empty for the halves of the pairs."""
    total: Counter[tuple[str, str]] = Counter()
    found: Counter[tuple[str, str]] = Counter()
    for pair in rows:
        kind = pair.get("set") or name or half(pair["mistake"]["n"]), pair["expected"]
        total[kind] += 1
        found[kind] += (is_mistake_found := is_found(pair))
        if verbose and name and not is_mistake_found:
            print(f"  missed: {pair['source']}: {pair['why']}")
    for kind in sorted(total):
        print(f"{kind[0]:8} {kind[1]:13} {found[kind]} of {total[kind]}")


def main(pairs: Path, recipes: Path, verbose: bool, sample: int = 40) -> None:
    """Print both counts; `verbose` also prints the threads and the misspellings that were missed."""
    count_mistakes(_rows(pairs), "", verbose)
    count_mistakes(_rows(HERE / "recipe_threads.jsonl"), "threads", verbose)
    rng = random.Random(0)
    published = _rows(recipes)
    keys = [each for recipe in rng.sample(published, min(sample, len(published))) for each in unnoticed(recipe, rng)]
    print(f"misspelt keys noticed: {sum(noticed for _, noticed in keys)} of {len(keys)}")
    if verbose:
        print(*sorted(name for name, noticed in keys if not noticed), sep="\n")


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pairs", nargs="?", type=Path, default=HERE.parent / "tests/interop/mistakes.jsonl")
    parser.add_argument("recipes", nargs="?", type=Path, default=HERE.parent / "tests/interop/recipes.jsonl")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what was missed")
    options = parser.parse_args()
    main(options.pairs, options.recipes, options.verbose)
