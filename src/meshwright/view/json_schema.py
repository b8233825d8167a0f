"""JSON Schemas of what commands print with `--json`: the keys that programs may rely on (docs/stability.md).

The keys of a prediction and a measurement follow from their classes; the others are listed here. More keys may appear in later versions, so
unknown ones are allowed.
"""

from meshwright.describe.result import Measurement, Prediction
from meshwright.units import Json

Schema = Json
NUMBER: Schema = {"type": "number"}
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
TABLE: Schema = {"type": "object"}


def optional(schema: Schema) -> Schema:
    """The value, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def keys(_base: Schema | None = None, **properties: Schema) -> Schema:
    """An object that has these keys, after those of another one, and perhaps more."""
    properties = (_base or {}).get("properties", {}) | properties
    return {"type": "object", "required": list(properties), "properties": properties}


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def of_class(cls: type) -> Schema:
    """The schema of a dataclass of numbers: every field is written, null where it is unknown."""
    from pydantic import TypeAdapter

    made = TypeAdapter(cls).json_schema(mode="serialization")
    properties = {
        name: {k: v for k, v in field.items() if k not in ("default", "title")}
        for name, field in made["properties"].items()
    }
    return keys(**properties)


def prediction() -> Schema:
    return of_class(Prediction)


def measurement() -> Schema:
    """NaN and infinite losses are null."""
    out = of_class(Measurement)
    out["properties"]["loss"] = listed(optional(NUMBER))
    out["properties"]["validation_loss"] = listed(listed(optional(NUMBER)))
    return out


def estimate() -> Schema:
    return keys(
        prediction(),
        plan=TABLE,
        world=COUNT,
        parameters=COUNT,
        active_parameters=COUNT,
        parameters_by_part=TABLE,
        verdicts={"type": "object", "additionalProperties": keys(value=NUMBER, target=TEXT, good=FLAG)},
        bubble_fraction=NUMBER,
        critical_batch=optional(NUMBER),
        critical_batch_reason=TEXT,
        roofline=keys(level=TEXT, regime=TEXT),
        inference_latency_s=TABLE,
    )


def simulate() -> Schema:
    return keys(
        step_time_s=NUMBER,
        closed_form_s=NUMBER,
        makespan_s=NUMBER,
        closing_s=TABLE,
        bubble_fraction=NUMBER,
        bubble_overhead=NUMBER,
        busy_s=listed(NUMBER),
        in_flight=listed(NUMBER),
        detail=TEXT,
    )


def plan() -> Schema:
    leader = keys(prediction(), plan=TABLE, title=TEXT, strategy=TEXT, closed_form_s=NUMBER)
    strategy = keys(fits=FLAG, slower=optional(NUMBER), why_not=TEXT, plan=TABLE)
    return keys(
        searched=COUNT,
        costed=COUNT,
        seconds=NUMBER,
        memory_headroom=NUMBER,
        plans={**listed(leader), "minItems": 1},
        strategies={"type": "object", "additionalProperties": strategy},
        fastest=keys(plan=TABLE, step_time_s=NUMBER, memory_gib=NUMBER),
        choice=TEXT,
        front=listed(keys(plan=TABLE, step_time_s=NUMBER, memory_gib=NUMBER)),
        explanation=keys(batch=TEXT, reasons=TABLE, assumed=listed(TEXT)),
    )


def lint() -> Schema:
    return keys(
        step_time_s=optional(NUMBER),
        findings=listed(keys(code=TEXT, name=TEXT, severity={"enum": ["error", "warning", "note"]})),
    )


def verify() -> Schema:
    errors = {"type": "object", "additionalProperties": optional(NUMBER)}
    return keys(
        passed=FLAG,
        plan=TEXT,
        ranks=COUNT,
        steps=COUNT,
        seconds=NUMBER,
        errors={"type": "object", "additionalProperties": errors},
        oracles={"type": "object", "additionalProperties": TEXT},
        first_break=optional(TABLE),
        collectives_compared=keys(equal=COUNT, explained=COUNT, unexplained=COUNT),
        collectives=listed(keys(rank=COUNT, axis=TEXT, operation=TEXT)),
        memory=listed(keys(rank=COUNT, peak_bytes=NUMBER, predicted_bytes=NUMBER)),
        warnings=listed(keys(code=TEXT, what=TEXT, why=TEXT)),
    )


def train() -> Schema:
    difference = keys(what=TEXT, unit=TEXT, predicted=NUMBER, measured=NUMBER, error=optional(NUMBER))
    return keys(
        plan=TEXT,
        asked_for=TEXT,
        uncalibrated=optional(TEXT),
        device=TEXT,
        diverged_at_step=optional(COUNT),
        measurement=measurement(),
        prediction=prediction(),
        difference=listed(difference),
    )


def doctor() -> Schema:
    check = keys(what=TEXT, state=TEXT, found=TEXT, fix=TEXT)
    return keys(version=TEXT, checks={"type": "object", "additionalProperties": listed(check)})


def error() -> Schema:
    """Any command prints this instead, with a non-zero exit code."""
    return keys(
        error=keys(
            code={"type": "string", "pattern": "^MW-[A-Z0-9]+-[0-9]{3}$"},
            what=TEXT,
            why=TEXT,
            valid=listed(TEXT),
            fix=TEXT,
        )
    )


OUTPUTS = {
    "plan": plan, "estimate": estimate, "simulate": simulate, "lint": lint, "verify": verify, "train": train, "doctor": doctor,
    "error": error,
}  # fmt: skip


def output_schema(name: str) -> Schema:
    """The schema of what a command prints with `--json`; "error" is the schema of every error."""
    title = "An error of any command" if name == "error" else f"meshwright {name} --json"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **OUTPUTS[name]()}
