"""Which requests are answered, and what a browser may do with the page.

host      The server binds 127.0.0.1. A web page of another site can still send requests there through the user's browser, under a
          name that it made point to 127.0.0.1 (DNS rebinding). So the Host header must name this address and port.
origin    A POST of a browser carries the origin of the page that sent it; another origin is refused. No answer has a CORS header.
body      At most 64 kB, and JSON: a form of another site cannot send `application/json` without asking first.
policy    The page runs the modules of this server and the one import map whose hash is given; no inline script, no other address.
"""

from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.errors import MeshwrightError
from meshwright.units import Json
from meshwright.web.worker import to_line

NAMES = ("127.0.0.1", "localhost")


def policy(import_map_hash: str) -> str:
    """The content-security policy of the page."""
    return (
        f"default-src 'none'; script-src 'self' {import_map_hash}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class RequestGuard:
    """Refuses requests of other hosts and origins and adds the headers of safety to every answer."""

    def __init__(self, app: ASGIApp, port: int, import_map_hash: str) -> None:
        self.app, self.port = app, port
        self.headers = [
            (b"content-security-policy", policy(import_map_hash).encode("ascii")),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"cross-origin-opener-policy", b"same-origin"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        error = self.problem(scope)
        app = self.app if error is None else error_response(403, error)
        await app(scope, receive, self.with_headers(send))

    def problem(self, scope: Scope) -> MeshwrightError | None:
        """Return why a request is refused; None if it may be answered."""
        headers = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == b"host"]
        allowed = self.allowed()
        if len(hosts) != 1 or hosts[0].lower() not in allowed:
            what = f"the host '{(hosts or [''])[0][:60]}' is not this server"
            why = "Another site may have sent the request through your browser"
            return MeshwrightError("MW-WEB-010", what, why=why, valid=allowed)
        origins, ours = [value for name, value in headers if name == b"origin"], [f"http://{host}" for host in allowed]
        if scope["method"] not in ("GET", "HEAD") and any(origin.lower() not in ours for origin in origins):
            return MeshwrightError("MW-WEB-010", f"the origin '{origins[0][:60]}' is not this server", valid=ours)
        return None

    def allowed(self) -> list[str]:
        return [f"{name}:{self.port}" for name in NAMES] + (list(NAMES) if self.port == 80 else [])

    def with_headers(self, send: Send) -> Send:
        async def wrapped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *self.headers]}
            await send(message)

        return wrapped


def error_response(status: int, error: MeshwrightError | Json, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with an error in the one shape."""
    found = error.as_dict() if isinstance(error, MeshwrightError) else error
    later = {"retry-after": "1"} if status in (429, 503) else {}
    return Response(to_line({"error": found}), status, {**(headers or {}), **later}, "application/json")
