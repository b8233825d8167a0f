"""JSON Schemas of what commands print with `--json`: the keys that programs may rely on (docs/stability.md).

The keys of a prediction and a measurement follow from their classes; the others are listed here. More keys may appear in later versions, so
unknown ones are allowed. A shape of `SHAPES` reads like the output that it describes:

    "number"     a value of this type          "number?"    or null            "prediction"  an object with the fields of `Prediction`
    [shape]      a list                        [shape, 1]   with at least one item
    {"a": …}     an object with these keys     {"*": …}     an object whose values have this shape
    {"a?": …}    a key that may be missing     {"?": …}     this shape, or null           "any"
    {"...": "prediction", "a": …}              the keys of a prediction, then these
    {"|": {"a": …, "b": …}}                    one of these objects, which says in `kind` which one
"""

from typing import Any

from pydantic import TypeAdapter

from meshwright.describe.result import Measurement, Prediction
from meshwright.units import Json

TOKEN = {
    "sequences": "integer",
    "token_s": "number",
    "tokens_per_s": "number",
    "tokens_per_s_per_gpu": "number",
    "parts_s": {"*": "number"},
    "bound_by": ("memory", "compute", "communication"),
    "memory_gib": "number",
    "fits": "boolean",
}
DEGREES = {"tp": "integer", "ep": "integer", "replicas": "integer"}
SHAPES = {
    "plan": {
        "searched": "integer",
        "costed": "integer",
        "seconds": "number",
        "memory_headroom": "number",
        "plans": [
            {"...": "prediction", "plan": "object", "title": "string", "strategy": "string", "closed_form_s": "number"},
            1,
        ],
        "strategies": {"*": {"fits": "boolean", "slower": "number?", "why_not": "string", "plan": "object"}},
        "fastest": {"plan": "object", "step_time_s": "number", "memory_gib": "number"},
        "choice": "string",
        "front": [{"plan": "object", "step_time_s": "number", "memory_gib": "number"}],
        "explanation": {"batch": "string", "reasons": "object", "assumed": ["string"]},
    },
    "estimate": {
        "...": "prediction",
        "plan": "object",
        "world": "integer",
        "parameters": "integer",
        "active_parameters": "integer",
        "trained_parameters": "integer",
        "parameters_by_part": "object",
        "verdicts": {"*": {"value": "number", "target": "string", "good": "boolean"}},
        "bubble_fraction": "number",
        "critical_batch": "number?",
        "critical_batch_reason": "string",
        "roofline": {"level": "string", "regime": "string"},
    },
    "decode": {
        "version": "integer",
        "model": "string",
        "cluster": "string",
        "plan": DEGREES,
        "context": "integer",
        "weights_gib": "number",
        "cache_bytes": {"*": "number"},
        "cache_bytes_per_rank": "number",
        "prefill_s": "number",
        "rows": [TOKEN, 1],
        "most_sequences": "integer",
        "compute_bound_sequences": "integer?",
        "compute_bound_products": "integer?",
        "alternatives": [DEGREES | {"prefill_s": "number", "most_sequences": "integer", "rows": [TOKEN, 1]}],
        "assumed": ["string"],
    },
    "simulate": {
        "step_time_s": "number",
        "closed_form_s": "number",
        "makespan_s": "number",
        "closing_s": "object",
        "bubble_fraction": "number",
        "bubble_overhead": "number",
        "busy_s": ["number"],
        "in_flight": ["number"],
        "detail": "string",
    },
    "lint": {
        "step_time_s": "number?",
        "findings": [{"code": "string", "name": "string", "severity": ("error", "warning", "note")}],
        "change_first": [
            {"fields": "object", "step_time_s": "number", "saves_s": "number", "memory_gib": "number", "fix": "string"}
        ],
    },
    "explain": {
        "version": "integer",
        "step_time_s": "number",
        "attributed": "number",
        "causes": [{"cause": "string", "seconds": "number", "evidence": "string", "fix": "string"}],
        "ranks": [
            {
                "rank": "integer",
                "file": "string",
                "parts_s": "object",
                "steps": [{"step": "string", "parts_ns": {"*": "integer"}}],
            }
        ],
        "late_ranks": [{"rank": "integer", "share": "number", "late_s": "number", "constant": "boolean"}],
        "notes": ["string"],
        "prediction": "object?",
    },
    "measure": {
        "kind": "string",
        "version": "integer",
        "device": "string",
        "title": "string",
        "plan": "string",
        "ranks": [
            {
                "rank": "integer",
                "stage": "integer",
                "microbatches": "integer",
                "steps": "integer",
                "step_s": "number",
                "backward_s": "number",
                "closing_s": "number",
                "spread": "number",
                "allocated_gib": "number",
                "reserved_gib": "number?",
                "parts_s": {"?": {"*": "number"}},
                "memory_gib": {"?": {"*": "number"}},
                "notes": ["string"],
                "predicted": {"step_s": "number", "allocated_gib": "number", "reserved_gib": "number"},
            },
            1,
        ],
        "step": {
            "step_time_s": "number",
            "step_time_low_s": "number",
            "step_time_high_s": "number",
            "compute_s": "number",
            "predicted_s": "number",
        },
    },
    "tune": {
        "best": "object?",
        "stopped": "string",
        "memory_factor": "number",
        "trials": [
            {
                "candidate": "integer",
                "title": "string",
                "outcome": ("measured", "out of memory", "failed", "timed out"),
                "seconds": "number?",
                "spread": "number?",
                "memory_gib": "number?",
                "why": "string",
            }
        ],
        "candidates": [
            {
                "plan": "object",
                "title": "string",
                "predicted_s": "number",
                "expected_s": "number",
                "expected_low_s": "number",
                "expected_high_s": "number",
                "expected_gain": "number",
                "memory_gib": "number?",
            },
            1,
        ],
    },
    "verify": {
        "passed": "boolean",
        "plan": "string",
        "ranks": "integer",
        "steps": "integer",
        "seconds": "number",
        "errors": {"*": {"*": "number?"}},
        "oracles": {"*": "string"},
        "first_break": "object?",
        "collectives_compared": {"equal": "integer", "explained": "integer", "unexplained": "integer"},
        "collectives": [{"rank": "integer", "axis": "string", "operation": "string"}],
        "memory": [{"rank": "integer", "peak_bytes": "number", "predicted_bytes": "number"}],
        "warnings": [{"code": "string", "what": "string", "why": "string"}],
    },
    "train": {
        "plan": "string",
        "asked_for": "string",
        "uncalibrated": "string?",
        "device": "string",
        "diverged_at_step": "integer?",
        "measurement": "measurement",
        "prediction": "prediction",
        "difference": [
            {"what": "string", "unit": "string", "predicted": "number", "measured": "number", "error": "number?"}
        ],
    },
    "doctor": {
        "version": "string",
        "checks": {"*": [{"what": "string", "state": "string", "found": "string", "fix": "string"}]},
    },
    "error": {"error": {"code": "code", "what": "string", "why": "string", "valid": ["string"], "fix": "string"}},
}
OUTPUTS = tuple(SHAPES)


def schema_of(shape: Any, closed: bool = False) -> Json:
    """The JSON Schema of a shape. `closed`: an object has no other keys."""
    match shape:
        case "any":
            return {}
        case "code":
            return {"type": "string", "pattern": "^MW-[A-Z0-9]+-[0-9]{3}$"}
        case "prediction" | "measurement":
            return of_class(Prediction if shape == "prediction" else Measurement)
        case str():
            kind = {"type": shape.removesuffix("?")}
            return {"anyOf": [kind, {"type": "null"}]} if shape.endswith("?") else kind
        case tuple():
            return {"enum": list(shape)}
        case [item, *least]:
            return {"type": "array", "items": schema_of(item, closed), **({"minItems": least[0]} if least else {})}
        case {"|": kinds}:
            return {"anyOf": [schema_of({"kind": (kind,)} | shape, closed) for kind, shape in kinds.items()]}
        case {"*": values}:
            return {"type": "object", "additionalProperties": schema_of(values, closed)}
        case {"?": inner}:
            return {"anyOf": [schema_of(inner, closed), {"type": "null"}]}
    first = schema_of(shape["..."])["properties"] if "..." in shape else {}
    own = {name: schema_of(inner, closed) for name, inner in shape.items() if name != "..."}
    return keys(first | own) | ({"additionalProperties": False} if closed else {})


def keys(properties: Json) -> Json:
    """An object that has these keys, and perhaps more; those that end with `?` may be missing."""
    required = [name for name in properties if not name.endswith("?")]
    named = {name.removesuffix("?"): schema for name, schema in properties.items()}
    return {"type": "object", "required": required, "properties": named}


def of_class(cls: type) -> Json:
    """The schema of a dataclass of numbers: every field is written, null where it is unknown; NaN and infinite losses are null."""
    fields = TypeAdapter(cls).json_schema(mode="serialization")["properties"]
    out = {name: {k: v for k, v in f.items() if k not in ("default", "title")} for name, f in fields.items()}
    if cls is Measurement:
        out |= {"loss": schema_of(["number?"]), "validation_loss": schema_of([["number?"]])}
    return keys(out)


def output_schema(name: str) -> Json:
    """The schema of what a command prints with `--json`; "error" is the schema of every error."""
    title = "An error of any command" if name == "error" else f"meshwright {name} --json"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema_of(SHAPES[name])}
