"""The HTTP API: an answer is what the command prints with --json, errors have the one shape, views arrive line by line."""

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from meshwright import api
from meshwright.describe.config import Config, load
from meshwright.view.page.registry import CHEAP, SEARCH, VIEWS, View
from meshwright.view.page.runs import RunFolders
from meshwright.web import tasks, worker
from meshwright.web.api import Api, Cache
from meshwright.web.jobs import Refused, WorkerJob, WorkerPool
from meshwright.web.serve import listen
from web.running import CLIENT, run_async

PLAN_FILE: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"extends": "dgx-h100", "gpus": 16},
    "stack": "megatron-core",
    "workload": {"batch": 32, "seq": 4096},
    "plan": {"tp": 4, "pp": 2, "shard": 2, "zero": 1, "sp": True},
}


def ask(server: str, path: str, body: Any = None) -> Any:
    """The JSON answer of an address."""
    answer = CLIENT.post(server + path, json=body) if body is not None else CLIENT.get(server + path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: str, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = CLIENT.post(server + path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"code", "what", "why", "valid", "fix"}
    return error


def test_answers_are_what_the_commands_print(server: str) -> None:
    config = Config.from_document(PLAN_FILE)
    assert ask(server, "/api/estimate", PLAN_FILE) == json.loads(json.dumps(api.estimate(config).as_dict()))
    simulated = ask(server, "/api/simulate", PLAN_FILE)
    assert simulated.items() >= json.loads(json.dumps(api.simulate(config).as_dict())).items()
    fixed = {"fix": {"tp": 4, "pp": 2}, "without": ["zero3"], "top": 2}
    planned = ask(server, "/api/plan", {**PLAN_FILE, "question": fixed})
    expected = api.plan(config, **fixed).as_dict()
    assert planned["plans"] == json.loads(json.dumps(expected["plans"]))
    assert ask(server, "/api/show", {"topic": "1f1b", "options": {"stages": 2, "microbatches": 3}})["ranks"] == 2
    assert "collectives" in ask(server, "/api/show", {})


def test_views_arrive_line_by_line(server: str) -> None:
    names = [name for name, view in VIEWS.items() if view.kind == CHEAP]
    body = {"config": PLAN_FILE, "views": names}
    answer = CLIENT.post(server + "/api/views", json=body)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert {line["view"] for line in lines} == set(names)
    for line in lines:
        assert line["final"]
        assert line["error"] is None, line
        assert line["data"] is not None


def test_small_answers_are_sent_at_once() -> None:
    """Accepted connections have TCP_NODELAY: else the body of an answer waits for the acknowledgement of its head."""

    async def no_delay() -> int:
        listening, found = listen(0), asyncio.get_running_loop().create_future()

        def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            found.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accepted, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            try:
                return int(await found)
            finally:
                writer.close()

    assert run_async(no_delay()) == 1


def test_a_searched_view_is_provisional_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def data(subject: Any) -> dict[str, Any]:
        found.append(subject.is_provisional)
        return {"searched": subject.result.searched}

    monkeypatch.setitem(VIEWS, "searched", View("searched", "", "none", SEARCH))
    monkeypatch.setattr(View, "data", lambda self, subject: data(subject))
    config = {**PLAN_FILE, "cluster": {"extends": "dgx-h100", "gpus": 8}, "plan": {"tp": 8}}
    lines = list(tasks.views({"config": config, "views": ["searched"]}))
    assert [line["final"] for line in lines] == [False, True]
    assert found == [True, False]
    assert lines[0]["data"]["searched"] < lines[1]["data"]["searched"]


def test_quick_answers_come_from_one_worker_and_in_one_message() -> None:
    """The timeline begins with the schedule of the plan alone: no second worker estimates the plan for it, and the page draws once."""
    asked: dict[str, Any] = {}
    sent: list[bytes] = []

    class Pool:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        async def lines(self, task: str, body: Any, key: str) -> Any:
            asked[self.kind] = body["steps"]
            worker.answer(Pipe(), task, body, together=self.kind == "quick")  # type: ignore[arg-type]
            yield sent[-2][1:]

    class Pipe:
        def send_bytes(self, message: bytes) -> None:
            sent.append(message)

    async def answered() -> list[bytes]:
        found = Api({kind: Pool(kind) for kind in ("quick", "search")}, Cache(1 << 24), RunFolders(None))  # type: ignore[misc]
        return [part async for part in found.view_lines({"config": PLAN_FILE, "views": ["verdict", "timeline"]})]

    first, *_ = [[json.loads(line) for line in part.splitlines()] for part in run_async(answered())]
    assert asked == {"quick": [("timeline", False), ("verdict", True)], "search": [("timeline", True)]}
    assert [(line["view"], line["final"], len(line["data"].get("panels", ""))) for line in first] == [
        ("timeline", False, 1),
        ("verdict", True, 0),
    ]


def test_an_answer_given_before_comes_from_the_cache(server: str) -> None:
    body = {**PLAN_FILE, "workload": {"batch": 64, "seq": 2048}}
    first, again = ask(server, "/api/estimate", body), ask(server, "/api/estimate", body)
    assert first == again


def test_a_plan_file_and_a_command_to_copy(server: str, tmp_path: Any) -> None:
    found = ask(server, "/api/text", PLAN_FILE)
    (tmp_path / "plan.toml").write_text(found["toml"])
    assert load(tmp_path / "plan.toml") == Config.from_document(PLAN_FILE)
    assert found["command"].startswith(
        "meshwright estimate llama3-8b --cluster dgx-h100 --gpus 16 --stack megatron-core"
    )
    own = {**PLAN_FILE, "model": {"extends": "llama3-8b", "name": "a; rm -rf '$HOME'"}}
    assert ask(server, "/api/text", own)["command"] == "meshwright estimate --plan plan.toml"


def test_the_command_estimates_the_same(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    from meshwright.cli import main

    ordered = {**PLAN_FILE, "plan": {**PLAN_FILE["plan"], "order": ["tp", "cp", "dp", "pp"], "bucket": "50MB"}}
    command = ask(server, "/api/text", ordered)["command"]
    assert """'plan.order=["tp","cp","dp","pp"]'""" in command
    with pytest.raises(SystemExit):
        main([*shlex.split(command)[1:], "--json"])
    assert json.loads(capsys.readouterr().out)["step_time_s"] == ask(server, "/api/estimate", ordered)["step_time_s"]


def test_models_and_clusters_of_files(server: str) -> None:
    model = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 1000,
    }

    def opened(name: str, text: str, **more: Any) -> Any:
        return ask(server, "/api/file", {"name": name, "lines": text.split("\n"), **more})

    table = opened("config.json", json.dumps(model))["config"]["model"]
    assert table["layers"] == 4
    assert (
        ask(server, "/api/estimate", {**PLAN_FILE, "model": table, "plan": {"shard": 16, "zero": 1}})["parameters"] > 0
    )
    assert opened("my-model.json", json.dumps(model))["config"]["model"]["name"] == "my-model"
    cluster = opened("cluster.toml", '[cluster]\nextends = "dgx-h100"\n', gpus=32)
    assert cluster == {
        "kind": "cluster",
        "config": {"cluster": {"extends": "dgx-h100", "gpus": 32}},
        "unread": [],
        "problems": [],
    }
    run_file = opened("run.toml", "[plan]\ntp = 2\n[run]\nsteps = 3\n")
    assert run_file == {"kind": "part of a plan file", "config": {"plan": {"tp": 2}}, "unread": ["run"], "problems": []}
    refusals = {
        "cluster.toml": '[cluster]\nextends = "other.toml"',
        "a.toml": 'extends = "b.toml"',
        "words.txt": "some words",
        "a.json": "[1]",
        "deep.json": "[" * 2000,
        "nan.json": '{"plan": {"tp": NaN}}',
        "date.toml": "[plan]\ntp = 2020-01-01",
        "surrogate.json": '{"plan": {"tp": "\\ud800"}}',
    }
    codes = [
        refused(server, "/api/file", {"name": name, "lines": text.split("\n")})["code"]
        for name, text in refusals.items()
    ]
    assert codes == ["MW-CAT-002", "MW-CONF-012", "MW-SET-010", "MW-SET-010", "MW-CONF-007", *["MW-CONF-003"] * 3]


def test_the_catalog(server: str) -> None:
    found = ask(server, "/api/catalog")
    assert {"llama3-70b", "gpt2-xl"} <= {model["name"] for model in found["models"]}
    assert {view["name"] for view in found["views"]} == set(VIEWS)
    assert {preset["group"] for preset in found["presets"]} == {
        "Examples",
        "Course material",
        "Case studies",
        "Published runs",
    }
    for preset in found["presets"]:
        config = Config.from_document({k: v for k, v in preset["state"].items() if k != "page"})
        config.check()


def test_errors_have_the_one_shape(server: str) -> None:
    assert refused(server, "/api/estimate", {**PLAN_FILE, "plan": {"tp": 3}})["code"] == "MW-PLAN-005"
    assert refused(server, "/api/estimate", {**PLAN_FILE, "plans": {}})["code"] == "MW-CONF-010"
    assert refused(server, "/api/views", {"config": PLAN_FILE, "views": ["memry"]})["code"] == "MW-WEB-007"
    assert refused(server, "/api/views", {"config": PLAN_FILE, "view": []})["code"] == "MW-WEB-005"
    assert refused(server, "/api/plan", {**PLAN_FILE, "question": {"top": 10**6}})["code"] == "MW-WEB-005"
    assert refused(server, "/api/none", {}, 404)["code"] == "MW-WEB-005"
    assert CLIENT.get(server + "/api/estimate").status_code == 405


@pytest.mark.slow
def test_200_estimates_at_once(server: str) -> None:
    async def all_of_them() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(limits=limits, verify=False, timeout=200) as client:
            small = {"model": "tiny-gpt", "cluster": {"extends": "dgx-h100", "gpus": 1}}
            bodies = [{**small, "workload": {"batch": 1 + i, "seq": 128}} for i in range(200)]
            return await asyncio.gather(*(client.post(server + "/api/estimate", json=body) for body in bodies))

    answers = run_async(all_of_them())
    assert [answer.status_code for answer in answers] == [200] * 200


@pytest.mark.slow
def test_50_searches_at_once_are_answered_or_told_when_to_try_again(server: str) -> None:
    async def all_of_them() -> list[httpx.Response]:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=60), verify=False, timeout=400) as client:
            small = {"model": "tiny-gpt", "cluster": {"extends": "dgx-h100", "gpus": 2}}
            bodies = [{**small, "workload": {"batch": 2 + 2 * i, "seq": 128}} for i in range(50)]
            return await asyncio.gather(*(client.post(server + "/api/plan", json=body) for body in bodies))

    answers = run_async(all_of_them())
    assert {200} <= {answer.status_code for answer in answers} <= {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "MW-WEB-002"
            assert int(answer.headers["retry-after"]) >= 1


def test_an_abandoned_search_is_stopped_and_a_full_queue_refused() -> None:
    """One worker and one place in the queue: a client that leaves frees the worker at once; a third request is refused."""
    long = {
        "model": "llama3.1-405b",
        "cluster": {"extends": "dgx-h100", "gpus": 16384},
        "workload": {"batch": 4096, "seq": 8192},
    }

    async def scenario() -> None:
        pool = WorkerPool("search", 1, 1, 60.0, finish=False)
        await pool.start()
        try:
            first = pool.lines("plan", long)
            asking = asyncio.ensure_future(anext(first))
            await asyncio.sleep(0.3)
            second = asyncio.ensure_future(anext(pool.lines("estimate", PLAN_FILE)))
            await asyncio.sleep(0.05)
            with pytest.raises(Refused) as full:
                await anext(pool.lines("estimate", PLAN_FILE))
            assert full.value.status == 429
            asking.cancel()
            start = time.monotonic()
            assert json.loads(await second)["step_time_s"] > 0
            assert time.monotonic() - start < 30
        finally:
            await pool.close()

    run_async(scenario())


def test_a_request_that_takes_too_long_is_ended() -> None:
    body = {
        "model": "llama3.1-405b",
        "cluster": {"extends": "dgx-h100", "gpus": 16384},
        "workload": {"batch": 4096, "seq": 8192},
    }

    async def scenario() -> None:
        pool = WorkerPool("search", 1, 1, 0.2, finish=False)
        await pool.start()
        try:
            with pytest.raises(Refused) as late:
                await anext(pool.lines("plan", body))
            assert late.value.status == 504
            assert late.value.error["code"] == "MW-WEB-001"
            pool.limit_s = 60
            assert json.loads(await anext(pool.lines("estimate", PLAN_FILE)))["step_time_s"] > 0
        finally:
            await pool.close()

    run_async(scenario())


def test_one_broken_view_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def data(self: View, subject: Any) -> dict[str, Any]:
        return {"good": True} if self.name == "memory" else {"bad": 1 / 0}

    monkeypatch.setattr(View, "data", data)
    lines = list(tasks.views({"config": PLAN_FILE, "views": ["verdict", "memory"]}))
    assert [(line["view"], line["error"] and line["error"]["code"]) for line in lines] == [
        ("verdict", "MW-WEB-009"),
        ("memory", None),
    ]
    illegal = {**PLAN_FILE, "plan": {"tp": 3}}
    assert next(tasks.views({"config": illegal, "views": ["verdict"]}))["error"]["code"] == "MW-PLAN-005"


def test_settings_of_another_framework_both_ways(server: str) -> None:
    titan = ask(server, "/api/text", PLAN_FILE)["settings"]["torchtitan"]
    assert titan["error"] is None
    back = ask(server, "/api/file", {"lines": titan["text"].split("\n"), "name": titan["file"], "gpus": 16})
    assert back["kind"].startswith("settings of torchtitan, ")
    assert back["config"]["plan"]["tp"] == PLAN_FILE["plan"]["tp"]
    assert back["config"]["model"] == PLAN_FILE["model"]
    words = "pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --micro-batch-size 1"
    part = ask(server, "/api/file", {"lines": [words], "name": "run.sh", "gpus": 16})
    assert part["kind"] == "settings of Megatron-LM, 4 read, without the model's vocab"
    assert "model" not in part["config"]


def test_a_worker_killed_with_its_last_message_on_the_way_is_replaced() -> None:
    """A client leaves while the end of its answer is in the pipe: the answer can still be read, and the process is dead."""

    async def second_answer() -> bytes:
        pool = WorkerPool("estimate", 1, 4, 30.0, finish=False)
        await pool.start()
        try:
            (worker,) = pool.idle
            job = WorkerJob(b"", "")
            job.worker = worker
            job.stop()
            pool.idle.clear()
            await pool._put_back(worker, alive=True)
            return b"".join([line async for line in pool.lines("catalog", {})])
        finally:
            await pool.close()

    assert run_async(second_answer())
