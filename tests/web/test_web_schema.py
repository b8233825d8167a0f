"""Requests generated from the OpenAPI document: every one is answered in time, none with a fault of the server."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from meshwright.web import dropped, schema
from web.running import CLIENT

DAILY = ("/api/estimate", "/api/views", "/api/choices", "/api/show", "/api/file", "/api/runs/{name}")
LONGEST_S = 60  # of one request; a search is ended by its own limit before


@schemathesis.serializer(dropped.TYPE)
def dropped_files(context: Any, value: Any) -> bytes:
    """The bytes of dropped files, which the generator makes of any kind."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


def checked(server: str, path: str, mode: GenerationMode, examples: int) -> None:
    """Send generated requests to one address; each answer has a documented status, and errors have the one shape."""
    document = schema.document()
    operation = next(iter(schemathesis.openapi.from_dict(document)[path].values()))

    @settings(max_examples=examples, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        answer = case.call(base_url=server, timeout=LONGEST_S)
        assert answer.status_code < 500, answer.text
        assert str(answer.status_code) in [*operation.definition.raw["responses"], "404", "405"]
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"code", "what", "why", "valid", "fix"}

    send()


def test_the_document_names_every_address(server: str) -> None:
    document = CLIENT.get(server + "/api/openapi.json").json()
    assert document == schema.document()
    for path, operations in document["paths"].items():
        if path == "/api/watch":  # its answer does not end
            continue
        method = "post" if "post" in operations else "get"
        answer = CLIENT.request(method, server + path.replace("{name}", "none"), json={} if method == "post" else None)
        assert answer.status_code in (200, 400, 404, 415), path
        assert "is not an address" not in answer.text


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", DAILY)
def test_generated_requests(server: str, path: str, mode: GenerationMode) -> None:
    checked(server, path, mode, 3)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", [path for path, entry in schema.document()["paths"].items() if "post" in entry])
def test_many_generated_requests(server: str, path: str, mode: GenerationMode) -> None:
    checked(server, path, mode, 60 if path == "/api/plan" else 300)
