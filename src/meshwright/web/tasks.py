"""What the server can compute: one function per task, from a request's body to its answer.

The functions run in worker processes. Each calls what the command of the same name calls, so an answer is what `--json` prints.
"""

import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.predict.estimate import Simulation
from meshwright.units import Json
from meshwright.version import require_torch
from meshwright.view.page.catalog import listing
from meshwright.view.page.choices import choices, mend
from meshwright.view.page.opened import opened
from meshwright.view.page.registry import SEARCH, view
from meshwright.view.page.subject import Subject
from meshwright.view.page.text import texts
from meshwright.view.show import topics
from meshwright.view.simulate import choose_detail, spans
from meshwright.view.trace import trace_events
from meshwright.web.bodies import FileBody, ShowBody, read_plan_file, read_question

Lines = Iterator[Json]
REMEMBERED = 4  # subjects of a worker: switching between views of one configuration does not search again


@lru_cache(maxsize=REMEMBERED)
def _subject(text: str) -> Subject:
    document, question = json.loads(text)
    return Subject(Config.from_document(document), question)


def drop_subjects() -> None:
    """Free the subjects that were computed so far."""
    _subject.cache_clear()


def subject_of(body: Json, question: Json | None = None) -> Subject:
    """The subject of a plan file; requests for the same one share its results."""
    return _subject(json.dumps([read_plan_file(body), question or {}], sort_keys=True))


def simulate(body: Json) -> Json:
    e, walked = subject_of(body).estimate, subject_of(body).walked
    return Simulation(e, walked).as_dict() | {"detail": choose_detail(e, walked)}


def plan(body: Json) -> Json:
    question = read_question(body.get("question") or {})
    return subject_of({k: v for k, v in body.items() if k != "question"}, question).result.as_dict()


def trace(body: Json) -> Json:
    """The simulated step for Perfetto and chrome://tracing."""
    subject = subject_of(body)
    return trace_events(spans(subject.estimate, subject.walked))


def file(body: Json) -> Json:
    """What a file that a person opened is, as sections of a plan file."""
    asked = FileBody.read(body)
    return opened(asked.name, "\n".join(asked.lines), asked.gpus)


def show(body: Json) -> Any:
    """A topic of `meshwright show`."""
    asked = ShowBody.read(body)
    return topics.data(asked.topic, asked.options)


def views(body: Json) -> Lines:
    """The data of several views, one line for each of the `steps` of the body, by default all."""
    subject = subject_of(body["config"], read_question(body.get("question") or {}))
    options = body.get("options") or {}
    for name, final in body.get("steps") or steps(body["views"]):
        yield line(name, subject if final else subject.provisional(), options.get(name) or {}, final)


def steps(names: Iterable[str]) -> list[tuple[str, bool]]:
    """The answers of views in the order in which they are computed, and whether each is final: a searched view is provisional first."""
    searched = [name for name in names if view(name).kind == SEARCH]
    return [*((name, False) for name in searched), *((name, True) for name in names)]


# Tasks that no route names: their bodies have the paths that `web.dropped` wrote files to.


def explain_files(body: Json) -> Json:
    """The data of the view of traced steps, beside the plan that the traces show."""
    from meshwright.explain.beside import beside_plan
    from meshwright.explain.explanation import explain_traces
    from meshwright.explain.folder import read_traces
    from meshwright.view.traces import data

    explanation = explain_traces(read_traces(map(Path, body["files"])))
    return {"view": "traced", "data": data(explanation, beside_plan(explanation))}


def compare_files(body: Json) -> Json:
    """The data of the view of a comparison of recordings."""
    require_torch("comparing recordings")
    from meshwright.check.comparison_view import data_of

    folders = {name: Path(path) for name, path in body["folders"].items()}
    return {"view": "checked", "data": data_of(folders, body["reference"])}


def line(name: str, subject: Subject, options: Json, final: bool = True) -> Json:
    """One line of an answer: the data of a view, or the error in its place."""
    out: Json = {"view": name, "data": None, "final": final, "error": None}
    try:
        out["data"] = view(name).data(subject.with_options(options))
    except MeshwrightError as error:
        out["error"] = error.as_dict()
    except Exception as error:
        # A view may fail on a plan that is illegal here: that is then the error to show. The other views are still computed.
        out["error"] = (problem_of(subject) or internal_error(error)).as_dict()
    return out


def problem_of(subject: Subject) -> MeshwrightError | None:
    """The first rule that the plan breaks here; None where it is legal."""
    try:
        subject.config.check()
    except MeshwrightError as error:
        return error
    return None


def internal_error(error: Exception) -> MeshwrightError:
    """The error of a bug in Meshwright, or of a request that needs more memory than a worker may use."""
    if isinstance(error, MemoryError):
        what = "this request needs more memory than a worker of the server may use"
        fix = "fewer stages, micro-batches or GPUs; or the command line, which has no such limit"
        return MeshwrightError("MW-WEB-006", what, fix=fix)
    if os.environ.get("MESHWRIGHT_TRACEBACK") == "1":
        traceback.print_exception(error)
    return MeshwrightError(
        "MW-WEB-009",
        f"internal error in Meshwright: {type(error).__name__}: {error}"[:500],
        why="Your input is not the cause",
        fix="start the server with MESHWRIGHT_TRACEBACK=1 to print the traceback",
    )


# Each takes the body of a request and gives its one answer; `views` gives several.
TASKS: dict[str, Callable[[Json], Any]] = {
    "estimate": lambda body: subject_of(body).estimate.as_dict(),
    "simulate": simulate,
    "plan": plan,
    "choices": lambda body: choices(read_plan_file(body)),
    "mend": lambda body: mend(read_plan_file(body)),
    "text": lambda body: texts(Config.from_document(read_plan_file(body))),
    "file": file,
    "trace": trace,
    "show": show,
    "catalog": lambda body: listing(),
    "explain": explain_files,
    "compare": compare_files,
}


def lines(task: str, body: Json) -> Lines:
    """The lines of an answer."""
    if task == "views":
        yield from views(body)
    else:
        yield TASKS[task](body)
