"""Requests that must be refused: other hosts and origins, files, oversized and malformed bodies; what a browser may do with the page."""

import base64
import hashlib
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshwright.cli import main
from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.view.page.bundle import document, written
from meshwright.view.page.subject import Subject
from meshwright.web.bodies import MOST_BYTES, parse, read_question
from meshwright.web.dropped import TYPE
from web.running import CLIENT

PLAN_FILE: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"extends": "dgx-h100", "gpus": 8},
    "workload": {"batch": 32, "seq": 4096},
    "plan": {"tp": 8},
}
JSON = {"content-type": "application/json"}


def post(
    server: str, content: bytes | str | None = None, path: str = "/api/estimate", **headers: str
) -> httpx.Response:
    content = json.dumps(PLAN_FILE) if content is None else content
    return CLIENT.post(server + path, content=content, headers={**JSON, **headers})


def test_only_this_host_and_origin_are_answered(server: str) -> None:
    port = server.rpartition(":")[2]
    assert post(server).status_code == 200
    assert post(server, Host=f"localhost:{port}", Origin=f"http://localhost:{port}").status_code == 200
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"evil.example:{port}"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"https://127.0.0.1:{port}"},
    ):
        answer = post(server, **headers)
        assert answer.status_code == 403, headers
        assert answer.json()["error"]["code"] == "MW-WEB-010"
    assert CLIENT.get(server + "/", headers={"Host": "evil.example"}).status_code == 403
    answers = [
        post(server, Origin=server),
        CLIENT.options(server + "/api/estimate", headers={"Origin": "http://evil.example"}),
    ]
    assert not [name for answer in answers for name in answer.headers if name.startswith("access-control")]


def test_the_policy_allows_the_modules_and_one_import_map(server: str) -> None:
    page = CLIENT.get(server + "/")
    policy = page.headers["content-security-policy"]
    inline = re.findall(r"<script(?![^>]*\bsrc=)[^>]*>(.*?)</script>", page.text, re.S)
    assert len(inline) == 1
    digest = base64.b64encode(hashlib.sha256(inline[0].encode()).digest()).decode()
    assert f"script-src 'self' 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    modules = json.loads(inline[0])["imports"]
    for address in modules.values():
        answer = CLIENT.get(server + address)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/javascript")
        assert answer.headers["x-content-type-options"] == "nosniff"
    unchanged = CLIENT.get(server + address, headers={"If-None-Match": answer.headers["etag"]})
    assert unchanged.status_code == 304


def test_the_first_load_is_small(server: str) -> None:
    """Bytes that a browser receives: modules and style are sent compressed."""
    page = CLIENT.get(server + "/").text
    modules = json.loads(re.search(r'type="importmap">(.*?)</script>', page, re.S)[1])["imports"]  # type: ignore[index]
    files = [CLIENT.get(server + path) for path in {*modules.values(), "/static/style.css"}]
    assert {file.headers["content-encoding"] for file in files if len(file.content) > 1000} == {"gzip"}
    assert len(page) + sum(file.num_bytes_downloaded for file in files) < 150_000


@pytest.mark.parametrize(
    "path", ["../frame.py", "..%2fframe.py", "js/../../frame.py", "%2e%2e/subject.py", "/etc/passwd", "js", ""]
)
def test_static_files_are_those_of_the_page(server: str, path: str) -> None:
    assert CLIENT.get(f"{server}/static/{path}").status_code == 404


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model": "../../model.toml"}, "MW-CAT-002"),
        ({"model": "config.json"}, "MW-CAT-002"),
        ({"model": "/etc"}, "MW-CAT-002"),
        ({"model": {"extends": "folder/config.json"}}, "MW-CAT-002"),
        ({"cluster": "cluster.toml"}, "MW-CAT-002"),
        ({"cluster": {"extends": "/tmp/cluster.toml"}}, "MW-CAT-002"),
        ({"cluster": {"extends": "dgx-h100", "accelerator": "../x"}}, "MW-CAT-002"),
        ({"cluster": {"extends": "dgx-h100", "levels": [{"link": "../x.toml", "size": 8}]}}, "MW-CAT-002"),
        ({"stack": "stack.toml"}, "MW-CAT-002"),
        ({"extends": "base.toml"}, "MW-CONF-012"),
        ({"plan": "plan.toml"}, "MW-CONF-009"),
        ({"model": None}, "MW-CONF-002"),
        ({"model": "\u0000"}, "MW-CAT-002"),
    ],
)
def test_no_file_is_read(change: dict[str, Any], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model.toml", "cluster.toml", "stack.toml", "base.toml", "plan.toml"):
        (tmp_path / name).write_text('model = "llama3-8b"\n[cluster]\nextends = "dgx-h100"\n')
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshwright.describe.draft.read_text", lambda *a: pytest.fail("a file was read"))
    monkeypatch.setattr("meshwright.describe.hf.read", lambda *a: pytest.fail("a file was read"))
    with pytest.raises(MeshwrightError) as caught:
        Config.from_document({**PLAN_FILE, **change})
    assert caught.value.code == code


def test_the_topics_of_show_read_no_file(server: str) -> None:
    body = {"topic": "all-reduce", "options": {"cluster": "../cluster.toml"}}
    assert post(server, json.dumps(body), "/api/show").json()["error"]["code"] == "MW-CAT-002"
    body = {"topic": "all-reduce", "options": {"html": "/tmp/x.html"}}
    assert post(server, json.dumps(body), "/api/show").json()["error"]["code"] == "MW-SHOW-003"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": 1e999}',
        b'{"plan": {"tp": ' + b"9" * 5000 + b"}}",
        b'{"a":' * 9000 + b"1" + b"}" * 9000,
        b"[" * 60_000,
        b'{"model": "\\ud800"}',
        b'{"a": [' + b"1," * 20_000 + b"1]}",
    ],
)
def test_malformed_bodies_are_refused(server: str, content: bytes) -> None:
    answer = post(server, content)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"code", "what", "why", "valid", "fix"}


def test_large_bodies_are_refused(server: str) -> None:
    large = json.dumps({"model": "x" * MOST_BYTES}).encode()
    assert post(server, large).status_code == 413

    def pieces() -> Any:
        yield from (large[i : i + 1000] for i in range(0, len(large), 1000))

    assert CLIENT.post(server + "/api/estimate", content=pieces(), headers=JSON).status_code == 413
    assert CLIENT.post(server + "/api/estimate", data={"model": "x"}).status_code == 415


def test_a_client_that_leaves_inside_its_body_is_no_fault_of_the_server(server: str) -> None:
    """The fixture of the server fails if a traceback was printed."""
    port = int(server.rpartition(":")[2])
    for path, kind in (("estimate", JSON["content-type"]), ("dropped", TYPE)):
        head = (
            f"POST /api/{path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: {kind}\r\nContent-Length: 9\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head.encode() + b"{")
    assert post(server, json.dumps(PLAN_FILE).encode()).status_code == 200


def test_numbers_are_bounded(server: str) -> None:
    for plan in ({"tp": 2**41}, {"tp": -1}, {"tp": 1.5}, {"tp": True}, {"tp": "8"}, {"pp": 10**9, "shard": 1}):
        answer = post(server, json.dumps({**PLAN_FILE, "plan": plan}))
        assert answer.status_code in (200, 400), answer.text
    with pytest.raises(MeshwrightError):
        parse(b'{"a": 1e400}')
    for question in (
        {"fix": {"tp": {}}},
        {"fix": 3},
        {"without": "zero3"},
        {"top": True},
        {"mtbf": []},
        {"other": 1},
        [],
    ):
        with pytest.raises(MeshwrightError):
            read_question(question)


def test_a_name_cannot_leave_its_element() -> None:
    """In a written file, text of the model is data: it ends no element and starts no script."""
    evil = "</script><script>alert(1)</script><!--"
    config = Config.from_document({**PLAN_FILE, "model": {"extends": "llama3-8b", "name": evil}})
    page = document(Subject(config))
    assert evil not in page
    assert page.count("<script") == page.count("</script>") == 3
    data = json.loads(re.search(r'id="meshwright-data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert data["state"]["model"]["name"] == evil
    assert data["views"]["advice"]["data"]["items"]
    assert evil not in written({"timeline": {"data": evil}}, evil)
    assert "http" not in re.sub(
        r"data:[^\"]*|http-equiv|http://www.w3.org/2000/svg", "", re.sub(r">\{.*?</script>", "", page)
    )


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit) as leaving:
            main(["web", "--port", str(taken.getsockname()[1])])
    assert leaving.value.code == 2
    assert "MW-WEB-012" in capsys.readouterr().err


def test_without_the_extra_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['uvicorn'] = None\nfrom meshwright.cli import main\nmain(['web', '--port', '0'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "MW-WEB-011" in done.stderr
    assert 'pip install "starlette>=0.40" "uvicorn>=0.30"' in done.stderr.replace("\n", " ")
