"""A question to the planner: the problem, the allowed choices, and the memory to leave free.

Names, tables, objects or files describe model, cluster and stack; words such as `tp=8` constrain the search. `--set plan.tp=8` is a
constraint too, since the planner chooses the plan; every other `--set` describes the problem.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

from meshwright.describe import legality
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Asked, Config
from meshwright.describe.own_stack import OWN_STACKS, is_typical
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.interop.files import configure, optimal_tokens_words
from meshwright.interop.frameworks import framework_named
from meshwright.interop.keys import Framework
from meshwright.interop.write import is_runnable
from meshwright.planner.search import choices as search_choices
from meshwright.planner.search.choices import Choices
from meshwright.planner.search.common_plans import HEADROOM
from meshwright.planner.search.space import Space

OWN_TRAINER = "Meshwright's own trainer"
ANY_FRAMEWORK = "any framework, at typical speed"
# Fields of a given plan that the search does not keep: they belong to its degrees, or (local SGD) to another algorithm.
DROPPED = ("layers_per_stage", "recompute_every", "recompute_layers", "recompute_budget", "average_every")
Words = Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A question: the configuration, the plan fields that are not searched, the allowed choices, the free share of memory."""

    config: Config
    base: Plan
    choices: Choices
    headroom: float
    framework: Framework | None = None  # whose settings must be able to state the plan

    def space(self, cluster: Cluster | None = None, choices: Choices | None = None) -> Space:
        """The legal plans of this question, perhaps on another cluster or with other choices."""
        c = self.config.but(cluster=cluster or self.config.cluster, plan=self.base)
        bucket = self.config.plan.bucket if "plan.bucket" in c.origins else 0.0  # 0: a size for each plan
        choices = choices or self.choices
        if self.framework:
            choices = replace(choices, writable=partial(is_runnable, c, self.framework))
        return Space(c, choices, bucket)


def read(
    model: Any,
    cluster: Any = "",
    *,
    fix: Words = (),
    most: Words = (),
    least: Words = (),
    without: Sequence[str] = (),
    allow: Words = (),
    headroom: str | float = HEADROOM,
    framework: Framework | str = "",
    **asked: Unpack[Asked],
) -> Question:
    """The question in the arguments of `plan`."""
    target = framework_named(framework) if isinstance(framework, str) and framework else framework or None
    if target and not asked.get("stack"):
        asked["stack"] = target.stack
    asked["set"], fixed = split_settings(asked.get("set", ()))
    config = configure(model, cluster, **asked)
    if target:
        target.model_settings(config.model)  # raises if the framework does not have the model
    base = base_plan(config)
    constraints = search_choices.read([*words(fix), *fixed], words(most), words(least), without, words(allow))
    options = search_choices.choices(base, constraints, tuple(config.stack.order))
    if "plan.offload" in config.origins:  # the given plan decides
        options = replace(options, offload=False)
    config = config.but(assumed=assumptions(config, asked.get("stack")))
    return Question(config, base, options, read_share(headroom), target)


def base_plan(config: Config) -> Plan:
    """Keep the fields of the user's plan that are not searched: dtypes, overlap and others."""
    fields = {
        name: value
        for name, value in config.plan.as_dict().items()
        if name not in search_choices.SEARCHED or name in (*search_choices.DTYPES, "overlap")
    }
    for name in DROPPED:
        fields.pop(name, None)
    if "plan.grad_dtype" not in config.origins:
        precision = config.workload.precision
        fields["grad_dtype"] = config.stack.accumulation_dtype(precision)
        reduced = config.stack.reduced_dtype(precision)
        if "plan.comm_dtype" not in config.origins and reduced != fields["grad_dtype"]:
            fields["comm_dtype"] = reduced
    return Plan(**fields)


def assumptions(config: Config, stack: Any) -> tuple[str, ...]:
    """Defaults that the answer depends on."""
    sizes = (("batch", "batch"), ("seq", "sequence length"))
    assumed = [
        f"{what}: {getattr(config.workload, name):,}"
        for name, what in sizes
        if f"workload.{name}" not in config.origins and (name != "seq" or config.model.unit == "tokens")
    ]
    if not ("stack.name" in config.origins and stack):
        assumed.append(f"training stack: {config.stack.name}")
    return (*optimal_tokens_words(config), *assumed)


def runs_in(config: Config) -> str:
    """Name what runs the plan: the stack's framework; our trainer, with the parts of the plan that it does not run; or any framework."""
    if is_typical(config.stack):
        return ANY_FRAMEWORK
    if config.stack.name not in OWN_STACKS:
        return config.stack.can.framework or config.stack.name
    error = legality.not_trained(config.plan, config.model, config.workload, config.stack)
    return OWN_TRAINER if error is None else f"{OWN_TRAINER}, modelled only: {error.what}"


def split_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate settings that describe the problem from settings of searched plan fields, which are constraints."""
    searched = {f"plan.{name}" for name in search_choices.SEARCHED}
    fixed = [word.strip().removeprefix("plan.") for word in settings if word.partition("=")[0].strip() in searched]
    return [word for word in settings if word.partition("=")[0].strip() not in searched], fixed


def words(constraints: Words) -> list[str]:
    """`{"tp": 8}` as `tp=8`; strings stay unchanged."""
    if isinstance(constraints, str):
        return [constraints]
    if isinstance(constraints, Mapping):
        return [f"{name}={_word(value)}" for name, value in constraints.items()]
    return list(constraints)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def read_share(text: str | float, option: str = "--memory-headroom") -> float:
    """A share from "10%", "0.1" or 0.1."""
    try:
        value = float(text[:-1]) / 100 if isinstance(text, str) and text.strip().endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        what = f"{option[2:].replace('-', ' ')} {str(text)[:40]!r} is not a share"
        raise MeshwrightError("MW-PLANNER-006", what, valid=["0%", "5%", "10%", "0.1"], fix=f"{option} 10%")
    return value
