"""`meshwright show`: draw collectives and pipeline schedules, and print reference tables.

    meshwright show                                        the list of all topics
    meshwright show zero --help                            the options of one topic
    meshwright show all-reduce --ranks 4 --values          the ring, with the values on every rank
    meshwright show all-reduce --compare --ranks 64 --cluster dgx-h100
    meshwright show step plan.toml                         the operations of a plan's training step
    meshwright show crossover --alpha 1us --bandwidth 450GB/s    closed forms on your own numbers (mw.formulas)
    meshwright show ranks plan.toml                        the process groups of a plan
    meshwright show all-reduce --values 1,2,3,4            the ring on your own values
    meshwright show 1f1b --stages 4 --microbatches 8 --compare gpipe,zbv

`--compare` is a flag; the names after it are a second positional argument, so that they can be omitted.
"""

from collections.abc import Iterable
from typing import Any, TypedDict, Unpack

import typer

from meshwright import api
from meshwright.cli.options import described
from meshwright.cli.output import writable
from meshwright.view.show.options import LESSON, NUMBERS, PIPELINES, STEP, refuse_unused, refuse_zero
from meshwright.view.show.topics import TOPICS, kind_of, list_topics, module_of, options_of, sort_arguments
from meshwright.view.tables import show as print_out
from meshwright.view.tables import show_json

EVERY_TOPIC = ("topic", "as_json")


class NumberOptions(TypedDict):
    """The user's own numbers, for closed forms."""

    alpha: str
    bandwidth: str
    peak: str
    batch: int
    seq: int
    precision: str
    parameters: str
    memory: str
    gradients: str
    backward: str
    layers: int
    tokens: int
    hidden: int
    tp: int
    layer_time: str
    schedule: str
    rate: str
    overhead: str


@described
def command(
    context: typer.Context,
    topic: str = "",
    names: str = "",
    compare: bool = False,
    algorithm: str = "",
    ranks: int = 0,
    size: str = "",
    cluster: str = "",
    elements: int = -1,
    root: int = -1,
    segments: int = 0,
    node: int = 0,
    values: bool = False,
    stages: int = 4,
    microbatches: int = 8,
    virtual: int = 0,
    trace: str = "",
    html: str = "",
    as_json: bool = False,
    **numbers: Unpack[NumberOptions],
) -> None:
    """Show a collective, a pipeline schedule, the step of a plan or a reference table. Without a topic: list all topics."""
    if not topic:
        return list_topics(as_json)
    writable(html, trace)
    topic, names, compare = sort_arguments(topic.lower(), names, compare, values)
    kind, typed = kind_of(topic), explicit_options(context)
    refuse_unused(topic, kind, typed, options_of(topic))
    return show_kind(kind, topic, typed, {**context.params, "names": names, "compare": compare})


def show_kind(kind: str, topic: str, typed: dict[str, Any], options: dict[str, Any]) -> None:
    """Show a topic of a kind. `typed` are the options on the command line, `options` all."""
    names, as_json = options["names"], options["as_json"]
    if kind == STEP:
        from meshwright.view.show.step import plan_file, show_step

        return show_step(api.estimate(plan=plan_file(names)), as_json)
    if kind == NUMBERS:
        from meshwright.view.show import number_tables, numbers

        found = numbers.data(topic, typed, api.estimate(plan=names) if names else None)
        return show_json(found) if as_json else print_out(*number_tables.page(topic, found))
    refuse_zero(typed)
    if kind == LESSON:
        lesson = module_of(topic)
        return show_json(lesson.data(topic)) if as_json else print_out(*lesson.page(topic))
    if kind == PIPELINES:
        from meshwright.view.show import pipelines

        return pipelines.show(
            topic,
            stages=options["stages"],
            microbatches=options["microbatches"],
            virtual=options["virtual"] or None,
            compare=names if options["compare"] else None,
            html=options["html"] or None,
            trace=options["trace"] or None,
            json_out=as_json,
        )
    from meshwright.view.show.collectives import CollectiveRequest, show

    return show(
        CollectiveRequest(topic, **{name: options[name] for name in CollectiveRequest._fields if name in options})
    )


def explicit_options(context: typer.Context) -> dict[str, Any]:
    """Return the options on the command line, in order, except those that every topic accepts."""
    named = {name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    return {name: value for name, value in context.params.items() if name in named - set(EVERY_TOPIC)}


def hide_unused(parameters: Iterable[Any], words: Iterable[str]) -> None:
    """Leave out of the help the options that the topic among the words does not use."""
    for topic in (word.lower() for word in words if word.lower() in TOPICS):
        for parameter in parameters:
            parameter.hidden = parameter.name not in {*options_of(topic), *EVERY_TOPIC}
