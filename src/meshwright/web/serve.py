"""Run the server on one port of this machine until Ctrl-C."""

import socket
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.units import Json
from meshwright.version import install_command

HOST = "127.0.0.1"
BACKLOG = 512


def serve(port: int, runs: Path | None, ready: Callable[[str], None]) -> None:
    """Answer requests on 127.0.0.1 until the process is interrupted; `ready` is called with the address once it answers."""
    try:
        import uvicorn

        from meshwright.web.app import Site
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("starlette", "uvicorn"):
            raise
        what, why = f"the package {error.name} is not installed", "The page needs the [web] extra"
        raise MeshwrightError("MW-WEB-011", what, why=why, fix=install_command("web")) from None
    listening = listen(port)
    number = listening.getsockname()[1]
    site = Site(number, runs)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await site.start()
            await super().startup(sockets)
            if self.started:
                ready(f"http://{HOST}:{number}")

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            site.end_streams()
            await super().shutdown(sockets)
            await site.stop()

    quiet: Json = {"log_level": "warning", "access_log": False, "server_header": False}
    config = uvicorn.Config(site.app, lifespan="off", timeout_graceful_shutdown=2, ws="none", **quiet)
    try:
        Server(config).run(sockets=[listening])
    finally:
        listening.close()


def listen(port: int) -> socket.socket:
    """A socket that listens on a port of this machine; 0 takes a free one.

    It names its protocol: asyncio sends small packets at once (TCP_NODELAY) only where it knows that a socket is TCP. Without this the body of
    an answer waits up to 40 ms for the acknowledgement of its head."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        what, why = f"port {port} of {HOST} cannot be used", error.strerror or str(error)
        raise MeshwrightError("MW-WEB-012", what, why=why, fix="--port 0 takes a free one") from None
    return listening
