"""Dropped files: written below a folder of their own whatever their names are, bounded, read by the functions of the commands, and removed."""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from starlette.requests import Request

from meshwright.errors import MeshwrightError
from meshwright.explain.beside import beside_plan
from meshwright.explain.explanation import explain_traces
from meshwright.explain.folder import read_traces
from meshwright.view.json_schema import schema_of
from meshwright.view.page.runs import RunFolders
from meshwright.view.page.shapes import SHAPES
from meshwright.view.traces import data
from meshwright.web import api, dropped
from meshwright.web.api import Api, Cache
from meshwright.web.dropped import MOST_BYTES, TYPE, DroppedFiles
from meshwright.web.jobs import Refused
from web.running import CLIENT, run_async

TRACES = sorted((Path(__file__).parents[1] / "explain" / "traces").glob("ddp-slow-rank-rank-*.json.gz"))


def body(files: Sequence[tuple[str, bytes]]) -> bytes:
    return b"".join(json.dumps({"name": name, "size": len(text)}).encode() + b"\n" + text for name, text in files)


def post(server: str, content: bytes, kind: str = TYPE) -> httpx.Response:
    return CLIENT.post(server + "/api/dropped", content=content, headers={"content-type": kind})


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


RECORDED = (
    "deep/many/rank-00001/step-000.safetensors",
    "deep/many/rank-1/rank.json",
    "one/perturbed-0/rank-0/rank.json",
)
HOSTILE = (
    "../../etc/passwd.json",
    "/etc/rank-0.json",
    "a/../../rank-00000/../x.json",
    "x\x00.json",
    "..%2F.json",
    "\ud800.json",
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_names_never_leave_the_folder_and_pieces_may_end_anywhere(tmp_path: Path, size: int) -> None:
    here = tmp_path / "here"
    here.mkdir()
    files = DroppedFiles(here)
    content = body([(name, name.encode("utf-8", "replace")) for name in (*RECORDED, *HOSTILE)])
    for start in range(0, len(content), size):
        files.write(content[start : start + size])
    files.end()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == len(RECORDED) + len(HOSTILE)
    assert all(here in path.parents for path in written)
    assert all(name.encode() for name in files.names)  # a surrogate that stands alone could not be sent back
    many = files.folders["many"]
    assert sorted(path.relative_to(many).as_posix() for path in many.rglob("*.*")) == [
        "rank-00001/rank.json",
        "rank-00001/step-000.safetensors",
    ]
    assert (files.folders["one"] / "perturbed-0" / "rank-00000" / "rank.json").read_text() == RECORDED[2]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json\n",
        b'{"name": "a.json"}\n',
        b'{"name": "a.json", "size": 3}\nab',
        b'{"name": "a.json", "size": -1}\n',
        b'{"name": "a.json", "size": true}\n',
        b'{"name": 1, "size": 1}\nx',
        json.dumps({"name": "a.json", "size": MOST_BYTES + 1}).encode() + b"\n",
        b"[" * 5000,
        body([("a.exe", b"x")]),
        body([(f"{i}.json", b"") for i in range(4)]),
    ],
)
def test_bodies_that_are_refused(tmp_path: Path, monkeypatch: Any, content: bytes) -> None:
    monkeypatch.setattr(dropped, "MOST_FILES", 3)
    files = DroppedFiles(tmp_path)

    def read() -> None:
        files.write(content)
        files.end()

    with pytest.raises(MeshwrightError) as caught:
        read()
    files.close()
    assert caught.value.code == "MW-WEB-013"


def test_more_bytes_than_allowed_are_not_kept(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(dropped, "MOST_BYTES", 100)

    async def receive() -> Any:
        return {"type": "http.request", "body": b'{"name": "a.json", "size": 99}\n' + b"x" * 99, "more_body": True}

    with pytest.raises(Refused) as caught:
        run_async(dropped.receive_files(Request({"type": "http"}, receive).stream(), DroppedFiles(tmp_path)))
    assert caught.value.status == 413


def test_traces_are_read_as_explain_reads_them_and_removed(server: str) -> None:
    def kept() -> set[Path]:
        return set(Path(tempfile.gettempdir()).glob("meshwright-*"))

    before = kept()
    answer = post(server, body([(f"mine/{path.name}", path.read_bytes()) for path in TRACES])).json()
    explanation = explain_traces(read_traces(TRACES))
    assert answer["view"] == "traced"
    assert answer["data"] == json.loads(json.dumps(data(explanation, beside_plan(explanation))))
    jsonschema_rs.validate(schema_of(SHAPES["traced"], closed=True), answer["data"])
    broken = post(server, body([("mine/rank-0.json", b'{"traceEvents": []}')]))
    assert code(broken) == (400, "MW-EXPL-002")
    assert "'mine/rank-0.json'" in broken.json()["error"]["what"]  # not the path of the copy
    assert kept() == before


def test_other_types_are_refused_and_no_route_takes_a_path(server: str) -> None:
    assert code(post(server, body([("a.json", b"{}")]), "application/json")) == (415, "MW-WEB-004")
    assert code(post(server, b"x")) == (400, "MW-WEB-013")
    for name in ("explain", "compare"):
        answer = CLIENT.post(f"{server}/api/{name}", json={"files": ["/etc/passwd"], "folders": {}, "reference": ""})
        assert answer.status_code == 404


def test_files_wait_a_moment_for_those_that_the_page_dropped_before(monkeypatch: Any) -> None:
    class Pool:
        async def lines(self, *request: Any) -> Any:
            yield b"{}\n"

    async def receive() -> Any:
        return {"type": "http.request", "body": body([("a.json", b"{}")])}

    async def send(message: Any) -> None:
        pass

    async def two_drops() -> int:
        api_ = Api({api.SEARCHED: Pool()}, Cache(1), RunFolders(None))  # type: ignore[dict-item]
        scope = {"type": "http", "headers": [(b"content-type", TYPE.encode())], "query_string": b""}
        await api_.reading_files.acquire()
        asyncio.get_running_loop().call_later(0.05, api_.reading_files.release)
        answer = await api_.dropped(Request(scope, receive))
        monkeypatch.setattr(api, "PATIENCE_S", 0.05)
        with pytest.raises(Refused) as caught:
            await api_.dropped(Request(scope, receive))
        await answer.send(send)
        assert not api_.reading_files.locked()
        return caught.value.status

    assert run_async(two_drops()) == 429
