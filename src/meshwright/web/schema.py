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
from meshwright.web.bodies import ClusterBody, QuestionBody, SettingsBody, ShowBody, ViewsBody

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
    schemas |= {"PlanFile": plan_file, "Error": error()}
    for body in (QuestionBody, ViewsBody, ClusterBody, SettingsBody, ShowBody):
        schemas[body.__name__] = moved(body.model_json_schema())
        schemas[body.__name__].pop("$defs", None)
    schemas["ViewsBody"]["properties"]["config"] = ref("PlanFile")
    schemas["ViewsBody"]["properties"]["compare"]["anyOf"][0] = ref("PlanFile/properties/plan")
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


def paths() -> dict[str, Schema]:
    """The operations of the API, by path."""
    plan_question = {
        "allOf": [{"$ref": "#/components/schemas/PlanFile"}],
        "properties": {"question": ref("QuestionBody")},
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
        "/api/show": post("A topic of `meshwright show`", ref("ShowBody"), {"type": ["object", "array"]}),
        "/api/views": post(
            "Data of views, one line of JSON each as it is ready",
            ref("ViewsBody"),
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
            ref("ClusterBody"),
            keys("cluster"),
        ),
        "/api/settings": post(
            "Settings of another framework, as the lines of their file, as the sections of a plan file",
            ref("SettingsBody"),
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
    operation = {"summary": summary, "responses": responses(answer, "application/json", statuses)}
    return {"get": {**operation, "parameters": parameters} if parameters else operation}


def responses(answer: Schema, media: str, statuses: list[int]) -> Schema:
    refused = {
        str(status): {
            "description": STATUS.get(status, "There is no such run"),
            "content": {"application/json": {"schema": ref("Error")}},
        }
        for status in statuses
    }
    return {"200": {"description": "The answer", "content": {media: {"schema": answer}}}, **refused}
