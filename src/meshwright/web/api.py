"""The routes below /api/: read a body, compute in a worker process, answer with JSON or with lines of JSON.

`web.schema.ROUTES` lists them. A route that has no function here is a task of `web.tasks` with one answer.

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
from meshwright.web.tasks import steps
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
JSON, NDJSON, EVENTS = "application/json", "application/x-ndjson", "text/event-stream"
Parts = AsyncGenerator[bytes, None]


class Answer:
    """An ASGI application that sends parts as they are made, and stops the work for them as soon as the client leaves.

    The status is sent with the first part: an error before it is raised and has its own status, a later one is the last line."""

    def __init__(self, parts: Parts, media: str = JSON) -> None:
        self.parts, self.media = parts, media

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.send(send))
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

    async def send(self, send: Send) -> None:
        headers = [(b"content-type", self.media.encode("ascii")), (b"cache-control", b"no-store")]
        async with aclosing(self.parts) as parts:
            part: bytes | None = await anext(parts, b"")
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while part is not None:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                try:
                    part = await anext(parts, None)
                except Refused as refused:
                    part = to_line({"error": refused.error})
        await send({"type": "http.response.body", "body": b""})


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

    def handler(self, address: str) -> Callable[[Request], Awaitable[Answer]]:
        """What answers a route of `web.schema.ROUTES`."""
        own = {"catalog": self.catalog, "runs": self.runs, "runs/{name}": self.run, "watch": self.watch,
               "views": self.views, "dropped": self.dropped}  # fmt: skip

        async def task(request: Request) -> Answer:
            return Answer(self.one(address, await json_body(request)))

        return own.get(address, task)

    async def catalog(self, request: Request) -> Answer:
        return Answer(self.one("catalog", {}))

    async def runs(self, request: Request) -> Answer:
        return Answer(self.read(self.run_folders.listing))

    async def run(self, request: Request) -> Answer:
        """One run folder; `?seen=` of the last answer leaves out what it had."""
        name, seen = request.path_params["name"], request.query_params.get("seen", "")
        return Answer(self.read(lambda: self.run_folders.run(name, seen)))

    async def read(self, function: Callable[[], Json]) -> Parts:
        """What a function reads from files, in a thread."""
        try:
            yield await asyncio.to_thread(lambda: to_line(function()))
        except OSError as error:
            raise unreadable(error) from None

    async def watch(self, request: Request) -> Answer:
        """What is new in the list of runs and in the runs named by `run`, as a stream of events that ends with the client or the server.

        An event's id is what was sent until then: a browser that reconnects sends the last one back and gets what it missed."""
        names = request.query_params.getlist("run")[:MOST_WATCHED]
        seen = request.headers.get("last-event-id") or request.query_params.get("seen", "")
        if self.watching >= MOST_STREAMS:
            what, fix = f"{self.watching} pages watch runs already", "close one of them"
            raise Refused.of(429, MeshwrightError("MW-WEB-002", what, fix=fix))
        return Answer(self.news(RunWatch(self.run_folders, names, seen)), EVENTS)

    async def news(self, runs: RunWatch) -> Parts:
        self.watching += 1
        try:
            silent = 0.0
            while not self.closing.is_set():
                events = await asyncio.to_thread(runs.news)
                silent = 0.0 if events else silent + WATCH_S
                for name, data in events:
                    yield f"event: {name}\nid: {runs.seen}\ndata: ".encode() + to_line(data) + b"\n"
                if silent >= HEARTBEAT_S:  # a connection that broke is noticed when something is sent
                    silent = 0.0
                    yield b":\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.closing.wait(), WATCH_S)
        finally:
            self.watching -= 1

    async def dropped(self, request: Request) -> Answer:
        """The view of dropped traces or recordings. One such body is read at a time; others wait for it a moment, then are refused."""
        check_type(request, dropped.TYPE)
        try:
            await asyncio.wait_for(self.reading_files.acquire(), PATIENCE_S)
        except TimeoutError:
            what, fix = "the server reads other files", "try again when their view is there"
            raise Refused.of(429, MeshwrightError("MW-WEB-002", what, fix=fix)) from None
        async with AsyncExitStack() as stack:
            stack.callback(self.reading_files.release)
            folder = stack.enter_context(TemporaryDirectory(prefix="meshwright-"))
            files = dropped.DroppedFiles(Path(folder))
            await dropped.receive_files(request.stream(), files)
            kept = stack.pop_all()  # until the answer was sent, or the client has left
        task, body = files.task(request.query_params.get("reference", ""))

        async def view() -> Parts:
            async with kept:
                try:
                    yield await self.computed(task, body)
                except Refused as refused:
                    raise Refused(refused.status, files.in_words(refused.error)) from None

        return Answer(view())

    async def one(self, task: str, body: Json) -> Parts:
        """The one line of a task."""
        key = json.dumps([task, body], sort_keys=True)
        line = self.cache.get(key)
        if line is None:
            line = await self.computed(task, body)
            self.cache.put(key, line)
        yield line

    async def computed(self, task: str, body: Json) -> bytes:
        pool = self.pools[POOL_OF.get(task, QUICK)]
        async with aclosing(pool.lines(task, body, plan_key(body))) as lines:
            return b"".join([line async for line in lines])

    async def views(self, request: Request) -> Answer:
        """The lines of several views as they are ready: known ones at once, then cheap ones, then searched ones."""
        return Answer(self.view_lines(checked_views(await json_body(request))), NDJSON)

    async def view_lines(self, body: Json) -> Parts:
        keys = {name: view_key(body, name) for name in body["views"]}
        known = {name: line for name, key in keys.items() if (line := self.cache.get(key)) is not None}
        for line in known.values():
            yield line
        missing: dict[str, list[tuple[str, bool]]] = {QUICK: [], SLOW: [], SEARCHED: []}
        for name, final in steps([name for name in keys if name not in known]):
            missing[POOL_OF_VIEWS[view(name).kind if final else view(name).first]].append((name, final))
        streams = [self.lines_of_pool(pool, body, asked, keys) for pool, asked in missing.items() if asked]
        async with aclosing(merged(streams)) as parts:
            async for lines in parts:
                yield lines

    async def lines_of_pool(self, pool: str, body: Json, asked: list[tuple[str, bool]], keys: dict[str, str]) -> Parts:
        """The lines of the `steps` of views that one pool computes; final ones are kept under their `keys`.

        Where the pool fails, each view that is missing gets a line with the error; bad input raises."""
        missing = {name for name, final in asked if final}
        request = {**body, "steps": asked}
        try:
            async with aclosing(self.pools[pool].lines("views", request, plan_key(body["config"]))) as parts:
                async for lines in parts:
                    yield lines
                    for line in lines.splitlines(keepends=True):
                        found = json.loads(line)
                        if found["final"]:
                            missing.discard(found["view"])
                            if not found["error"]:
                                self.cache.put(keys[found["view"]], line)
        except Refused as refused:
            if refused.status == 400:
                raise
            for name in sorted(missing):
                yield to_line({"view": name, "data": None, "final": True, "error": refused.error})


def check_type(request: Request, media: str) -> None:
    """Raise if the body of a request is of another type."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != media:
        what = f"the content type is not {media}"
        raise Refused.of(415, MeshwrightError("MW-WEB-004", what, fix=f"Content-Type: {media}"))


async def json_body(request: Request) -> Json:
    """Read and check the body of a request; one that is too large is not kept."""
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > MOST_BYTES:
            raise Refused.of(413, MeshwrightError("MW-WEB-004", f"the body has more than {MOST_BYTES:,} bytes"))
    check_type(request, JSON)
    return parse(content)


async def merged(streams: list[Parts]) -> Parts:
    """The lines of several streams in the order in which they arrive. The first error ends all of them."""
    queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    async def pump(stream: Parts) -> None:
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
