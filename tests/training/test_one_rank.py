"""`meshwright measure`: one rank of a large plan on this machine, what its file says, and plans made with it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema_rs
import pytest

from meshwright.calibrate.runs import from_rank
from meshwright.cli import main
from meshwright.describe.config import Config, load
from meshwright.errors import MeshwrightError
from meshwright.interop.logs import steps_in
from meshwright.interop.one_rank import measured_in
from meshwright.predict.one_rank import RankMeasurement, composed, measured_config, predicted_ranks
from meshwright.view.json_schema import output_schema

PLAN = """
model = {{ name = "tiny", hidden = 32, layers = 4, heads = 4, kv_heads = 4, ffn = 48, vocab = 50{more} }}
cluster = {{ extends = "laptop", gpus = {world} }}
stack = "gloo-cpu"
[workload]
batch = {batch}
seq = 16
precision = "fp32"
[plan]
param_dtype = "fp32"
master = false
{plan}
[run]
compile = "off"
"""
LAYOUTS = {
    "shards": (64, 64, "shard = 64\nzero = 3", ""),
    "tensor": (16, 8, "tp = 4\nsp = true\nshard = 4\nzero = 1", ""),
    "stages": (16, 32, "pp = 4\nreplicate = 4\nmicrobatch = 1", ""),
    "experts": (16, 16, "shard = 16\nzero = 3\nep = 8", ", experts = 8, top_k = 2, expert_ffn = 16"),
    "ring": (16, 8, "cp = 4\nshard = 4\nzero = 3\nmicrobatch = 2", ""),
}


def call(capsys, *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as leaving:
        main([*arguments])
    captured = capsys.readouterr()
    assert leaving.value.code == code, captured.out + captured.err
    return captured.out + captured.err


def written(folder: Path, name: str) -> str:
    world, batch, plan, more = LAYOUTS[name]
    file = folder / "plan.toml"
    file.write_text(PLAN.format(world=world, batch=batch, plan=plan, more=more))
    return str(file)


@pytest.mark.parametrize(
    "name", [n if n not in ("tensor", "ring", "experts") else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_one_process_is_a_rank_of_a_large_world(name, tmp_path, capsys):
    plan = written(tmp_path, name)
    result = json.loads(call(capsys, "measure", plan, "--steps", "2", "--device", "cpu", "--json"))
    jsonschema_rs.validate(output_schema("measure"), result)
    stages = 4 if name == "stages" else 1
    assert [row["stage"] for row in result["ranks"]] == list(range(stages))
    for row in result["ranks"]:
        assert row["step_s"] == pytest.approx(row["backward_s"] + row["closing_s"])
        assert row["closing_s"] >= 0  # a difference of two times, which noise may hide
        assert sum(row["parts_s"].values()) > 0
        assert row["allocated_gib"] > 0
    assert result["step"]["step_time_low_s"] < result["step"]["step_time_s"] < result["step"]["step_time_high_s"]
    assert result["step"]["step_time_s"] >= 0.99 * result["step"]["compute_s"]
    if name == "experts":
        assert "equal numbers" in result["ranks"][0]["notes"][0]


def test_copies_that_stand_for_received_data_are_not_measured(monkeypatch):
    """On a clock that only the copies of the fake group advance, a step takes no time."""
    from meshwright.training import fake_group
    from meshwright.training.measure import one_rank

    clock, fill = [0.0], fake_group.all_parts

    def slow(*tensors):
        clock[0] += 1.0
        fill(*tensors)

    monkeypatch.setattr(fake_group, "all_parts", slow)
    monkeypatch.setattr(one_rank.time, "perf_counter", lambda: clock[0])
    config = Config.from_parts(
        {"name": "tiny", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 48, "vocab": 50},
        {"extends": "laptop", "gpus": 8},
        "gloo-cpu",
        {"batch": 8, "seq": 16, "precision": "fp32"},
        {"shard": 8, "zero": 3, "param_dtype": "fp32", "master": False},
    )
    (found,) = one_rank.measure_plan(config.but(run=config.run.but(compile="off")), None, 0, 2, "cpu")[1]
    assert clock[0] > 0
    assert found.step_s == pytest.approx(0.0)


@pytest.mark.slow
def test_a_shard_holds_its_part_of_the_states(tmp_path, capsys):
    """The optimizer's states and the weights of one of 64 ranks are a 64th; an update of whole tensors would show in the peak."""
    peaks = {}
    for world in (4, 64):
        file = tmp_path / f"{world}.toml"
        plan = f"shard = {world}\nzero = 3\nmicrobatch = 1"
        file.write_text(PLAN.format(world=world, batch=world, plan=plan, more="").replace("vocab = 50", "vocab = 4000"))
        result = json.loads(call(capsys, "measure", str(file), "--steps", "1", "--device", "cpu", "--json"))
        peaks[world] = result["ranks"][0]["allocated_gib"]
    assert peaks[64] < 0.8 * peaks[4]


def configuration(stack: str = "meshwright", **changes: float) -> Config:
    config = Config.from_parts(
        "llama3-8b", "dgx-h200", stack, {"batch": 64, "seq": 4096}, {"pp": 2, "shard": 16, "zero": 1, "microbatch": 1}
    ).check()
    return config.but(stack=config.stack.but(**{k: getattr(config.stack, k) * v for k, v in changes.items()}))


def as_measured(config: Config, truth: Config) -> list[RankMeasurement]:
    """Each stage, as another stack predicts it."""
    rounds = measured_config(config).workload.batch // config.plan.dp
    return [
        RankMeasurement(0, p.stage, rounds, 5, p.backward_s, p.closing_s, 0.01, p.allocated_gib, p.reserved_gib)
        for p in predicted_ranks(measured_config(truth))
    ]


def test_measured_compute_takes_the_place_of_the_predicted_one():
    config, slow = configuration(), configuration(products=0.8)
    same, slower = (composed(config, as_measured(config, truth)) for truth in (config, slow))
    assert same.step_time_s == pytest.approx(same.predicted_s, rel=0.01)
    assert slower.predicted_s == same.predicted_s
    truth = composed(slow, as_measured(slow, slow)).predicted_s
    assert slower.step_time_s == pytest.approx(truth, rel=0.03)
    assert truth > 1.1 * same.predicted_s
    one_stage = composed(config, as_measured(config, slow)[:1])
    assert one_stage.step_time_s == pytest.approx(slower.step_time_s, rel=0.03)


def file_of(folder: Path, config: Config, truth: Config) -> str:
    file = folder / "rank.json"
    file.write_text(json.dumps(from_rank.content(config, as_measured(config, truth), "cuda")))
    return str(file)


def test_other_plans_are_predicted_with_measured_rates(tmp_path, capsys):
    config, truth = configuration(), configuration(products=0.8, elementwise=1.5)
    file = file_of(tmp_path, config, truth)
    asked = ["estimate", "llama3-8b", "--cluster", "dgx-h200", "--nodes", "2", "--batch", "64", "--set", "plan.shard=16", "--json",
             "--set", "plan.zero=3", "--set", "plan.microbatch=1", "--stack", "meshwright"]  # fmt: skip
    plain, with_file = (json.loads(call(capsys, *asked, *more)) for more in ((), ("--from-measure", file)))
    other = config.but(plan=config.plan.but(pp=1, zero=3), workload=config.workload)
    true_s, before_s = (predicted_ranks(c)[0].step_s for c in (other.but(stack=truth.stack), other))
    after_s = predicted_ranks(other.but(stack=from_rank.measured_stack([file])))[0].step_s
    assert abs(after_s / true_s - 1) < 0.25 * abs(before_s / true_s - 1)
    assert with_file["step_time_s"] > 1.1 * plain["step_time_s"]
    small = [
        "plan",
        "llama3-8b",
        "--cluster",
        "dgx-h200",
        "--nodes",
        "1",
        "--batch",
        "64",
        "--fix",
        "tp=1",
        "--fix",
        "pp=1",
    ]
    planned = json.loads(call(capsys, *small, "--without", "cp", "--from-measure", file, "--json"))
    assert planned["plans"][0]["step_time_s"] > 0


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "{}",
        "[1]",
        *(f'{{"kind": "measured ranks", "version": 1, "ranks": [{row}], "plan": ""}}' for row in ("{}", '"x"')),
    ],
)
def test_files_that_are_no_measurement(bad, tmp_path, capsys):
    file = tmp_path / "rank.json"
    file.write_text(bad)
    text = call(capsys, "plan", "llama3-8b", "--cluster", "dgx-h200", "--from-measure", str(file), code=2)
    assert "MW-MEASURE-003" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backward_s", -1.0),
        ("stage", 9),
        ("stage", 0.5),
        ("microbatches", 1.5),
        ("reserved_gib", "x"),
        pytest.param("closing_s", 10**400, id="huge"),
    ],
)
def test_impossible_values_are_refused(name, value, tmp_path):
    config = configuration()
    file = Path(file_of(tmp_path, config, config))
    table = json.loads(file.read_text())
    table["ranks"][0][name] = value
    file.write_text(json.dumps(table))
    with pytest.raises(MeshwrightError, match="MW-MEASURE-003"):
        from_rank.read(file)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--rank", "64"), "MW-MEASURE-001"),
        (("--stage", "1"), "MW-MEASURE-001"),
        (("--stage", "x"), "MW-MEASURE-001"),
        (("--rank", "0", "--stage", "0"), "MW-CLI-003"),
    ],
)
def test_ranks_and_stages_that_do_not_exist(options, code, tmp_path, capsys):
    assert code in call(capsys, "measure", written(tmp_path, "shards"), "--device", "cpu", *options, code=2)


# ---- other frameworks

TITAN = "".join(
    f"[rank0]: step: {i}  loss: 1.0  memory: 41.50GiB(52.0%)  tps: {100 if i == 1 else 4096:,}  tflops: 1.0\n"
    for i in range(1, 8)
)
MEGATRON = (
    "".join(
        f" iteration {i}/ 10 | consumed samples: 1 | elapsed time per iteration (ms): {9000 if i < 3 else 500.0} | loss: 1\n"
        for i in range(1, 9)
    )
    + "[Rank 0] memory (MB) | allocated: 1 | max allocated: 20480.0 | reserved: 1 | max reserved: 30720.0\n"
)


def test_logs_of_frameworks(tmp_path):
    config = configuration()
    tokens = config.workload.tokens_per_step / config.plan.world
    assert steps_in("\x1b[32m" + TITAN, config).median == pytest.approx(tokens / 4096)
    assert steps_in(MEGATRON, config) == ([0.5] * 5, 20.0, 30.0)
    batch = config.workload.batch
    assert steps_in("CurrSamplesPerSec=32.0, MemAllocated=1GB\n" * 5, config).median == pytest.approx(batch / 32)
    assert steps_in("{'train_runtime': 9.0, 'train_samples_per_second': 16.0}", config).median == pytest.approx(
        batch / 16
    )
    assert steps_in("train_step_timing in s: 1.25\n" * 4, config).median == 1.25
    assert steps_in("train_step_timing in s: 1.25e+03\n" * 4, config).median == 1250
    assert steps_in('x\n{"step_time_s": 2.0, "memory_gib": 3}\n{"step_time_s": NaN}\n', config) == ([2.0], None, 3.0)
    assert steps_in("{broken step_time_s\nloss 3", config).seconds == []
    assert steps_in("a 100 samples/s\n" * 4, config, r"(?P<s>[0-9]+) samples").median == 100
    assert steps_in("a 100 samples/s\n" * 4, config, r"(?P<samples_per_s>[0-9]+) samples").median == batch / 100
    log = tmp_path / "log"
    assert steps_in("a samples/s\n" * 4, config, r"a (?P<s>[0-9]+)?").seconds == []
    log.write_text(MEGATRON)
    found = measured_in(str(log), config)
    assert found.step_s == pytest.approx(0.5)
    assert found.allocated_gib == 20.0
    long = config.but(workload=config.workload.but(batch=512))  # a log has all micro-batches of a step
    row = from_rank.content(long, [measured_in(str(log), long)], "cuda")["ranks"][0]
    assert row["microbatches"] == 32
    assert row["predicted"]["step_s"] == pytest.approx(predicted_ranks(long)[0].step_s)
    log.write_text(TITAN.replace("41.50GiB", "0.00GiB"))
    with pytest.raises(MeshwrightError, match="MW-MEASURE-005"):
        measured_in(str(log), config)
    log.write_text("nothing")
    with pytest.raises(MeshwrightError, match="MW-MEASURE-005"):
        measured_in(str(log), config)


def test_commands_of_frameworks(tmp_path, capsys):
    config = configuration(stack="megatron-core")
    from meshwright.interop.frameworks import framework_named
    from meshwright.interop.write import write_file

    file = tmp_path / "my flags.sh"
    write_file(config, framework_named("megatron-lm"), file)
    text = call(capsys, "measure", str(file), "--cluster", "dgx-h200", "--nodes", "4")
    assert f"$(cat '{file}') --fake-process-group" in text  # on one line
    assert "WORLD_SIZE=32" in text
    log = tmp_path / "log"
    log.write_text(MEGATRON)
    found = json.loads(
        call(capsys, "measure", str(file), "--cluster", "dgx-h200", "--nodes", "4", "--log", str(log), "--json")
    )
    assert found["device"] == "the framework"
    assert found["ranks"][0]["step_s"] == pytest.approx(0.5)
    assert asdict(replace(as_measured(config, config)[0], rank=0)).keys() <= found["ranks"][0].keys()


def test_a_rank_that_does_not_fit_on_this_machine_is_refused(monkeypatch) -> None:
    """The kernel would end the process, and others with it."""
    from meshwright.training.measure.one_rank import measure_plan

    monkeypatch.setattr("meshwright.training.measure.one_rank.available_memory", lambda: 1e5)
    config = load(Path(__file__).parents[2] / "examples" / "demo-dp2-tp2.toml")
    with pytest.raises(MeshwrightError, match=r"MW-MEASURE-002: a rank .* does not fit on this machine") as raised:
        measure_plan(config, None, None, 1, "cpu")
    assert raised.value.exit_code == 3
