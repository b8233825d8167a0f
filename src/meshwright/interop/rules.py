"""Settings that frameworks refuse when they start, as rows of one table.

Each row is a check of the framework's own source: Megatron-LM's `validate_args` and Megatron-Core's `TransformerConfig`
         and `OptimizerConfig` (0.16, 0.19),
Megatron-Bridge's `ConfigContainer.validate` (0.6), torchtitan's parallel dimensions, pipeline
         and converters (0.2, 0.3), DeepSpeed's config (0.19), accelerate's
`ParallelismConfig` and FSDP plug-in (1.15), axolotl's schemas (0.19), LLaMA-Factory's parser (0.9), ms-swift's arguments (4.6), TRL's
         and Transformers'
configs (1.16, 5.23), Automodel's meshes (0.7) and nanotron's config (0.4), OLMo-core's meshes and train modules (July 2026),
verl's workers (January 2026) and NeMo-RL's policies (August 2026). A row needs no default of another option to be certain: a missing
option never breaks a rule. Options are named by the last part of their key, so that `--recompute-method` and `model.recompute_method` share a row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.interop.keys import Facts, Framework, SettingsProblem, plain

VIRTUAL = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "vp_size")


@dataclass(frozen=True)
class SettingsOptions:
    """Settings by the last part of their names, and the facts that they state."""

    settings: Mapping[str, Any]  # by their full names
    values: Mapping[str, Any]
    facts: Facts

    @classmethod
    def of(cls, settings: Mapping[str, Any], facts: Facts) -> SettingsOptions:
        return cls(settings, {_short(name): plain(value) for name, value in settings.items()}, facts)

    def __getitem__(self, name: str) -> Any:
        """The value of an option; None if it is not set. FSDP's options may have the prefix `fsdp_`."""
        return self.values.get(name, self.values.get(f"fsdp_{name}"))

    def at(self, path: str) -> Any:
        """The value of an option by its full name; None if it is not set."""
        return plain(self.settings.get(path))

    def count(self, path: str) -> int:
        """A whole number by its full name; 0 where it is not set."""
        value = self.at(path)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def on(self, *names: str) -> bool:
        """Whether one of the options is set to something other than off, zero or nothing."""
        return any(self[name] not in (None, False, 0, "", "none", "None", "no", []) for name in names)

    def both(self, *names: str) -> bool:
        return all(self.on(name) for name in names)

    def has(self, name: str, *words: str) -> bool:
        """Whether an option that is a list, or text with separators, has one of these entries."""
        value = self[name]
        entries = value if isinstance(value, list) else str(value or "").replace("/", " ").replace(",", " ").split()
        return bool({str(entry).strip("[]'\"") for entry in entries} & set(words))

    def degree(self, name: str) -> int:
        """A degree of parallelism; 1 where it is not stated."""
        value = self.facts.get(name) or 1
        return value if isinstance(value, int) else 1

    def number(self, name: str) -> int:
        """A whole number; 0 where it is not set."""
        value = self[name]
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    @property
    def full(self) -> bool:
        return self["recompute_granularity"] == "full" and not self.on("recompute_activations")

    @property
    def selective(self) -> bool:
        return self["recompute_granularity"] == "selective" or self.on("recompute_activations")

    @property
    def virtual(self) -> int:
        return max(self.number(name) for name in VIRTUAL)

    @property
    def levels(self) -> list[int]:
        """Sizes of the levels of hierarchical context parallelism."""
        stated = self["hierarchical_context_parallel_sizes"]
        words = stated if isinstance(stated, list) else str(stated or "").replace(",", " ").split()
        return [int(w) for w in (str(word).strip("[],") for word in words) if w.isdigit()]

    @property
    def has_fsdp(self) -> bool:
        """Whether a block of FSDP is there."""
        return any(
            name.startswith("fsdp") and value not in (None, False, "", []) for name, value in self.settings.items()
        )

    @property
    def fsdp2(self) -> bool:
        return str(self["version"]) == "2" and (self.facts.get("sharding") or "none") != "none"


@dataclass(frozen=True)
class Rule:
    """One check: where it holds, when it is broken, and the words. `{pp}` in them is a degree."""

    where: tuple[str, ...]
    when: Callable[[SettingsOptions], Any]
    what: str
    why: str
    fix: str
    code: str = "MW-SET-009"
    severity: Literal["error", "warning", "note"] = "error"


def check_rules(
    rules: tuple[Rule, ...], facts: Facts, framework: Framework, settings: Mapping[str, Any]
) -> Iterator[SettingsProblem]:
    """Return what the framework refuses."""
    options = SettingsOptions.of(settings, facts)
    stated = {**facts, **options.values}.items()
    known = {name: value for name, value in stated if isinstance(value, int | str)}
    known |= {name: ", ".join(map(str, value)) for name, value in stated if isinstance(value, list)}
    levels = f"{' × '.join(map(str, options.levels))} = {math.prod(options.levels)}"
    numbers = {"tokens": f"{facts.get('seq') or 0:,}", "positions": f"{facts.get('model.max_positions') or 0:,}"}
    degrees = {axis: options.degree(axis) for axis in ("tp", "pp", "cp", "ep")}
    words = defaultdict(lambda: "?", known | numbers | degrees | {"levels": levels, "virtual": options.virtual})
    for rule in rules:
        if framework.name in rule.where and rule.when(options):
            what, why, fix = (text.format_map(words) for text in (rule.what, rule.why, rule.fix))
            yield SettingsProblem(rule.code, what, why, fix, rule.severity)


def _short(name: str) -> str:
    return name.lstrip("-").rpartition(".")[2].replace("-", "_")
