"""Who notices a mutant of `parallel`? Tests of its module without ranks, layouts that exercise it, its tests with ranks, a jury.

    python tests/proof/mutate.py --sample 400 --jobs 14 --seed 7 --minutes 9 --out mutants.txt

A mutant is *killed* when training fails or hangs, when the comparison with one device finds a difference, when ranks send
what was not lowered, or when a test of the module fails (`unit_killers`). What lives is listed with its line and its change,
to be judged: a gap to be closed, or a change that computes the same (`equivalent`, each with its reason; those are counted
apart). Controls, ranks in which nothing was changed, must live: a machine so busy that they hang tells nothing.

A layout judges by something that has no mutant: it is put in the ranks, and one device is as it was. Of what one device runs
in the place of ranks that lose something (`emulation`, `apart`) it is the other way round. A test has it everywhere, and holds
it to a definition written out. Mutants are drawn evenly from all modules, the summary counts them by module.

Sources are copied once and the jobs run on the copy, so that files may be edited meanwhile. Each job is a process that is
asked for one mutant after the other; killers stand in the order of what they cost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import changes  # noqa: E402
from equivalent import reason_of  # noqa: E402
from killers import JURY, KILLERS, NOT_BEFORE_THE_JURY  # noqa: E402
from unit_killers import failing, failing_alone  # noqa: E402

CONTROLS = 3
SILENCE_S = 60.0
IN_THEIR_PLACE = ("changes:emulation_", "changes:apart_")  # what one device runs where ranks lose something
Trial = tuple[str, dict[str, Any], dict[str, Any]]  # model, plan, options of the router or the precision


# A job: one mutant after the other


def work() -> None:
    for line in sys.stdin:
        prepare, module = json.loads(line)
        started = time.monotonic()
        by, how = verdict(prepare, module)
        print(json.dumps([by, how, time.monotonic() - started]), flush=True)


def verdict(prepare: str, module: str) -> tuple[str, str]:
    """Which layouts or tests noticed, and how; nothing where none did."""
    judges = [by_tests_alone, partial(by_layouts, trials=[[killer] for killer in KILLERS.get(module, [])]), by_tests]
    if module not in NOT_BEFORE_THE_JURY:
        judges.append(partial(by_layouts, trials=JURY))
    return next((found for judge in judges if (found := judge(prepare, module))[0]), ("", ""))


def by_layouts(prepare: str, module: str, trials: list[list[Trial]]) -> tuple[str, str]:
    for together in trials:
        how = noticed(prepare, together)
        if how:
            return told_of(together), how
    return "", ""


def by_tests_alone(prepare: str, module: str) -> tuple[str, str]:
    by = failing_alone(prepare, module)
    return by, "test" if by else ""


def by_tests(prepare: str, module: str) -> tuple[str, str]:
    by = failing(prepare, module)
    return by, "test" if by else ""


def told_of(trials: list[Trial]) -> str:
    return " | ".join(f"{model} {said}" for model, said, _ in trials)


def noticed(prepare: str, trials: list[Trial]) -> str:
    import layouts

    import ranks
    from meshwright.errors import MeshwrightError
    from meshwright.verify.compare import compare

    these = [layout_of(layouts, trial, prepare) for trial in trials]
    for layout in these:
        if not layout.plan.lossy:
            reference(layout._replace(prepare="").reference)  # before the mutant: no fault of its own
    try:
        by_rank = ranks.run(these[0].plan.world, layouts.train_all, [layout.job() for layout in these],
                            silence=SILENCE_S * len(these) ** 0.5, group_timeout=SILENCE_S / 2)  # fmt: skip
    except MeshwrightError as error:
        if ", in put\n" in str(error):
            raise  # the mutant itself could not be put in place
        return "hang" if "hung" in str(error) or "Timed out" in str(error) else "error"
    traces = [[rank[i] for rank in by_rank] for i in range(len(these))]
    try:
        references = [expected(layout, many) for layout, many in zip(these, traces, strict=True)]
    except MeshwrightError:
        return "error"  # ranks that told one device what it cannot lose
    if any(compare(*pair).breaks for pair in zip(references, traces, strict=True)):
        return "difference"
    every = [trace for many in traces for trace in many]
    unknown = any(trace.observed.unknown for trace in every if trace.observed)
    return "traffic" if unknown or any(row.unexplained for trace in every for row in trace.traffic) else ""


def layout_of(layouts: Any, trial: Trial, prepare: str) -> Any:
    from meshwright.describe.plan import Plan

    model, said, options = trial
    router = tuple((name, value) for name, value in options.items() if name != "precision")
    return layouts.Layout(model, Plan(**said), prepare, router, precision=options.get("precision", "bf16"))


def expected(layout: Any, many: list[Any]) -> Any:
    """One device's training; of lossy sums the ranks tell it what they lose. It is as it was, but for a mutant of what one
    device runs in their place."""
    from meshwright.verify.prove import one_device

    if layout.plan.lossy:
        prepare = layout.prepare if layout.prepare.startswith(IN_THEIR_PLACE) else ""
        return alone(replace(one_device(layout.job(), [{"fp64": trace} for trace in many]), prepare=prepare))
    return reference(layout._replace(prepare="").reference)


@cache
def reference(layout: Any) -> Any:
    return alone(layout.job())


def alone(job: Any) -> Any:
    import layouts

    import ranks

    return ranks.run(1, layouts.train_all, [job], silence=SILENCE_S)[0][0]


# The parent: a queue, the jobs, and what they found


class Campaign:
    def __init__(self, queue: list[changes.Mutant], home: Path) -> None:
        self.queue, self.home, self.asked = queue, home, len(queue)
        self.found: list[tuple[changes.Mutant, str, str, float]] = []
        self.lock = threading.Lock()
        self.jobs: list[subprocess.Popen] = []

    def job(self) -> None:
        script = self.home / "tests" / "proof" / "mutate.py"
        environment = {**os.environ, "PYTHONPATH": str(self.home / "src"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, str(script), "--work"], stdin=subprocess.PIPE, text=True,
                                   stdout=subprocess.PIPE, env=environment)  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        with self.lock:
            self.jobs.append(process)
        while True:
            with self.lock:
                if not self.queue:
                    break
                mutant = self.queue.pop(0)
            try:
                print(json.dumps([mutant.prepare, mutant.module]), file=process.stdin, flush=True)
                answer = process.stdout.readline()
            except (BrokenPipeError, ValueError):
                break
            if not answer:
                break
            with self.lock:
                self.found.append((mutant, *json.loads(answer)))
                if not self.found[-1][1] and not mutant.control:
                    print(told(mutant), flush=True)
        process.stdin.close()

    def run(self, jobs: int, seconds: float) -> None:
        threads = [threading.Thread(target=self.job, daemon=True) for _ in range(jobs)]
        ends = time.monotonic() + seconds
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))
        for process in self.jobs:
            process.kill()  # its ranks end with it
        for process in self.jobs:
            process.wait()

    def summary(self) -> str:
        with self.lock:
            found, left = list(self.found), self.asked - len(self.found)
        controls = [row for row in found if row[0].control]
        tried = [row for row in found if not row[0].control]
        lives = [row[0] for row in tried if not row[1]]
        same = [m for m in lives if reason_of(m)]
        gaps = [m for m in lives if not reason_of(m)]
        ways = Counter(how for _, by, how, _ in tried if by)
        counted = len(tried) - len(same)
        lines = [
            f"{sum(len(changes.mutants(m)) for m in changes.MODULES)} mutants; tried {len(tried)}, {left} asked for and not finished",
            f"killed {counted - len(gaps)} of {counted} that change results: {(counted - len(gaps)) / max(counted, 1):.1%}"
            f" ({', '.join(f'{n} by {how}' for how, n in ways.most_common())})",
            f"{len(same)} compute the same, each for its reason",
            "",
            f"{'module':<12}{'mutants':>8}{'tried':>8}{'killed':>8}{'lived':>8}{'same':>8}",
            *(row_of(module, tried) for module in changes.MODULES),
            "",
            f"controls: {sum(not row[1] for row in controls)} of {len(controls)} lived",
            *(f"CONTROL DIED ({how}) of {by}" for _, by, how, _ in controls if by),
            f"mean {sum(s for *_, s in found) / max(len(found), 1):.1f} s a mutant, at most {max([0.0, *(s for *_, s in found)]):.0f}",
            "",
            *(f"LIVES {told(m)}" for m in sorted(gaps, key=lambda m: (m.module, m.line))),
            "",
            *(f"same {told(m)}\n    because {reason_of(m)}" for m in sorted(same, key=lambda m: (m.module, m.line))),
            "",
            *(f"hang {m.place}  {by}" for m, by, how, _ in tried if how == "hang"),
        ]  # fmt: skip
        return "\n".join(lines)


def row_of(module: str, tried: list[tuple[changes.Mutant, str, str, float]]) -> str:
    """Of one module: how many there are, were tried, killed, lived as a gap, lived since they compute the same."""
    here = [(mutant, by) for mutant, by, _, _ in tried if mutant.module == module]
    lives = [mutant for mutant, by in here if not by]
    same = sum(bool(reason_of(mutant)) for mutant in lives)
    counts = len(changes.mutants(module)), len(here), len(here) - len(lives), len(lives) - same, same
    return f"{module:<12}" + "".join(f"{n:>8}" for n in counts)


def told(mutant: changes.Mutant) -> str:
    return f"{mutant.place}\n{mutant.diff}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=50, help="how many mutants (0: all)")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=changes.MODULES, help="modules of parallel")
    parser.add_argument("--again", type=Path, help="those first that lived in this report of an earlier run")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.work:
        return work()
    everything = [mutant for module in said.only for mutant in changes.mutants(module)]
    pick = random.Random(said.seed)
    chosen = pick.sample(everything, min(said.sample or len(everything), len(everything)))
    if said.again:
        lived = said.again.read_text("utf-8")
        first = [
            mutant for mutant in everything if f" {mutant.function}\n{mutant.diff}\n" in lived.partition("\nsame ")[0]
        ]
        chosen = [*first, *(mutant for mutant in chosen if mutant not in first)]
    for module in pick.sample(said.only, min(CONTROLS, len(said.only))):
        chosen.insert(pick.randrange(len(chosen) + 1), changes.Mutant(module))
    home = Path(tempfile.mkdtemp(prefix="meshwright-mutants-"))
    campaign = Campaign(chosen, home)
    try:
        root = HERE.parent.parent
        for folder in ("src", "tests/proof", "tests/parallel"):
            shutil.copytree(root / folder, home / folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(root / "tests" / "ranks.py", home / "tests" / "ranks.py")
        campaign.run(said.jobs, 60 * said.minutes)
    finally:
        shutil.rmtree(home, ignore_errors=True)
        text = campaign.summary()
        print(text, flush=True)
        if said.out:
            said.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
