"""The application: the page and its files, the API, and the checks in front of both."""

import hashlib
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from meshwright.errors import MeshwrightError
from meshwright.host import usable_processes
from meshwright.view.page.frame import TYPES, live_page, static_file, static_names
from meshwright.view.page.runs import RunFolders
from meshwright.web import schema
from meshwright.web.api import CHIPS, QUICK, SEARCHED, SLOW, Api, Cache
from meshwright.web.jobs import Refused, WorkerPool
from meshwright.web.safety import RequestGuard, error_response
from meshwright.web.worker import failure, to_line

QUICK_LIMIT_S, SEARCH_LIMIT_S = 20.0, 180.0
MANY, FEW = 400, 16  # requests that may wait for a worker
CACHE_BYTES = 64 * 2**20


class Site:
    """The application of a server on `port` of this machine, and the worker processes behind it; run folders are shown below `runs`."""

    def __init__(self, port: int, runs: Path | None = None) -> None:
        self.html, digest = live_page()
        self.pools: dict[str, WorkerPool] = {}
        self.app = RequestGuard(Starlette(routes=self.routes(runs), exception_handlers=HANDLERS), port, digest)

    def routes(self, runs: Path | None) -> list[Route]:
        api = self.api = Api(self.pools, Cache(CACHE_BYTES), RunFolders(runs))
        return [
            Route("/", self.index),
            Route("/static/{path:path}", static, middleware=[Middleware(GZipMiddleware)]),
            Route("/api/openapi.json", openapi),  # before the others: no task answers it
            *(Route(f"/api/{r.address}", api.handler(r.address), methods=[r.method]) for r in schema.ROUTES),
        ]

    async def index(self, request: Request) -> Response:
        return Response(self.html, media_type="text/html; charset=utf-8", headers={"cache-control": "no-cache"})

    async def start(self) -> None:
        """Start the worker processes."""
        processes = max(2, min(usable_processes(), 4))
        self.pools[QUICK] = WorkerPool(QUICK, processes, MANY, QUICK_LIMIT_S, finish=True)
        for kind in (CHIPS, SLOW):
            self.pools[kind] = WorkerPool(kind, 2, MANY, SEARCH_LIMIT_S, finish=False)
        self.pools[SEARCHED] = WorkerPool(SEARCHED, 2, FEW, SEARCH_LIMIT_S, finish=False)
        for pool in self.pools.values():
            await pool.start()

    def end_streams(self) -> None:
        """End the answers that would last as long as the server."""
        self.api.closing.set()

    async def stop(self) -> None:
        """End the worker processes and what they compute."""
        for pool in self.pools.values():
            await pool.close()


async def openapi(request: Request) -> Response:
    return Response(to_line(schema.document()), media_type="application/json")


async def static(request: Request) -> Response:
    """A file of the page. Its name is looked up among the names that exist and is never joined to a path."""
    name = request.path_params["path"]
    if name not in static_names():
        return await not_found(request, None)
    content = static_file(name)
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"cache-control": "no-cache", "etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES[name.rpartition(".")[2]], headers=headers)


async def internal_error(request: Request, error: Exception) -> Response:
    """A bug of the server, in the one shape of errors; the traceback is in the log."""
    return error_response(500, failure(error)["error"])


async def not_found(request: Request, error: Exception | None) -> Response:
    """An unknown address or method, in the one shape of errors."""
    status = getattr(error, "status_code", 404)
    what = f"{request.method[:10]} {request.url.path[:100]} is not an address of this server"
    found = MeshwrightError("MW-WEB-005", what, fix="GET /api/openapi.json lists the addresses")
    return error_response(status, found, getattr(error, "headers", None))


async def refused(request: Request, error: Any) -> Response:
    """Bad input, or an answer that cannot be computed now."""
    if isinstance(error, Refused):
        return error_response(error.status, error.error)
    return error_response(404 if error.code == "MW-REP-001" else 400, error)


async def left(request: Request, error: Exception) -> Response:
    """The client left before its request was complete: nobody reads the answer."""
    return Response(status_code=400)


HANDLERS: Any = {
    404: not_found,
    405: not_found,
    500: internal_error,
    Refused: refused,
    MeshwrightError: refused,
    ClientDisconnect: left,
}
