"""The topics of `meshwright show`, and the data of one topic: what `--json` prints and /api/show answers."""

import importlib
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.describe import catalog
from meshwright.errors import MeshwrightError, shown, unknown
from meshwright.errors import kind_of as kind_of_value
from meshwright.programs.collectives import ALGORITHMS, OPERATIONS
from meshwright.programs.collectives.formulas import text as formula
from meshwright.programs.pipelines import SCHEDULES
from meshwright.view.show import collectives, numbers, pipelines
from meshwright.view.show.collective_request import CollectiveRequest
from meshwright.view.show.options import COLLECTIVES, LESSON, NUMBERS, PIPELINES, STEP, refuse_unused, unused
from meshwright.view.tables import filled, heading, show, show_json

LESSONS = {
    "strategies": "what each parallelism splits, which collective it needs, when, how many bytes, and when to use it",
    "column-parallel": "a matrix product split by columns over two GPUs, with the numbers",
    "row-parallel": "the same product split by rows, with the numbers",
    "formats": "number formats from fp32 to fp4: bits, range, precision, use",
}
# The options of a topic that another program may send, with their defaults; none names a file.
OPTIONS: dict[str, Any] = {
    **{name: default for name, default in CollectiveRequest._field_defaults.items() if name not in ("html", "as_json")},
    "stages": 4, "microbatches": 8, "virtual": 0,
    **{name: default for options in numbers.OPTIONS.values() for name, default in options.items()},
}  # fmt: skip
USED = {
    COLLECTIVES: {*CollectiveRequest._field_defaults} - {"as_json"},
    PIPELINES: {"names", "compare", "stages", "microbatches", "virtual", "trace", "html"},
    LESSON: set(),
    STEP: {"names"},
}
TOPICS = ("step", *OPERATIONS, *SCHEDULES, *numbers.TOPICS, *LESSONS)
USAGE = {
    "Collectives": "all-reduce --algorithm ring --ranks 4 [--values] [--html F] [--compare]",
    "Pipeline schedules": "1f1b --stages 4 --microbatches 8 [--compare gpipe,zbv] [--html F]",
    "Step program": "step PLAN",
    "Calculators": "crossover --alpha 1us --bandwidth 450GB/s",
    "Lessons": "strategies",
}
LETTERS = "n: bytes of the full buffer, P = N·g ranks in N nodes, k segments, α latency, β = 1/bandwidth, γ time to add a byte\n"
ABOUT_STEP = (
    "every operation of one training step of a plan file; with --json the value that `verify` compares with a run\n"
)
MOST = 4096  # ranks, stages, micro-batches, elements or segments of one answer


def sort_arguments(topic: str, names: str, compare: bool, values: bool = False) -> tuple[str, str, bool]:
    """Swap topic and names if they came as `--compare ring,tree all-reduce`; names also mean compare, except behind --values."""
    if "," in topic and names:
        topic, names = names.lower(), topic
    return topic, names, compare or (bool(names) and not values)


def options_of(topic: str) -> set[str]:
    """The options that a topic uses, besides --json."""
    kind = kind_of(topic)
    return set(numbers.OPTIONS[topic]) if kind == NUMBERS else USED[kind]


def kind_of(topic: str) -> str:
    """Return the kind of a topic; an unknown topic raises an error that suggests a similar one."""
    if topic == "step":
        return STEP
    if topic in LESSONS:
        return LESSON
    if topic in numbers.TOPICS:
        return NUMBERS
    if topic in OPERATIONS:
        return COLLECTIVES
    if any(topic in (name, *known.aliases) for name, known in SCHEDULES.items()):
        return PIPELINES
    raise unknown("MW-SHOW-001", "topic", topic, TOPICS, "meshwright show {}")


def module_of(lesson: str) -> Any:
    """The module of a lesson; those of the two matrix products are one."""
    name = {"column-parallel": "matrices", "row-parallel": "matrices"}.get(lesson, lesson)
    return importlib.import_module(f"meshwright.view.show.{name}")


def data(topic: str, options: dict[str, Any]) -> Any:
    """Return what `meshwright show TOPIC … --json` prints; without a topic, the list of topics. Clusters are those of the catalog."""
    if not topic:
        return all_topics()
    kind = kind_of(topic := topic.lower())
    values = {name: checked(name, value) for name, value in options.items()}
    no_file = {"names"} if kind in (NUMBERS, STEP) else set()  # plans are those of the page's views
    refuse_unused(topic, kind, values, options_of(topic) - no_file)
    if kind == STEP:
        raise unused("step", "a request names no file")
    if kind == NUMBERS:
        return numbers.data(topic, values)
    if kind == LESSON:
        return module_of(topic).data(topic)
    if kind == PIPELINES:
        compared = values.get("names", "") if values.get("compare") or values.get("names") else None
        names = pipelines.names(topic, compared)
        sizes = values.get("stages", 4), values.get("microbatches", 8), values.get("virtual") or None
        return pipelines.data([pipelines.walked_for(name, *sizes) for name in names])
    own = bool(values.get("values"))
    compare = bool(values.pop("compare", False) or (values.get("names") and not own))
    return collectives.data(CollectiveRequest(topic, compare=compare, **values))


def checked(name: str, value: Any) -> Any:
    """An option of the type of its default, within bounds."""
    if name not in OPTIONS:
        raise unknown("MW-SHOW-003", "option", name, OPTIONS)
    default = OPTIONS[name]
    if type(value) is not type(default):
        why = f"It must be {kind_of_value(default)}"
        raise MeshwrightError("MW-SHOW-003", f"{name} = {shown(value)} is not valid", why=why)
    if name == "cluster" and value:
        catalog.load("clusters", value)  # raises for a name that is not there, such as a path
    if isinstance(value, int) and not -1 <= value <= MOST:
        raise MeshwrightError("MW-SHOW-003", f"{name} = {value} is not valid", why=f"It must be at most {MOST:,}")
    return value


def all_topics() -> dict[str, Any]:
    """Return what `meshwright show --json` prints."""
    topics = {name: {"about": OPERATIONS[name], "algorithms": list(named)} for name, named in ALGORITHMS.items()}
    return {
        "collectives": topics,
        "pipelines": {name: rule.about for name, rule in SCHEDULES.items()},
        "calculators": numbers.TOPICS,
        "lessons": LESSONS,
    }


def list_topics(as_json: bool = False) -> None:
    """Print the collectives with their algorithms and costs, the schedules and the lessons."""
    if as_json:
        show_json(all_topics())
        return
    rows = []
    for operation, named in ALGORITHMS.items():
        for k, name in enumerate(named):
            first = (Text(operation, "bold"), Text(OPERATIONS[operation], "dim")) if k == 0 else ("", "")
            rows.append((*first, Text(name, "cyan"), Text(formula(operation, name), "dim")))
    collectives = filled(["operation", "what", "algorithm", "time on a uniform network"], rows)

    def listed(kind: str, about: dict[str, str]) -> Table:
        return filled([kind, "what"], [(Text(name, "bold"), Text(words, "dim")) for name, words in about.items()])

    bodies: tuple[tuple[RenderableType, ...], ...] = (
        (collectives, Text(LETTERS, "dim")),
        (listed("schedule", {name: rule.about for name, rule in SCHEDULES.items()}),),
        (Text(ABOUT_STEP, "dim"),),
        (listed("calculator", numbers.TOPICS),),
        (listed("lesson", LESSONS),),
    )
    for (title, usage), body in zip(USAGE.items(), bodies, strict=True):
        show(heading(title, f"meshwright show {usage}"), *body)
