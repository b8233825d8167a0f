"""The OpenAPI 3.1 document of the HTTP API: what each address takes and answers.

The schema of a plan file is the one of `describe.schema`, without paths of files. Answers of commands are described by their main
keys; `docs/page.md` shows how to use them.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

from meshwright import __version__
from meshwright.describe import catalog
from meshwright.describe import schema as describe_schema
from meshwright.describe.draft import NAMED
from meshwright.view.page.registry import VIEWS
from meshwright.view.show.topics import OPTIONS
from meshwright.web.bodies import MOST_LEADERS, MOST_LETTERS

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
    schemas |= {"PlanFile": plan_file, "Question": question(), "Error": error(), "ViewsRequest": views_request()}
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


def question() -> Schema:
    constraint = {
        "anyOf": [
            {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "array"]}},
            {"type": "array", "items": {"type": "string"}},
        ]
    }
    quantity = {"type": ["string", "number"]}
    return {
        "type": "object",
        "description": "Constraints of a search, as the options of `meshwright plan`",
        "additionalProperties": False,
        "properties": {
            **{name: {**constraint, "description": text} for name, text in CONSTRAINTS.items()},
            "without": {
                "type": "array",
                "items": {"type": "string"},
                "description": "strategies to leave out, such as zero3",
            },
            "headroom": {**quantity, "description": "share of the memory to leave free, such as 10%"},
            "top": {"type": "integer", "minimum": 1, "maximum": MOST_LEADERS, "description": "number of leaders"},
            "mtbf": {**quantity, "description": "time between failures of the cluster, such as 3h"},
            "checkpoint": {**quantity, "description": "time that a checkpoint blocks training"},
            "restart": {**quantity, "description": "restart time after a failure"},
        },
    }


CONSTRAINTS = {
    "fix": 'fields with a fixed value, such as {"tp": 8}',
    "most": "upper bounds of fields",
    "least": "lower bounds of fields",
    "allow": "values to add to the search",
}


def error() -> Schema:
    text = {"type": "string"}
    fields = {"code": text, "what": text, "why": text, "fix": text, "valid": {"type": "array", "items": text}}
    inner = {"type": "object", "required": list(fields), "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}


def views_request() -> Schema:
    plan = {"$ref": "#/components/schemas/PlanFile/properties/plan"}
    return {
        "type": "object",
        "required": ["config", "views"],
        "additionalProperties": False,
        "properties": {
            "config": ref("PlanFile"),
            "views": {"type": "array", "items": {"enum": list(VIEWS)}},
            "options": {
                "type": ["object", "null"],
                "propertyNames": {"enum": list(VIEWS)},
                "additionalProperties": {"type": "object"},
            },
            "compare": {"anyOf": [plan, {"type": "null"}], "description": "a second plan"},
            "question": {"anyOf": [ref("Question"), {"type": "null"}]},
        },
    }


LINES: Schema = {"type": "array", "items": {"type": "string", "maxLength": MOST_LETTERS}}  # of a file


def paths() -> dict[str, Schema]:
    """The operations of the API, by path."""
    plan_question = {
        "allOf": [{"$ref": "#/components/schemas/PlanFile"}],
        "properties": {"question": ref("Question")},
    }
    plan_question = {"anyOf": [ref("PlanFile"), plan_question]}
    return {
        "/api/estimate": post(
            "Predict step time, memory and traffic of one plan",
            ref("PlanFile"),
            keys("step_time_s", "memory_gib", "plan"),
        ),
        "/api/simulate": post("Simulate the step of a plan", ref("PlanFile"), keys("step_time_s", "busy_s")),
        "/api/plan": post("Find the fastest plan that fits", plan_question, keys("plans", "strategies", "explanation")),
        "/api/show": post("A topic of `meshwright show`", show_request(), {"type": ["object", "array"]}),
        "/api/views": post(
            "Data of views, one line of JSON each as it is ready",
            ref("ViewsRequest"),
            {"type": "string"},
            "application/x-ndjson",
        ),
        "/api/choices": post(
            "Values of each plan field: legal, with what changes, or why not",
            ref("PlanFile"),
            keys("fields", "problem"),
        ),
        "/api/text": post(
            "A plan file, a command and settings of other frameworks to copy",
            ref("PlanFile"),
            keys("toml", "command", "settings"),
        ),
        "/api/model": post("A Hugging Face config.json as a [model] table", {"type": "object"}, keys("name")),
        "/api/cluster": post(
            "A cluster file, as its lines, as a [cluster] table",
            cluster_request(),
            keys("cluster"),
        ),
        "/api/settings": post(
            "Settings of another framework, as the lines of their file, as the sections of a plan file",
            settings_request(),
            keys("config", "read"),
        ),
        "/api/catalog": get(
            "Models, clusters, stacks, schedules, fields, presets and views", keys("models", "clusters", "stacks")
        ),
        "/api/runs": get("Run folders below the folder given at start", keys("runs")),
        "/api/runs/{name}": get(
            "One run folder: new rows and files since `seen`",
            keys("name", "rows", "seen"),
            [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},
                {"name": "seen", "in": "query", "required": False, "schema": {"type": "string"}},
            ],
        ),
        "/api/openapi.json": get("This document", keys("openapi", "paths")),
    }


def cluster_request() -> Schema:
    return {"type": "object", "properties": {"lines": LINES}}


def settings_request() -> Schema:
    return {
        "type": "object",
        "required": ["lines", "name"],
        "properties": {
            "lines": LINES,
            "name": {
                "type": "string",
                "maxLength": MOST_LETTERS,
                "description": "of the file: its ending says its form",
            },
            "gpus": {
                "type": "integer",
                "minimum": 0,
                "maximum": 10**9,
                "description": "data parallelism takes what is left of them",
            },
        },
    }


def show_request() -> Schema:
    kinds = {bool: "boolean", int: "integer", str: "string"}
    options = {name: {"type": kinds[type(default)], "default": default} for name, default in OPTIONS.items()}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "topic": {"type": "string"},
            "options": {"type": "object", "properties": options, "additionalProperties": False},
        },
    }


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def keys(*names: str) -> Schema:
    """An object that has at least these keys."""
    return {"type": "object", "required": list(names)}


def post(summary: str, body: Schema, answer: Schema, media: str = "application/json") -> Schema:
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": responses(answer, media, list(STATUS)),
        }
    }


def get(summary: str, answer: Schema, parameters: list[Schema] | None = None) -> Schema:
    statuses = [400, 403, *([404] if parameters else [])]
    found = {"summary": summary, "responses": responses(answer, "application/json", statuses)}
    return {"get": {**found, "parameters": parameters} if parameters else found}


def responses(answer: Schema, media: str, statuses: list[int]) -> Schema:
    refused = {
        str(status): {
            "description": STATUS.get(status, "There is no such run"),
            "content": {"application/json": {"schema": ref("Error")}},
        }
        for status in statuses
    }
    return {"200": {"description": "The answer", "content": {media: {"schema": answer}}}, **refused}
