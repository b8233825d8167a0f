"""Runs training scripts under the recorder or the watch, in forks of one process that has imported the framework: importing it takes longer than
two steps.

Reads one job after the other from standard input, as JSON: {script, words, world, attached, arguments, variables, log, seconds}. Answers each
with the exit codes of its ranks. A rank is a process with the variables that torchrun sets; what it prints goes to the log.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback

import torch  # noqa: F401

from meshwright.check import cpu
from meshwright.check.live import LiveWatch
from meshwright.check.recorder import StepRecorder

ATTACHED = {"record": StepRecorder, "watch": LiveWatch}


def run_rank(job, rank, port):
    """In a fork: the script, from its start to its end, as the Python interpreter would run it."""
    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": job["world"],
        "LOCAL_WORLD_SIZE": job["world"],
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(job["variables"])
    sys.argv = [job["script"], *job["words"]]
    sys.path.insert(0, os.path.dirname(job["script"]))
    code = 0
    try:
        ATTACHED[job["attached"]](**job["arguments"]).attach()
        runpy.run_path(job["script"], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(job):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = {}
    for rank in range(job["world"]):
        child = os.fork()
        if child == 0:
            run_rank(job, rank, port)
        children[child] = rank
    codes, until = [None] * job["world"], time.monotonic() + job["seconds"]
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
            if any(codes):
                until = min(until, time.monotonic() + 5)  # the other ranks may wait for this one
        elif time.monotonic() > until:
            for left in children:
                os.killpg(left, signal.SIGKILL)
            until = float("inf")
        else:
            time.sleep(0.02)
    return codes


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what frameworks print at import is no answer
    cpu.install()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()


main()
