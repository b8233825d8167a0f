"""Start and stop `meshwright web` as a person does, and ask it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

Result = TypeVar("Result")
CLIENT = httpx.Client(
    verify=False, trust_env=False, timeout=60
)  # one for all requests: a new one takes tens of milliseconds
START_S = 60


def start(*arguments: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """Start the command and wait for the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "web", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        start_new_session=True,
    )
    assert process.stdout is not None
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    found = re.search(r"http://127\.0\.0\.1:\d+", line)
    assert found, line + process.stdout.read()
    return process, found[0]


def stop(process: subprocess.Popen[str]) -> str:
    """Interrupt a server as Ctrl-C does and return what else it printed."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a thread: where Playwright runs, the main thread has an event loop already."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
