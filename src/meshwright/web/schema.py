"""The OpenAPI 3.1 document of the HTTP API: what each address takes and answers.

The schema of a plan file is the one of `describe.schema`, without paths of files. Answers of commands are described by their main
keys; `docs/page.md` shows how to use them.
"""

from copy import deepcopy
from functools import cache
from typing import Any

from meshwright import __version__
from meshwright.describe import catalog
from meshwright.describe import schema as describe_schema
from meshwright.describe.draft import NAMED
from meshwright.view.json_schema import schema_of
from meshwright.view.page.shapes import SHAPES
from meshwright.web import dropped
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
    schemas["ViewsBody"]["properties"]["config"] = ref("PlanFile")
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
    text = {"type": "string"}
    fields = {"code": text, "what": text, "why": text, "fix": text, "valid": {"type": "array", "items": text}}
    inner = {"type": "object", "required": list(fields), "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}


# (method, address, summary, schema of the body, what the answer has: a schema or the keys of an object)
ROUTES = (
    ("post", "estimate", "Predict step time, memory and traffic of one plan", "PlanFile", ("step_time_s", "memory_gib", "plan")),
    ("post", "simulate", "Simulate the step of a plan", "PlanFile", ("step_time_s", "busy_s")),
    ("post", "plan", "Find the fastest plan that fits", "", ("plans", "strategies", "explanation")),
    ("post", "show", "A topic of `meshwright show`", "ShowBody", {"type": ["object", "array"]}),
    ("post", "views", "Data of views, one line of JSON each as it is ready: `data` as the schema View_… says", "ViewsBody", {"type": "string"}),
    ("post", "choices", "Values of each plan field: legal, with what changes, or why not", "PlanFile", ("fields", "problem")),
    ("post", "mend", "What is wrong with a plan, and the changes that make it legal", "PlanFile", ("problem", "mend")),
    ("post", "text", "A plan file, a command, settings of other frameworks and launch files", "PlanFile", ("toml", "command", "settings", "launch")),
    ("post", "trace", "The simulated step as a trace for Perfetto", "PlanFile", ("traceEvents",)),
    ("post", "file", "What a file is, as its lines: sections of a plan file, and what was not read", "FileBody", ("kind", "config", "unread")),
    ("get", "catalog", "Models, clusters, stacks, schedules, fields, presets and views", "", ("models", "clusters", "stacks")),
    ("get", "runs", "Run folders below the folder given at start", "", ("runs",)),
    ("get", "runs/{name}", "One run folder: new rows and files since `seen`", "", ("name", "rows", "seen")),
    ("get", "watch", "What is new in the list of runs and in those named by `run`, as server-sent events", "", {"type": "string"}),
    ("post", "dropped", "Traces, or recordings of `check`: a line of JSON with name and size before each file", {"type": "string"}, ("view", "data")),
    ("get", "openapi.json", "This document", "", ("openapi", "paths")),
)  # fmt: skip
PARAMETERS = {
    "runs/{name}": [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},
        {"name": "seen", "in": "query", "required": False, "schema": {"type": "string"}},
    ],
    "watch": [
        {"name": "run", "in": "query", "required": False, "schema": {"type": "array", "items": {"type": "string"}}},
        {"name": "seen", "in": "query", "required": False, "schema": {"type": "string"}},
    ],
    "dropped": [{"name": "reference", "in": "query", "required": False, "schema": {"type": "string"}}],
}
CONTENT = {"dropped": dropped.TYPE}  # of a body that is not JSON
MEDIA = {"views": "application/x-ndjson", "watch": "text/event-stream"}


def paths() -> dict[str, Schema]:
    """The operations of the API, by path."""
    with_question = {"allOf": [ref("PlanFile")], "properties": {"question": ref("QuestionBody")}}
    out = {}
    for method, address, summary, body, answer in ROUTES:
        operation: Schema = {"summary": summary}
        statuses = list(STATUS)
        if method == "post":
            schema = (
                body
                if isinstance(body, dict)
                else ref(str(body))
                if body
                else {"anyOf": [ref("PlanFile"), with_question]}
            )
            operation["requestBody"] = {
                "required": True,
                "content": {CONTENT.get(address, "application/json"): {"schema": schema}},
            }
        else:
            statuses = [400, 403, *([404] if "{" in address else []), *([429] if address == "watch" else [])]
        made = {"type": "object", "required": list(answer)} if isinstance(answer, tuple) else answer
        operation["responses"] = responses(made, MEDIA.get(address, "application/json"), statuses)
        if address in PARAMETERS:
            operation["parameters"] = PARAMETERS[address]
        out[f"/api/{address}"] = {method: operation}
    return out


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def responses(answer: Schema, media: str, statuses: list[int]) -> Schema:
    refused = {
        str(status): {
            "description": STATUS.get(status, "There is no such run"),
            "content": {"application/json": {"schema": ref("Error")}},
        }
        for status in statuses
    }
    return {"200": {"description": "The answer", "content": {media: {"schema": answer}}}, **refused}
