"""Kill the writing process during saves: whatever the moment, the last finished checkpoint must load.

    python benchmarks/chaos_save.py [--kills 1000] [--seed 0] [--workers 1] [--minutes 9]

A process trains a small model and saves after every step. Once a save has begun, its parent waits for a random part of the usual duration of a
save and kills it (SIGKILL). The next process resumes from the same folder, as a restart does, and goes on. After each kill

    loadable   the resume must succeed, at the step of the last save that was finished, or of the one that was interrupted
    exact      the loaded weights must have the hash that the killed process had computed for this step
    lost       finished saves that were not there any more: none is allowed

The moments of the kills follow from the seed; the result of each is a line of OUT/kills-SEED-WORKER.jsonl. A slice that is started
again continues after the last line.
"""

import argparse
import hashlib
import json
import multiprocessing
import random
import statistics
import sys
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload

MODEL = Model(hidden=64, layers=2, heads=4, ffn=128, vocab=256)
PLAN = Plan(param_dtype="fp32", master=False)
WORKLOAD = Workload(batch=2, seq=16, precision="fp32")
FIRST_SAVE_S = 0.05  # assumed until the first saves were timed
ANSWER_S = 60.0


def writer(root: str, pipe: Connection) -> None:
    """Resume, then train and save until killed. Reports (event, step, hash of the weights)."""
    from torch import distributed

    from meshwright.parallel.apply import apply
    from meshwright.training.checkpoint.load import resume
    from meshwright.training.checkpoint.save import Saver
    from meshwright.training.data.samples import RandomSamples
    from meshwright.training.loop import Trainer

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    trainer = Trainer(apply(MODEL, PLAN, WORKLOAD, 0), RandomSamples(MODEL, WORKLOAD.seq, 0))
    saver = Saver(trainer, Path(root), None, keep=2, asynchronous=False)
    saver.check()
    found = resume(trainer, Path(root))
    pipe.send(("resumed", found.manifest.step if found else 0, weights_hash(trainer) if found else ""))
    while True:
        trainer.train(1)
        pipe.send(("begun", trainer.step, weights_hash(trainer)))
        saver.save(wait=True)
        pipe.send(("finished", trainer.step, ""))


def weights_hash(trainer: Any) -> str:
    digest = hashlib.sha256()
    for piece in trainer.parallel.pieces:
        digest.update(piece.local.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Chaos(threading.Thread):
    """One folder in which process after process is killed."""

    def __init__(self, folder: Path, seed: int, kills: int, deadline: float) -> None:
        super().__init__(daemon=True)
        self.root, self.kills, self.deadline, self.seed = folder / "checkpoints", kills, deadline, seed
        self.log = folder / "kills.jsonl"
        self.root.mkdir(parents=True, exist_ok=True)
        self.durations = [FIRST_SAVE_S]
        self.hashes: dict[int, str] = {}
        self.finished = 0
        rows = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        self.done = len(rows)
        self.known = not rows  # hashes of an earlier slice are gone: its last checkpoint is only loaded
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while self.done < self.kills and time.monotonic() < self.deadline:
                row = self.kill_once(random.Random(f"{self.seed}/{self.done}"))
                with self.log.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(row) + "\n")
                self.done += 1
        except BaseException as failure:
            self.failure = failure

    def kill_once(self, draw: random.Random) -> dict[str, Any]:
        """Start a process, check what it resumed, kill it during one of its first saves."""
        context = multiprocessing.get_context("forkserver")
        pipe, end = context.Pipe()
        process = context.Process(target=writer, args=(str(self.root), end), daemon=True)
        process.start()
        end.close()
        try:
            row = self.check_resumed(pipe)
            save = draw.randint(1, 3)
            for _ in range(save - 1):
                self.await_save(pipe)
            self.begun(pipe)
            after = draw.uniform(0.0, 1.3) * statistics.median(self.durations[-50:])
            time.sleep(after)
        finally:
            process.kill()
            process.join()
        while pipe.poll():  # it may have finished just before
            try:
                event, step, digest = pipe.recv()
            except EOFError:
                break
            if event == "begun":  # it may even have completed the next save
                self.hashes[step] = digest
            else:
                self.finished = step
        pipe.close()
        left = sorted(path.name for path in self.root.iterdir())
        return {**row, "after_s": after, "interrupted": any(name.startswith(".") for name in left)}

    def check_resumed(self, pipe: Connection) -> dict[str, Any]:
        event, step, found = self.receive(pipe)
        loadable = event == "resumed" and not any(path.name.startswith("damaged") for path in self.root.iterdir())
        exact = not found or not self.known or self.hashes.get(step) == found
        lost = max(0, self.finished - step)
        self.known, self.finished = True, step
        self.hashes = {step: found}
        return {"step": step, "loadable": loadable, "exact": exact, "lost": lost}

    def begun(self, pipe: Connection) -> None:
        event, step, digest = self.receive(pipe)
        assert event == "begun", event
        self.hashes[step] = digest

    def await_save(self, pipe: Connection) -> None:
        self.begun(pipe)
        began = time.perf_counter()
        event, step, _ = self.receive(pipe)
        assert event == "finished", event
        self.durations.append(time.perf_counter() - began)
        self.finished = step

    def receive(self, pipe: Connection) -> tuple[str, int, str]:
        if not pipe.poll(ANSWER_S):
            raise TimeoutError("the writing process does not answer")
        try:
            return pipe.recv()
        except EOFError:
            raise RuntimeError("the writing process failed; its error is above") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos-save"))
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [
            "meshwright.training.launch.preload",
            "meshwright.training.checkpoint.load",
            "meshwright.training.checkpoint.save",
        ]
    )
    share = -(-options.kills // options.workers)
    workers = [
        Chaos(options.out / f"{options.seed}-{number}", options.seed * 1000 + number, share, deadline)
        for number in range(options.workers)
    ]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        time.sleep(2.0)
        print(f"\r{sum(w.done for w in workers)} of {options.kills} kills", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows = [json.loads(line) for w in workers if w.log.exists() for line in w.log.read_text().splitlines()]
    counts = Counter(
        interrupted=sum(row["interrupted"] for row in rows),
        unloadable=sum(not row["loadable"] for row in rows),
        inexact=sum(not row["exact"] for row in rows),
        lost=sum(row["lost"] > 0 for row in rows),
    )
    print(
        f"{len(rows)} kills: {counts['interrupted']} while a save was being written, {counts['unloadable']} left no loadable state,"
    )
    print(f"{counts['inexact']} loaded other weights than were saved, {counts['lost']} lost a finished checkpoint")
    if failure := next((w.failure for w in workers if w.failure), None):
        raise failure
    if counts["unloadable"] or counts["inexact"] or counts["lost"]:
        raise SystemExit("a kill during a save did harm")


if __name__ == "__main__":
    main()
