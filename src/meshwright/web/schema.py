"""The OpenAPI 3.1 document of the HTTP API: what each address takes and answers.

The schema of a plan file is the one of `describe.schema`, without paths of files. Answers of commands are described by their main
keys; `docs/page.md` shows how to use them.
"""

from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

from meshwright import __version__
from meshwright.describe import catalog
from meshwright.describe import schema as describe_schema
from meshwright.describe.draft import NAMED
from meshwright.view.json_schema import schema_of
from meshwright.view.page.shapes import SHAPES
from meshwright.web import dropped
from meshwright.web.api import EVENTS, JSON, NDJSON
from meshwright.web.bodies import FileBody, QuestionBody, ShowBody, ViewsBody

Schema = dict[str, Any]
STATUS = {
    400: "The input is wrong",
    403: "The host or the origin is not this server",
    413: "The body is larger than 64 kB",
    415: "The body is not application/json",
    429: "Too many requests wait",
    503: "The server is stopping, or a worker process ended",
    504: "The answer takes longer than the time limit",
}


@cache
def document() -> Schema:
    """The OpenAPI document."""
    schemas, plan_file = plan_file_schemas()
    schemas |= {"PlanFile": plan_file, "Error": error()} | {f"View_{name}": schema_of(SHAPES[name]) for name in SHAPES}
    for body in (QuestionBody, ViewsBody, FileBody, ShowBody):
        schemas[body.__name__] = moved(body.model_json_schema())
        schemas[body.__name__].pop("$defs", None)
    schemas["ViewsBody"]["properties"]["config"] = PLAN
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Meshwright",
            "version": __version__,
            "description": "A body is a plan file as JSON; an answer is what the command of that name prints with --json.",
        },
        "paths": paths(),
        "components": {"schemas": schemas},
    }


def plan_file_schemas() -> tuple[dict[str, Schema], Schema]:
    """The schemas that a plan file refers to, and the plan file: its sections, without `extends` of a file."""
    whole = deepcopy(describe_schema.schema())
    definitions = whole.pop("$defs")
    whole.pop("$schema")
    whole["properties"].pop("extends")
    whole["required"] = ["model", "cluster"]
    for section in ("model", "cluster", "stack"):
        name, table = whole["properties"][section]["anyOf"]
        known = {"type": "string", "enum": catalog.names(NAMED[section])}
        table["properties"]["extends"] |= known
        whole["properties"][section] = {"anyOf": [{**name, **known}, table]}
    return moved(definitions), moved(whole)


def moved(node: Any) -> Any:
    """References to `#/$defs/` as they are written in an OpenAPI document."""
    if isinstance(node, dict):
        return {
            key: f"#/components/schemas/{value.removeprefix('#/$defs/')}" if key == "$ref" else moved(value)
            for key, value in node.items()
        }
    return [moved(item) for item in node] if isinstance(node, list) else node


def error() -> Schema:
    fields = {**dict.fromkeys(("code", "what", "why", "fix"), TEXT), "valid": NAMES}
    inner = {"type": "object", "required": list(fields), "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}


class ApiRoute(NamedTuple):
    """An address below /api/: the schema of its body (of a GET: its parameters), and the schema or the keys of its answer."""

    method: str
    address: str
    summary: str
    body: Any
    answer: Any
    media: str = JSON


def parameters(**kinds: Schema) -> list[Schema]:
    """The parameters of an address; one named `name` is a part of it."""
    return [
        {"name": name, "in": "path" if name == "name" else "query", "required": name == "name", "schema": kind}
        for name, kind in kinds.items()
    ]


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


TEXT: Schema = {"type": "string"}
PLAN, NAMES = ref("PlanFile"), {"type": "array", "items": TEXT}
SEARCH = {"anyOf": [PLAN, {"allOf": [PLAN], "properties": {"question": ref("QuestionBody")}}]}
ROWS: tuple[tuple[Any, ...], ...] = (
    ("POST", "estimate", "Predict step time, memory and traffic of one plan", PLAN, ("step_time_s", "memory_gib", "plan")),
    ("POST", "simulate", "Simulate the step of a plan", PLAN, ("step_time_s", "busy_s")),
    ("POST", "plan", "Find the fastest plan that fits", SEARCH, ("plans", "strategies", "explanation")),
    ("POST", "show", "A topic of `meshwright show`", ref("ShowBody"), {"type": ["object", "array"]}),
    ("POST", "views", "Data of views, one line of JSON each as it is ready: `data` as the schema View_… says", ref("ViewsBody"), TEXT, NDJSON),
    ("POST", "choices", "Values of each plan field: legal, with what changes, or why not", PLAN, ("fields", "problem")),
    ("POST", "mend", "What is wrong with a plan, and the changes that make it legal", PLAN, ("problem", "mend")),
    ("POST", "text", "A plan file, a command, settings of other frameworks and launch files", PLAN, ("toml", "command", "settings", "launch")),
    ("POST", "trace", "The simulated step as a trace for Perfetto", PLAN, ("traceEvents",)),
    ("POST", "file", "A file as sections of a plan file, what is unread, and warnings", ref("FileBody"), ("kind", "config", "unread", "problems")),
    ("GET", "catalog", "Models, clusters, stacks, schedules, fields, presets and views", [], ("models", "clusters", "stacks")),
    ("GET", "runs", "Run folders below the folder given at start", [], ("runs",)),
    ("GET", "runs/{name}", "One run folder: new rows and files since `seen`", parameters(name=TEXT, seen=TEXT), ("name", "rows", "seen")),
    ("GET", "watch", "What is new in the list of runs and those named by `run`: server-sent events", parameters(run=NAMES, seen=TEXT), TEXT, EVENTS),
    ("POST", "dropped", "Traces, or recordings of `check`: a line of JSON with name and size before each file", TEXT, ("view", "data")),
    ("GET", "openapi.json", "This document", [], ("openapi", "paths")),
)  # fmt: skip
ROUTES = [ApiRoute(*row) for row in ROWS]


def paths() -> dict[str, Schema]:
    """The operations of the API, by path."""
    out = {}
    for method, address, summary, body, answer, media in ROUTES:
        operation: Schema = {"summary": summary}
        statuses = list(STATUS)
        if method == "POST":
            content = dropped.TYPE if address == "dropped" else JSON
            operation["requestBody"] = {"required": True, "content": {content: {"schema": body}}}
        else:
            statuses = [400, 403, *([404] if "{" in address else []), *([429] if address == "watch" else [])]
            operation["parameters"] = body
        if address == "dropped":
            operation["parameters"] = parameters(reference=TEXT)
        made = {"type": "object", "required": list(answer)} if isinstance(answer, tuple) else answer
        operation["responses"] = responses(made, media, statuses)
        out[f"/api/{address}"] = {method.lower(): operation}
    return out


def responses(answer: Schema, media: str, statuses: list[int]) -> Schema:
    wrong = {"content": {JSON: {"schema": ref("Error")}}}
    refused = {str(status): {"description": STATUS.get(status, "There is no such run"), **wrong} for status in statuses}
    return {"200": {"description": "The answer", "content": {media: {"schema": answer}}}, **refused}
