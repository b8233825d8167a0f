"""`meshwright tune`: which plan is measured next, what runs say, and a log that a later call continues."""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest

import meshwright
from meshwright.cli import main
from meshwright.describe.config import configure, load
from meshwright.interop.frameworks import framework_named
from meshwright.planner.tune import session
from meshwright.planner.tune.belief import Belief, MemoryBelief
from meshwright.planner.tune.candidates import configuration, user_plan
from meshwright.planner.tune.run import NO_MEMORY, Command, last_line, readable
from meshwright.view.json_schema import output_schema
from meshwright.view.tables import show
from meshwright.view.tune import page

# A training program that knows only its plan file. BUGS: plans by a word of theirs, and what happens to them.
PROGRAM = """
import sys, time, tomllib
plan = tomllib.load(open(sys.argv[1], "rb"))["plan"]
steps, bugs = int(sys.argv[2]), dict(word.split("=") for word in sys.argv[3:])
tp, pp, zero = plan.get("tp", 1), plan.get("pp", 1), plan.get("zero", 0)
kind = "tp" if tp > 1 else "pp" if pp > 1 else "cp" if plan.get("cp", 1) > 1 else "zero" if zero else "dp"
bug = bugs.get(kind) or bugs.get("all")
if bug == "memory":
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"); sys.exit(1)
if bug == "crash":
    print("ValueError: this layout is not supported"); sys.exit(1)
if bug == "hang":
    time.sleep(600)
if bug == "silent":
    sys.exit(0)
seconds = {"tp": 0.09, "pp": 0.05, "cp": 0.12, "zero": 0.08, "dp": 0.07}[kind] * (1 + 0.01 * plan.get("microbatch", 1))
for step in range(steps):
    print(f"step {step} took {1e3 * seconds * (5 if step < 2 else 1):.1f} ms")
"""
PLAN = """
model = "nano"
cluster = "laptop"
stack = "gloo-cpu"
[workload]
batch = 8
seq = 32
precision = "fp32"
[plan]
replicate = 2
param_dtype = "fp32"
master = false
"""
TIME = r"took (?P<ms>[0-9.]+) ms"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    Path("plan.toml").write_text(PLAN)
    return tmp_path


def words(*bugs: str, options: tuple[str, ...] = ()) -> list[str]:
    return ["tune", "plan.toml", "--gpus", "2", "--candidates", "12", "--steps", "6", "--time", TIME, *options,
            "--", sys.executable, "train.py", "{settings}", "{steps}", *bugs]  # fmt: skip


def call(capsys, arguments: list[str], code: int = 0) -> str:
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    captured = capsys.readouterr()
    assert leaving.value.code == code, captured.out + captured.err
    return captured.out + captured.err


def log() -> list[dict]:
    return list(session.log_lines(Path("tune")))


# ---- beliefs


def synthetic(seed: int):
    """Plans of four parts: predicted seconds of each, and true ones, whose parts are off by factors that all plans share."""
    random_numbers = np.random.default_rng(seed)
    parts = ("ffn", "tp", "dp", "bubble")
    exposed = [
        dict(zip(parts, (1.0, *random_numbers.exponential(0.4, 3) * random_numbers.integers(0, 2, 3)), strict=True))
        for _ in range(24)
    ]
    off = dict(zip(parts, np.exp(random_numbers.normal(0, (0.2, 0.7, 0.7, 0.2))), strict=True))
    own = np.exp(random_numbers.normal(0, 0.03, 24))
    times = np.array([sum(s * off[p] for p, s in each.items()) for each in exposed]) * own
    return exposed, times


def runs_until(exposed, times, first: int, runs: int) -> float:
    belief = Belief.from_parts(np.array([sum(each.values()) for each in exposed]), exposed, 0.3)
    chosen = first
    for _ in range(runs):
        belief.learn(chosen, times[chosen])
        chosen = int(belief.gains().argmax())
    return float(np.exp(min(belief.measured.values())) / times.min() - 1)


def test_six_runs_find_a_plan_within_2_percent_of_the_fastest():
    found = [runs_until(*synthetic(seed), random.Random(seed).randrange(24), 6) for seed in range(20)]
    assert statistics.median(found) <= 0.02


def test_a_measured_plan_speaks_for_those_with_the_same_parts():
    exposed = [{"ffn": 1.0, "tp": 1.0}, {"ffn": 1.0, "tp": 0.9}, {"ffn": 1.0, "dp": 1.0}]
    belief = Belief.from_parts(np.array([2.0, 1.9, 2.0]), exposed, 0.1)
    belief.learn(0, 3.0)
    mean, deviation = belief.posterior()
    assert mean[0] == pytest.approx(np.log(3.0), abs=0.03)
    assert deviation[0] < 0.05
    assert mean[1] - np.log(1.9) > 2 * (mean[2] - np.log(2.0)) > 0
    assert deviation[1] < deviation[2]


def test_noisy_steps_count_less():
    exposed = [{"ffn": 1.0}, {"ffn": 1.0}]
    quiet, noisy = (Belief.from_parts(np.array([1.0, 1.0]), exposed, 0.2) for _ in range(2))
    quiet.learn(0, 1.2)
    noisy.learn(0, 1.2, spread=1.0)
    assert quiet.posterior()[0][1] > noisy.posterior()[0][1] > 0


def test_out_of_memory_says_what_else_does_not_fit():
    memory = MemoryBelief(np.array([50.0, 60.0, 70.0, 76.0]), 80.0)
    before = memory.chances()
    memory.fails(1)
    after = memory.chances()
    assert after[2] < 0.05 < after[0]
    assert (after < before).all()
    memory = MemoryBelief(np.array([50.0, 60.0, 70.0, 76.0]), 80.0)
    memory.measures(0, 46.0)
    assert memory.factor == pytest.approx(0.92, abs=0.03)
    assert memory.chances()[3] > before[3]


# ---- the command


def test_it_finds_the_fastest_plan_and_writes_it(folder, capsys):
    text = call(capsys, words())
    assert load("tune/best.toml").plan.pp == 2
    assert "Stopped: no run is expected to gain 1%" in text
    ends = [line for line in log() if line["kind"] == "end"]
    assert len(ends) < 12
    assert min(line["seconds"] for line in ends) < 0.055
    assert configure("tune/best.toml", stack="tune/stack.toml").stack.measured_runs  # what did not lie too far off
    again = json.loads(call(capsys, words(options=("--json",))))  # nothing is left to do
    jsonschema_rs.validate(output_schema("tune"), again)
    assert len(again["trials"]) == len(ends)
    assert again["best"]["plan"]["pp"] == 2


@pytest.mark.slow
def test_failures_are_results(folder, capsys):
    call(capsys, words("pp=memory", "tp=crash", "cp=hang", options=("--timeout", "2s", "--gain", "0.01%")))
    ends = [line for line in log() if line["kind"] == "end"]
    outcomes = {line["outcome"] for line in ends}
    assert "measured" in outcomes
    assert "out of memory" in outcomes
    assert load("tune/best.toml").plan.pp == 1
    for line in ends:
        if line["outcome"] == "out of memory":
            assert "Tried to allocate" in line["why"]
    assert len({line["candidate"] for line in ends}) == len(ends)  # none twice


def test_a_call_that_was_killed_goes_on(folder, capsys):
    often = ("--gain", "0%")
    call(capsys, words("pp=crash", options=(*often, "--runs", "1")))
    first = [line for line in log() if line["kind"] == "end"]
    command = [sys.executable, "-m", "meshwright", *words("pp=crash", options=often)]
    Path("train.py").write_text("import time; time.sleep(600)")
    source = str(Path(meshwright.__file__).parents[1])
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": source})
    while sum(line["kind"] == "start" for line in log()) < 2 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    with Path("tune/tune.jsonl").open("a") as file:
        file.write('{"kind": "end", "cand')  # a line that was being written
    Path("train.py").write_text(PROGRAM)
    text = call(capsys, words("pp=crash", options=often))
    assert "continued: 1 runs" in text
    lines = log()
    assert [line for line in lines if line["kind"] == "end"][:1] == first
    interrupted = [line["candidate"] for line in lines if line["kind"] == "start"][1:3]
    assert interrupted[0] == interrupted[1]  # first it runs what was interrupted


def test_a_signal_while_a_run_starts_ends_the_run(folder, monkeypatch):
    """The signal comes before `Popen` has returned, when nobody knows the process yet."""
    started = []

    class Slow(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    command = Command((), None, steps=1, timeout_s=60.0)
    with pytest.raises(KeyboardInterrupt):
        command.execute([sys.executable, "-c", "import time; time.sleep(600)"], folder / "output")
    assert started[0].poll() is not None


def test_the_processes_of_a_run_are_ended_at_its_limit(folder, capsys):
    Path("train.py").write_text(
        "import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('child', 'w').write(str(child.pid))\ntime.sleep(600)"
    )
    call(capsys, words(options=("--timeout", "1s", "--runs", "1")), code=2)
    child = int(Path("child").read_text())
    for _ in range(100):
        if not alive(child):
            break
        time.sleep(0.05)
    assert not alive(child)


def alive(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


def test_an_interrupted_run_is_tried_once_more(folder, capsys):
    call(capsys, words(options=("--runs", "1")))
    for _ in range(2):
        session.append(Path("tune"), {"kind": "start", "candidate": 5, "expected_gain": 0.1, "steps": 6})
    tuned = json.loads(call(capsys, words(options=("--runs", "2", "--json"))))
    assert tuned["trials"][1] | {"title": ""} == {
        "candidate": 5, "outcome": "failed", "seconds": None, "spread": None, "memory_gib": None,
        "why": "it was interrupted twice", "title": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["tune", "plan.toml", "--", "no-such-program", "{settings}"], "MW-TUNE-001"),
        (["tune", "plan.toml", "--", sys.executable, "train.py"], "MW-TUNE-002"),
        (["tune", "plan.toml", "--", sys.executable, "{settings}", "{step}"], "MW-TUNE-002"),
        (["tune", "plan.toml", "--time", "took ([0-9", "--", sys.executable, "{settings}"], "MW-TUNE-006"),
        (["tune", "plan.toml", "--time", "took (?P<hours>[0-9]+)", "--", sys.executable, "{settings}"], "MW-TUNE-006"),
        (["tune", "plan.toml", "--time", "took ([0-9]+) ms", "--", sys.executable, "{settings}"], "MW-TUNE-006"),
        (["tune", "plan.toml", "--gain", "5", "--", sys.executable, "{settings}"], "Fix: --gain 10%"),
        (words("all=silent"), "MW-TUNE-003"),
        (words("all=crash"), "MW-TUNE-008"),
        (["tune", "missing.toml"], "MW-CONF-004"),
    ],
)
def test_bad_calls(folder, capsys, arguments, code):
    assert code in call(capsys, arguments, code=2)


def test_a_run_whose_tune_was_killed_keeps_the_folder(folder, capsys):
    """A second call would measure beside it, and take its memory for that of a plan."""
    source = str(Path(meshwright.__file__).parents[1])
    Path("train.py").write_text("import os, time; open('child', 'w').write(str(os.getpid())); time.sleep(600)")
    command = [sys.executable, "-m", "meshwright", *words()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": source})
    while not (Path("child").exists() and Path("child").read_text()) and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert "MW-TUNE-009" in call(capsys, words(), 2)
    os.kill(int(Path("child").read_text()), signal.SIGKILL)
    Path("train.py").write_text(PROGRAM)
    assert "continued: 0 runs" in call(capsys, words(options=("--runs", "1")))


def test_a_process_that_a_run_leaves_behind_does_not_keep_the_folder(folder, capsys):
    Path("train.py").write_text(
        PROGRAM
        + "import subprocess\nopen('child', 'w').write(str(subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)'], start_new_session=True, close_fds=False).pid))\n"
    )
    call(capsys, words(options=("--runs", "1")))
    child = int(Path("child").read_text())
    assert alive(child)
    call(capsys, words(options=("--runs", "1")))
    os.kill(child, signal.SIGKILL)


def test_the_reason_why_no_plan_can_be_run(folder, capsys):
    Path("plan.toml").write_text(PLAN.replace('param_dtype = "fp32"\n', ""))
    text = call(capsys, words(), code=2)
    assert "MW-TUNE-005" in text
    assert "plan.param_dtype=fp32" in text.split("Fix:")[1]


def test_a_folder_in_use_is_refused(folder, capsys):
    with session.exclusive(Path("tune")):
        assert "MW-TUNE-009" in call(capsys, words(), 2)
    assert not session.begun(Path("tune"))


def test_the_time_can_be_named_after_the_first_run_had_none(folder, capsys):
    without = [word for word in words() if word not in ("--time", TIME)]
    assert "MW-TUNE-003" in call(capsys, without, code=2)
    call(capsys, words(options=("--runs", "1")))
    assert [line["kind"] for line in log()] == ["question", "start", "void", "start", "end"]


def test_logs_of_another_question_and_damaged_ones(folder, capsys):
    call(capsys, words(options=("--runs", "1")))
    assert "MW-TUNE-004" in call(capsys, words("pp=crash"), code=2)
    assert "MW-TUNE-004" in call(capsys, words(options=("--batch", "16")), code=2)
    file = Path("tune/tune.jsonl")
    good = file.read_text()
    for bad in (
        "not JSON\n",
        good + "[]\n",
        good.replace('"seconds": 0', '"seconds": -0'),
        good + '{"kind": "end", "candidate": 99}\n',
        good + '{"kind": "end", "candidate": "1", "outcome": "failed"}\n',
        good + '{"kind": "end", "candidate": 1, "outcome": "measured", "seconds": 1, "spread": "x"}\n',
        "",
    ):
        file.write_text(bad)
        assert "MW-TUNE-007" in call(capsys, words(), code=2)


def test_no_candidate(folder, capsys):
    text = call(capsys, [*words()[:3], "2", "--for", "torchtitan", "--fix", "zero=1", *words()[4:]], code=2)
    assert "MW-" in text


def test_an_interrupted_run_is_repeated_although_no_other_is_worth_one(folder, capsys):
    little = ("--gain", "90%")
    call(capsys, words(options=little))
    tried = {line["candidate"] for line in log() if line["kind"] == "start"}
    interrupted = next(number for number in range(12) if number not in tried)
    with Path("tune/tune.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "start", "candidate": interrupted}) + "\n")
    text = call(capsys, words(options=little))
    assert [line["candidate"] for line in log() if line["kind"] == "end"][len(tried) :] == [interrupted]
    assert "no run is expected to gain 90%" in text


def test_a_candidate_that_was_run_is_never_proposed_again(folder):
    config = configure("plan.toml", gpus=2)
    plans = [config.plan, config.plan.but(microbatch=2)]
    tuning = session.Tuning(config, plans, folder, [session.TuneRun(0, "failed")])
    tuning.gains = lambda: np.zeros(2)
    assert tuning.proposed() == (1, 0.0)


def test_the_users_plan_is_that_of_plan_files_and_of_settings_and_keeps_to_the_question(folder):
    settings = Path(__file__).parents[2] / "examples/settings/torchtitan-llama3-70b.toml"
    torchtitan = framework_named("torchtitan")
    config = configuration(settings, "dgx-h100", torchtitan, gpus=128)
    assert user_plan(settings, "dgx-h100", {"gpus": 128}, config).tp == 8
    config = configuration("plan.toml", "", None, gpus=2)
    assert user_plan("plan.toml", "", {"gpus": 2, "allow": []}, config).replicate == 2
    assert user_plan("plan.toml", "", {"gpus": 2, "fix": ["tp=2"]}, config) is None
    smaller = {"gpus": 2, "set": ["workload.batch=1"]}
    assert user_plan("plan.toml", "", smaller, configuration("plan.toml", "", None, **smaller)) is None


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ((0.109, 0.5), "As fast within the spread of the steps: dp 2 (ZeRO-1)"),
        ((0.3, 0.9), "The steps of 1 run differ by more than 50%"),
        ((0.109, 0.1), ""),
    ],
)
def test_plans_that_the_runs_cannot_tell_apart_are_named(folder, capsys, second, says):
    config = configure("plan.toml", gpus=2)
    plans = [config.plan, config.plan.but(replicate=1, shard=2, zero=1)]
    runs = [session.TuneRun(0, "measured", 0.1, 0.05), session.TuneRun(1, "measured", *second)]
    show(page(session.Tuning(config, plans, folder, runs), "2 runs were made"))
    shown = " ".join(capsys.readouterr().out.split())
    assert ("To tell the plans apart" in shown) == bool(says)
    assert says in shown


def test_a_folder_with_brackets_is_shown_as_it_is(folder, capsys):
    config = configure("plan.toml", gpus=2)
    tuning = session.Tuning(config, [config.plan], Path("[old]"), [session.TuneRun(0, "measured", 0.1)])
    show(page(tuning, "all candidates were run"))
    shown = capsys.readouterr().out
    assert "[old]/best.toml" in shown
    assert "[old]/stack.toml" in shown


def test_errors_in_json_are_read_as_words() -> None:
    """Our own commands print errors as JSON; one about memory counts as out of memory."""
    line = '{"error": {"code": "MW-TRAIN-002", "what": "\'tp 4\' does not fit on this machine", "why": "", "valid": [], "fix": ""}}'
    text = readable(f'step 1\n{line}\n{{"error": 3}}\n')
    assert text.splitlines() == ["step 1", "MW-TRAIN-002: 'tp 4' does not fit on this machine", '{"error": 3}']
    assert last_line(text, NO_MEMORY).startswith("MW-TRAIN-002")
