"""The routes below /api/: read a body, compute in a worker process, answer with JSON or with lines of JSON.

POST /api/estimate, /api/plan, /api/simulate, /api/show     what the command of that name prints with --json
POST /api/views         the data of several views, one line each as they are ready
POST /api/choices       the values of each plan field: legal, with what changes, or why not
POST /api/mend          what is wrong with a plan, and the changes that make it legal
POST /api/text          a plan file, a command, settings and launch files
POST /api/trace         the simulated step as a trace for Perfetto
POST /api/file          what a file is, as sections of a plan file
GET  /api/catalog       what the inputs offer
GET  /api/runs          run folders (`view.page.runs`)
GET  /api/watch         what is new in them, as a stream of events
POST /api/dropped       traces, or recordings of `check`: the view that shows them

Errors are raised: `app` turns them into answers. `Cache` keeps the newest answers by their requests, up to a number of bytes.
"""

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from meshwright.errors import MeshwrightError
from meshwright.units import Json
from meshwright.view.page import registry
from meshwright.view.page.registry import CHEAP, SEARCH, view
from meshwright.view.page.runs import RunFolders, RunWatch, unreadable
from meshwright.web import dropped
from meshwright.web.bodies import MOST_BYTES, ViewsBody, parse
from meshwright.web.jobs import Refused, WorkerPool
from meshwright.web.safety import read_body
from meshwright.web.worker import to_line


class Cache:
    """A least-recently-used cache of byte strings. Answers depend on nothing but the request, so they never expire."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self.entries: OrderedDict[str, bytes] = OrderedDict()

    def get(self, key: str) -> bytes | None:
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Keep an answer; the oldest ones are dropped to make room for it."""
        if key in self.entries or len(value) + len(key) > self.most_bytes // 4:
            return
        self.entries[key] = value
        self.bytes += len(key) + len(value)
        while self.bytes > self.most_bytes:
            old, dropped = self.entries.popitem(last=False)
            self.bytes -= len(old) + len(dropped)


QUICK, CHIPS, SLOW, SEARCHED = "quick", "chips", "slow", "search"  # pools of workers
# Tasks that take seconds, and the one that prices every chip; all others are quick.
POOL_OF = {**dict.fromkeys(("plan", "explain", "compare"), SEARCHED), "choices": CHIPS}
POOL_OF_VIEWS = {CHEAP: QUICK, registry.SLOW: SLOW, SEARCH: SEARCHED}
WATCH_S, HEARTBEAT_S = 0.5, 15.0
MOST_STREAMS, MOST_WATCHED = 32, 16
PATIENCE_S = 3.0  # a page that drops other files has just left the answer to its last ones, which must end first
JSON, NDJSON = b"application/json", b"application/x-ndjson"

Sender = Callable[[Send], Awaitable[None]]


class Answer:
    """An ASGI application that sends an answer and stops the work for it as soon as the client leaves."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.sender(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not sending.done():
                sending.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            found = await asyncio.gather(sending, return_exceptions=True)
        if isinstance(found[0], Exception):
            raise found[0]


async def disconnected(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Api:
    """The handlers, with the worker processes and the answers given before."""

    def __init__(self, pools: dict[str, WorkerPool], cache: Cache, runs: RunFolders) -> None:
        self.pools, self.cache, self.run_folders = pools, cache, runs
        self.closing, self.watching = asyncio.Event(), 0
        self.reading_files = asyncio.Lock()

    def task(self, name: str) -> Callable[[Request], Awaitable[Answer]]:
        """The handler of a route that answers with one JSON value."""

        async def handler(request: Request) -> Answer:
            return await self.answered(request, lambda body: self.one(name, body))

        return handler

    async def catalog(self, request: Request) -> Answer:
        return Answer(self.one("catalog", {}))

    async def runs(self, request: Request) -> Answer:
        return Answer(self.read(self.run_folders.listing))

    async def run(self, request: Request) -> Answer:
        """One run folder; `?seen=` of the last answer leaves out what it had."""
        name, seen = request.path_params["name"], request.query_params.get("seen", "")
        return Answer(self.read(lambda: self.run_folders.run(name, seen)))

    def read(self, function: Callable[[], Json]) -> Sender:
        """Send what a function reads from files, in a thread."""

        async def sender(send: Send) -> None:
            try:
                line = await asyncio.to_thread(lambda: to_line(function()))
            except OSError as error:
                raise unreadable(error) from None
            await send_json(send, line)

        return sender

    async def watch(self, request: Request) -> Answer:
        """What is new in the list of runs and in the runs named by `run`, as a stream of events that ends with the client or the server.

        An event's id is what was sent until then: a browser that reconnects sends the last one back and gets what it missed."""
        names = request.query_params.getlist("run")[:MOST_WATCHED]
        seen = request.headers.get("last-event-id") or request.query_params.get("seen", "")
        if self.watching >= MOST_STREAMS:
            what, fix = f"{self.watching} pages watch runs already", "close one of them"
            raise Refused.of(429, MeshwrightError("MW-WEB-002", what, fix=fix))
        return Answer(lambda send: self.send_news(RunWatch(self.run_folders, names, seen), send))

    async def send_news(self, runs: RunWatch, send: Send) -> None:
        self.watching += 1
        try:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            silent = 0.0
            while not self.closing.is_set():
                events = await asyncio.to_thread(runs.news)
                silent = 0.0 if events else silent + WATCH_S
                if silent >= HEARTBEAT_S:  # a connection that broke is noticed when something is sent
                    events, silent = [(":", {})], 0.0
                for name, data in events:
                    text = b":\n\n" if name == ":" else event_bytes(name, data, runs.seen)
                    await send({"type": "http.response.body", "body": text, "more_body": True})
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.closing.wait(), WATCH_S)
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.watching -= 1

    async def dropped(self, request: Request) -> Answer:
        """The view of dropped traces or recordings. One such body is read at a time; others wait for it a moment, then are refused."""
        if request.headers.get("content-type", "") != dropped.TYPE:
            what = f"the content type is not {dropped.TYPE}"
            raise Refused.of(415, MeshwrightError("MW-WEB-004", what, fix=f"Content-Type: {dropped.TYPE}"))
        try:
            await asyncio.wait_for(self.reading_files.acquire(), PATIENCE_S)
        except TimeoutError:
            what, fix = "the server reads other files", "try again when their view is there"
            raise Refused.of(429, MeshwrightError("MW-WEB-002", what, fix=fix)) from None
        async with AsyncExitStack() as stack:
            stack.callback(self.reading_files.release)
            folder = stack.enter_context(TemporaryDirectory(prefix="meshwright-"))
            files = dropped.DroppedFiles(Path(folder))
            await dropped.receive_files(request.receive, files)
            kept = stack.pop_all()  # until the answer was sent, or the client has left
        task, body = files.task(request.query_params.get("reference", ""))

        async def sender(send: Send) -> None:
            async with kept:
                try:
                    line = await self.computed(task, body)
                except Refused as refused:
                    raise Refused(refused.status, files.in_words(refused.error)) from None
            await send_json(send, line)

        return Answer(sender)

    async def views(self, request: Request) -> Answer:
        """The handler of /api/views."""
        return await self.answered(request, lambda body: self.several(checked_views(body)))

    async def answered(self, request: Request, compute: Callable[[Json], Sender]) -> Answer:
        """Read and check the body, then answer with what `compute` sends."""
        content = await read_body(request.receive, dict(request.headers))
        if content is None:
            raise Refused.of(413, MeshwrightError("MW-WEB-004", f"the body has more than {MOST_BYTES:,} bytes"))
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            what, fix = "the content type is not application/json", "Content-Type: application/json"
            raise Refused.of(415, MeshwrightError("MW-WEB-004", what, fix=fix))
        return Answer(compute(parse(content)))

    def one(self, task: str, body: Json) -> Sender:
        """Send the one line of a task as a JSON answer."""
        key = json.dumps([task, body], sort_keys=True)

        async def sender(send: Send) -> None:
            line = self.cache.get(key)
            if line is None:
                line = await self.computed(task, body)
                self.cache.put(key, line)
            await send_json(send, line)

        return sender

    async def computed(self, task: str, body: Json) -> bytes:
        pool = self.pools[POOL_OF.get(task, QUICK)]
        async with aclosing(pool.lines(task, body, plan_key(body))) as lines:
            return b"".join([line async for line in lines])

    def several(self, body: Json) -> Sender:
        """Send the lines of several views as they are ready: known ones at once, then cheap ones, then searched ones."""

        async def sender(send: Send) -> None:
            started = False

            async def begin() -> None:
                headers = [(b"content-type", NDJSON), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})

            try:
                async with aclosing(self.view_lines(body)) as lines:
                    async for line in lines:
                        if not started:
                            await begin()
                            started = True
                        await send({"type": "http.response.body", "body": line, "more_body": True})
            except Refused as refused:
                if not started:
                    raise
                await send({"type": "http.response.body", "body": to_line({"error": refused.error}), "more_body": True})
            if not started:  # no view was asked for
                await begin()
            await send({"type": "http.response.body", "body": b""})

        return sender

    async def view_lines(self, body: Json) -> AsyncGenerator[bytes, None]:
        keys = {name: view_key(body, name) for name in body["views"]}
        missing: dict[str, list[str]] = {QUICK: [], SLOW: [], SEARCHED: []}
        for name, key in keys.items():
            if (known := self.cache.get(key)) is not None:
                yield known
            else:
                missing[POOL_OF_VIEWS[view(name).kind]].append(name)
        streams = [self.searched_or_quick(pool, body, names) for pool, names in missing.items() if names]
        async with aclosing(merged(streams)) as lines:
            async for line in lines:
                found = json.loads(line)
                if found["final"] and not found["error"]:
                    self.cache.put(keys[found["view"]], line)
                yield line

    async def searched_or_quick(self, pool: str, body: Json, names: list[str]) -> AsyncGenerator[bytes, None]:
        """The lines of views that one pool computes. Where it fails, each view that is missing gets a line with the error; bad input raises."""
        missing = set(names)
        try:
            async with aclosing(
                self.pools[pool].lines("views", {**body, "views": names}, plan_key(body["config"]))
            ) as lines:
                async for line in lines:
                    yield line
                    found = json.loads(line)
                    if found["final"]:
                        missing.discard(found["view"])
        except Refused as refused:
            if refused.status == 400:
                raise
            for name in sorted(missing):
                yield to_line({"view": name, "data": None, "final": True, "error": refused.error})


def event_bytes(name: str, data: Json, seen: str) -> bytes:
    """One server-sent event."""
    return f"event: {name}\nid: {seen}\ndata: ".encode() + to_line(data) + b"\n"


async def send_json(send: Send, line: bytes) -> None:
    """Send one JSON value as the whole answer."""
    size = str(len(line)).encode("ascii")
    headers = [(b"content-type", JSON), (b"content-length", size), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": line})


async def merged(streams: list[AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
    """The lines of several streams in the order in which they arrive. The first error ends all of them."""
    queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    async def pump(stream: Any) -> None:
        try:
            async with aclosing(stream):
                async for line in stream:
                    queue.put_nowait(line)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def plan_key(body: Any) -> str:
    """Requests with the same key share what a worker computed for the last of them."""
    return json.dumps(body, sort_keys=True)


def view_key(body: Json, name: str) -> str:
    """Return the cache key of one view's data."""
    options = (body.get("options") or {}).get(name)
    return json.dumps([name, body["config"], options, body.get("question")], sort_keys=True)


def checked_views(body: Json) -> Json:
    """The body of /api/views, with every part of its type and every view known."""
    asked = ViewsBody.read(body)
    for name in (*asked.views, *(asked.options or {})):
        view(name)
    return {**body, "views": list(dict.fromkeys(asked.views))}
