"""One server for all tests of a worker process: `meshwright web` on a free port of this machine. Tests in a browser run in `make soak`, except
those that are marked `daily`: one of each workspace."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from web.browser import chromium, open_page, tabs
from web.running import start, stop

__all__ = ["chromium", "open_page", "run_folders", "server", "tabs"]


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow tests
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("daily"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def run_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder whose run folders the server shows."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def server(run_folders: Path) -> Iterator[str]:
    """The address of a running server, such as http://127.0.0.1:40123. At the end Ctrl-C ends it and its workers."""
    process, address = start("--runs", str(run_folders))
    yield address
    printed = stop(process)
    assert "Traceback" not in printed, printed
    assert process.returncode in (0, 130)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) != 0
