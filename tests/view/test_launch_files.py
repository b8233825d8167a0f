"""Launch files: parsed by the tools' own parsers or schemas, and the shell scripts run with stubs in place of Slurm's commands."""

import ast
import os
import shlex
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import jsonschema_rs
import pytest
import yaml
from launch_schemas import SKY_TASK, TRAIN_JOB, TRAINING_RUNTIME

from meshwright.cli import main
from meshwright.describe import catalog
from meshwright.describe.config import load
from meshwright.errors import MeshwrightError
from meshwright.interop.files import detect, parse
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.frameworks.megatron_model import model_settings
from meshwright.interop.frameworks.torchtitan import MODELS
from meshwright.interop.keys import flags, read_facts
from meshwright.interop.reading import understand
from meshwright.interop.shapes import catalog_model, shape_of
from meshwright.interop.write import settings_of
from meshwright.version import WHEEL
from meshwright.view.launch_files import LAUNCHERS
from meshwright.view.launch_files import job as job_file
from meshwright.view.launch_files.job import LaunchJob, make_job
from meshwright.view.launch_files.program import TrainingProgram

ROOT = Path(__file__).parents[2]
LARGE, SMALL = "examples/llama3-70b-64xh100.toml", "examples/demo-dp2-tp2.toml"


def job_of(plan: str = LARGE, *settings: str, **options) -> LaunchJob:
    options = {"framework": "meshwright", **options}
    return make_job(load(ROOT / plan, list(settings)), plan, typed="meshwright launch", **options)


def other_framework(config, plan, folder, save_every) -> TrainingProgram:
    return TrainingProgram("other", ("train.py", "--config", "x y.toml"))


@pytest.fixture
def framework(monkeypatch) -> str:
    """A framework whose command has words that a shell must not split."""
    monkeypatch.setitem(
        FRAMEWORKS._variants, "megatron-lm", replace(FRAMEWORKS["megatron-lm"], program=other_framework)
    )
    monkeypatch.setattr(job_file, "for_framework", lambda config, name: config)
    return "megatron-lm"


def check_shell(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("plan", [LARGE, SMALL])
@pytest.mark.parametrize("name", ["slurm", "torchrun"])
def test_shell_scripts_parse(name, plan, framework) -> None:
    for options in ({}, {"interface": "ib0"}, {"framework": framework}, {"folder": "/shared/it's mine; rm $x"}):
        check_shell(LAUNCHERS[name].write(job_of(plan, **options)))


@pytest.mark.parametrize("plan", [LARGE, SMALL])
def test_the_kubernetes_file_is_a_runtime_and_its_train_job(plan) -> None:
    runtime, job = yaml.safe_load_all(LAUNCHERS["kubernetes"].write(job_of(plan, interface="eth0", claim="disk")))
    jsonschema_rs.validator_for(TRAINING_RUNTIME).validate(runtime)
    jsonschema_rs.validator_for(TRAIN_JOB).validate(job)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    world = load(ROOT / plan).plan.world
    assert trainer["numNodes"] * trainer["numProcPerNode"] == world
    assert ("limits" in trainer["resourcesPerNode"]) == (plan == LARGE)  # the small plan is for CPUs
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    check_shell(pod["containers"][0]["args"][0])
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


@pytest.mark.parametrize(("plan", "nodes"), [(LARGE, 8), (SMALL, 1)])
def test_a_pytorchjob_has_the_same_pod_for_every_node(plan, nodes) -> None:
    """tests/frameworks reads it with the models of kubeflow-training."""
    job = yaml.safe_load(LAUNCHERS["pytorchjob"].write(job_of(plan)))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert [group["replicas"] for group in replicas.values()] == ([1, nodes - 1] if nodes > 1 else [1])
    for group in replicas.values():
        assert group["template"] == replicas["Master"]["template"]
        check_shell(group["template"]["spec"]["containers"][0]["args"][0])


@pytest.mark.parametrize("plan", [LARGE, SMALL])
def test_the_skypilot_file_is_a_task(plan) -> None:
    task = yaml.safe_load(LAUNCHERS["skypilot"].write(job_of(plan)))
    jsonschema_rs.validator_for(SKY_TASK).validate(task)
    check_shell(task["run"])
    assert ("accelerators" in task["resources"]) == (plan == LARGE)
    assert task["setup"].strip() == f'pip install "./{WHEEL}[train]"'  # test_install.py installs that file


def test_torchrun_accepts_the_words_that_we_write(framework) -> None:
    from torch.distributed.run import get_args_parser

    script = LAUNCHERS["torchrun"].write(job_of())
    line = script.splitlines()[-1].replace("exec torchrun", "printf '%s\\n'")
    body = "\n".join([*script.splitlines()[:-1], line])
    done = subprocess.run(
        ["bash", "-c", body],
        env={**os.environ, "HEAD": "node0"},
        text=True,
        capture_output=True,
        timeout=200,
        check=True,
    )
    found = get_args_parser().parse_args(done.stdout.splitlines())
    assert (found.nnodes, found.nproc_per_node, found.max_restarts) == ("8", "8", 3)
    assert (found.rdzv_endpoint, found.rdzv_backend) == ("node0:29500", "c10d")
    assert found.module
    assert [found.training_script, *found.training_script_args][:3] == ["meshwright", "train", LARGE]
    assert '"${words[@]}"' in LAUNCHERS["torchrun"].write(job_of(framework=framework))


STUBS = {
    "scontrol": 'if [ "$1" = show ]; then printf "n1\\nn2\\n"; else echo "$*" >> "$LOG"; fi',
    "getent": 'echo "10.0.0.9 STREAM $2"',
    "ip": 'echo "$4 dev ib7 src 10.0.0.1 uid 0"',
    "srun": 'while [[ "$1" == --* ]]; do shift; done; if [ "$*" = true ]; then exit "${LOST:-0}"; fi; exec "$@"',
    "meshwright": 'echo "{\\"state\\": \\"${STATE:-done}\\"}"',
    "python": (
        'echo "$* over $GLOO_SOCKET_IFNAME" >> "$LOG"; if [ ! -f "$RUN/plan.toml" ]; then mkdir -p "$RUN"; touch "$RUN/plan.toml"; exit 7; fi'
    ),
}


def run_batch(tmp_path: Path, job: LaunchJob, **environment: str) -> tuple[int, list[str]]:
    """Run a batch script with stubs of Slurm's commands; the exit code, and the calls that the stubs wrote down."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in STUBS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    log = tmp_path / "log"
    variables = {
        "LOG": str(log),
        "RUN": job.folder,
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURMD_NODENAME": "n1",
    }
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    script = LAUNCHERS["slurm"].write(job)
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, **variables, **path, **environment},
        text=True,
        capture_output=True,
        timeout=200,
        check=False,
    )
    return done.returncode, log.read_text().splitlines()


def test_a_failed_attempt_is_continued_from_the_run_folder(tmp_path) -> None:
    run = str(tmp_path / "a run")
    code, calls = run_batch(tmp_path, job_of(folder=run, save_every=25))
    first, second = f"{LARGE} --out {run}", f"--resume {run}"
    assert code == 0
    assert calls == [f"-m meshwright train {words} --save-every 25 over ib7" for words in (first, second)]


def test_a_run_that_the_time_limit_stopped_is_queued_again(tmp_path) -> None:
    code, calls = run_batch(tmp_path, job_of(folder=str(tmp_path / "run")), STATE="stopped")
    assert (code, calls[-1]) == (0, "requeue 17")


def test_a_lost_node_ends_the_attempts_and_the_job_is_queued_again(tmp_path) -> None:
    code, calls = run_batch(tmp_path, job_of(folder=str(tmp_path / "run")), LOST="1")
    assert (code, len(calls), calls[-1]) == (1, 2, "requeue 17")


def test_attempts_are_bounded_and_the_exit_code_is_that_of_the_ranks(tmp_path) -> None:
    job = job_of(LARGE, "run.restarts=1", folder=str(tmp_path / "run"))
    missing = replace(job, folder=str(tmp_path / "never"))  # the stub of python looks elsewhere, and always fails
    (tmp_path / "never").mkdir()
    (tmp_path / "never" / "plan.toml").mkdir()
    code, calls = run_batch(tmp_path, missing)
    assert (code, len(calls)) == (7, 2)


def ray_module(devices: int) -> types.ModuleType:
    """Ray's package, with so many devices in its cluster."""
    ray = types.ModuleType("ray")
    ray.init, ray.cluster_resources = lambda: None, lambda: {"CPU": devices, "GPU": devices}
    return ray


def test_the_ray_file_calls_ray_and_our_trainer(monkeypatch, tmp_path, capsys) -> None:
    text = LAUNCHERS["ray"].write(job_of(folder=str(tmp_path / "run"), save_every=25))
    calls = {}

    def keeper(name):
        def call(*args, **kwargs):
            calls[name], calls["folder"] = (args, kwargs), Path.cwd()
            return name

        return call

    class TorchTrainer:
        def __init__(self, loop, **config):
            calls["loop"], calls["config"] = loop, config

        def fit(self):
            monkeypatch.chdir(tmp_path)  # Ray Train starts a worker in a folder of its own
            calls["loop"]()

    ray = types.ModuleType("ray.train")
    ray_torch = types.ModuleType("ray.train.torch")
    for name in ("FailureConfig", "RunConfig", "ScalingConfig"):
        setattr(ray, name, keeper(name))
    ray_torch.TorchConfig, ray_torch.TorchTrainer = keeper("TorchConfig"), TorchTrainer
    ours = types.ModuleType("meshwright")
    ours.train = keeper("train")
    for name, module in (("ray", ray_module(8)), ("ray.train", ray), ("ray.train.torch", ray_torch)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "meshwright", ours)
    started_in = Path.cwd()
    exec(compile(ast.parse(text), "ray.py", "exec"), {"__name__": "__main__"})
    assert calls["ScalingConfig"][1] == {"num_workers": 64, "use_gpu": True, "placement_strategy": "PACK"}
    assert calls["FailureConfig"][1] == {"max_failures": 3}
    assert calls["train"] == ((LARGE,), {"out": str(tmp_path / "run"), "save_every": 25})
    assert calls["folder"] == started_in  # where the path of the plan is right
    assert "Ray's nodes have 8 GPUs and the plan needs 64" in capsys.readouterr().out
    calls.clear()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.toml").touch()
    exec(compile(text, "ray.py", "exec"), {"__name__": "__main__"})
    assert calls["train"] == ((), {"resume": str(tmp_path / "run"), "save_every": 25})


def test_a_worker_of_ray_starts_a_rank_of_a_framework_as_a_child_with_another_port(
    framework, monkeypatch, tmp_path
) -> None:
    """Ray and the collectives of torch are stubs; the child is a process, which writes what it was started with."""
    child = (
        "import os, sys; print(os.environ['RANK'], os.environ['MASTER_PORT'], *sys.argv[1:], file=open('child', 'w'))"
    )
    (tmp_path / "train.py").write_text(child)
    job = job_of(framework=framework, folder=str(tmp_path / "run"))
    job = replace(job, program=replace(job.program, file="settings.toml", settings="tp = 2\n"))
    ports: list[int] = []
    stub = types.ModuleType("torch")
    stub.zeros, stub.int64 = lambda size, dtype: [0], int
    stub.distributed = types.SimpleNamespace(get_rank=lambda: 0, broadcast=lambda port, source: ports.append(port[0]))
    train = types.ModuleType("ray.train")
    train.FailureConfig = train.RunConfig = train.ScalingConfig = dict
    ray_torch = types.ModuleType("ray.train.torch")
    ray_torch.TorchConfig = dict
    ray_torch.TorchTrainer = lambda loop, **config: types.SimpleNamespace(fit=loop)
    stubs = {"torch": stub, "ray": ray_module(64), "ray.train": train, "ray.train.torch": ray_torch}
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.chdir(tmp_path)
    text = LAUNCHERS["ray"].write(job)
    exec(compile(text.replace("int(port)", "port[0]"), "ray.py", "exec"), {"__name__": "__main__"})
    assert (tmp_path / "child").read_text() == f"0 {ports[0]} --config x y.toml\n"
    assert ports[0] > 1
    assert (tmp_path / "run" / "settings.toml").read_text() == "tp = 2\n"


def test_a_framework_is_started_by_torchrun(framework) -> None:
    job = job_of(framework=framework)
    for name in ("slurm", "kubernetes", "pytorchjob", "skypilot", "torchrun"):
        assert "train.py --config 'x y.toml'" in LAUNCHERS[name].write(job)
    with pytest.raises(MeshwrightError, match=r"MW-LAUNCH-004.*accelerate"):
        LAUNCHERS["ray"].write(replace(job, program=replace(job.program, agent="accelerate")))
    with pytest.raises(MeshwrightError, match="MW-LAUNCH-002"):
        job_of(framework="unheard-of")


def test_hosts_are_whole_and_an_nvlink_domain_is_many_hosts() -> None:
    with pytest.raises(MeshwrightError, match=r"MW-LAUNCH-001.*--per-node 16"):
        job_of(per_node=3)
    job = job_of(LARGE, "cluster=gb200-nvl72", "cluster.gpus=64")
    assert (job.nodes, job.per_node) == (16, 4)
    assert (job_of(SMALL).nodes, job_of(SMALL).per_node) == (1, 4)


def test_names_that_a_shell_would_interpret_are_refused() -> None:
    for options in ({"interface": "eth0; reboot"}, {"time_limit": "1:00\n#"}, {"claim": "a b"}, {"folder": "a\nb"}):
        with pytest.raises(MeshwrightError, match="MW-LAUNCH-003"):
            job_of(**options)


def test_the_interval_of_checkpoints_is_the_file_s_or_half_an_hour() -> None:
    assert job_of(LARGE, "checkpoint.every=7").save_every == 7
    assert job_of(save_every=9).save_every == 9
    assert 1200 < job_of().save_every * job_of().prediction.step_time_s < 2400


def test_the_command_writes_a_file_and_keeps_one_that_was_changed(tmp_path, monkeypatch, capsys) -> None:
    words = ["launch", str(ROOT / LARGE), "--slurm", "--for", "meshwright"]
    monkeypatch.chdir(tmp_path)

    def code_of(*more: str) -> int:
        with pytest.raises(SystemExit) as leaving:
            main([*words, *more])
        return leaving.value.code

    assert code_of() == 0
    assert "sbatch llama3-70b-64xh100.sbatch" in capsys.readouterr().out
    file = tmp_path / "llama3-70b-64xh100.sbatch"
    assert code_of() == 0  # the same again
    file.write_text(file.read_text() + "# mine\n")
    assert code_of() == 2
    assert "MW-CLI-006" in capsys.readouterr().err
    assert code_of("--force") == 0
    assert code_of("--ray") == 2
    assert code_of("--out", "-") == 0
    assert capsys.readouterr().out.endswith(file.read_text())


def test_the_started_run_has_the_options_that_change_the_plan(capsys) -> None:
    """The prediction in the heading is for the plan with these options, so the ranks must train that plan."""
    words = ["--cluster", "my cluster.toml", "--set", "plan.tp=1", "--set", "plan.replicate=4"]
    options = {"cluster": "my cluster.toml", "set": ["plan.tp=1", "plan.replicate=4"]}
    settings = options["set"]
    begin = "train examples/demo-dp2-tp2.toml --out /shared/runs/demo-dp2-tp2 --save-every 5 "
    for name in ("slurm", "torchrun", "kubernetes", "skypilot"):
        text = LAUNCHERS[name].write(job_of(SMALL, *settings, options=options, save_every=5))
        assert f"{begin}{shlex.join(words)})" in text
        assert text.count(shlex.join(words)) == 1  # a run that continues has its own plan
    text = LAUNCHERS["ray"].write(job_of(SMALL, *settings, options=options))
    assert f"mw.train(mw.load(PLAN, cluster='my cluster.toml', set={settings}), out=RUN" in text
    other = job_of(LARGE, "workload.batch=256", framework="megatron-lm", options={"set": ["workload.batch=256"]})
    assert "plan.zero=2" not in LAUNCHERS["slurm"].write(
        other
    )  # the settings of another framework have the changed plan
    with pytest.raises(SystemExit):
        main(
            ["launch", str(ROOT / SMALL), "--torchrun", "--out", "-", "--run", "/x", "--cluster", "laptop", *words[2:]]
        )
    heading = (
        f"# Written by `meshwright launch {ROOT / SMALL} --torchrun --run /x --cluster laptop {shlex.join(words[2:])}`."
    )
    assert heading in capsys.readouterr().out.splitlines()
    with pytest.raises(MeshwrightError, match="control characters"):
        job_of(SMALL, options={"cluster": "a\nb.toml"})


def test_a_script_for_one_host_needs_no_address_of_another() -> None:
    launcher = LAUNCHERS["torchrun"]
    assert launcher.command(job_of(SMALL), Path("a.sh")) == "bash a.sh"
    assert launcher.command(job_of(LARGE), Path("a.sh")).startswith("HEAD=first-host bash a.sh")
    assert LAUNCHERS["slurm"].command(job_of(SMALL), Path("a")) == "sbatch a"


# For each framework that we can start: what must change in the large plan so that it can run it.
CHANGES = {
    "megatron-lm": (),
    "torchtitan": ("plan.zero=3",),
    "torchtitan-0.3": ("plan.zero=3",),
    "deepspeed": ("plan.pp=1", "plan.shard=8", "plan.sp=false", "plan.recompute=full"),
    "nanotron": ("plan.recompute=full",),
    "automodel": ("plan.zero=3", "plan.recompute=full"),
    "axolotl": ("plan.pp=1", "plan.shard=8", "plan.sp=false", "plan.recompute=full", "plan.zero=3", "workload.batch=8"),
    "accelerate": ("plan.pp=1", "plan.shard=8", "plan.sp=false", "plan.recompute=full", "plan.zero=3"),
    "trl": (
        "plan.pp=1",
        "plan.tp=1",
        "plan.shard=64",
        "plan.sp=false",
        "plan.recompute=full",
        "plan.zero=3",
        "workload.batch=64",
    ),
    "llama-factory": (
        "plan.pp=1",
        "plan.tp=1",
        "plan.shard=64",
        "plan.sp=false",
        "plan.recompute=full",
        "plan.zero=3",
        "workload.batch=64",
    ),
    "megatron-bridge": (),
}


def words_of(job: LaunchJob) -> list[str]:
    """The words after torchrun's own in a launch file, as its shell builds them; the settings are written on the way."""
    lines = LAUNCHERS["torchrun"].write(job).splitlines()
    assert lines[-1].startswith(("exec torchrun", "exec accelerate launch"))
    script = "\n".join([*lines[:-1], "printf '%s\\n' \"${words[@]}\""])
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "HEAD": "x"},
        text=True,
        capture_output=True,
        timeout=200,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_launch_file_holds_the_settings_of_the_plan(name, tmp_path) -> None:
    """Run the part of the script that writes the settings, read them back with the reader of the framework, and compare the plan."""
    job = job_of(LARGE, *CHANGES[name], framework=name, folder=str(tmp_path / "it's a run"))
    assert set(FRAMEWORKS.having("program")) == set(FRAMEWORKS) == set(CHANGES)
    framework, words = FRAMEWORKS[name], words_of(job)
    if framework.form == "python":
        settings = settings_of(job.config, framework).settings
        assert words == ["-m", "torchtitan.train", "--module", "settings", "--config", "plan"]
        assert job.program.variables["PYTHONPATH"][0] == job.folder
    elif job.program.file:
        settings = parse(Path(job.folder, job.program.file)).settings
        assert detect(settings) is framework
        assert words[-1] == str(Path(job.folder, job.program.file)) or name == "accelerate"
        assert [p.name for p in Path(job.folder).iterdir()] == [job.program.file]
    elif name == "megatron-bridge":
        assert words[1:3] == ["--recipe", "llama3_70b_pretrain_config"]
        given = dict(word.split("=", 1) for word in words[3:])
        settings = {key: yaml.safe_load(value) for key, value in given.items()}
    else:
        settings = flags(words)
    back = understand(framework, settings, gpus=64, model="llama3-70b", shape=None)
    plan = job.config.plan
    assert back.errors == []
    assert [getattr(back.plan, axis) for axis in ("tp", "pp", "cp", "dp", "zero")] == [
        plan.tp,
        plan.pp,
        plan.cp,
        plan.dp,
        plan.zero,
    ]
    assert back.understood.unknown == []


def test_the_other_launchers_write_the_settings_too(tmp_path) -> None:
    job = job_of(LARGE, "plan.zero=3", framework="torchtitan", folder=str(tmp_path / "run"))
    runtime, _ = yaml.safe_load_all(LAUNCHERS["kubernetes"].write(job))
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    for script in (
        pod["containers"][0]["args"][0],
        yaml.safe_load(LAUNCHERS["skypilot"].write(job))["run"],
        LAUNCHERS["slurm"].write(job),
    ):
        check_shell(script)
        assert f"{job.program.settings.rstrip()}\nEND_OF_SETTINGS\n" in script


def test_accelerate_starts_its_ranks_itself(tmp_path) -> None:
    """In every launch file: its settings, the hosts, the processes of all hosts, and the place where they meet."""
    job = job_of(LARGE, *CHANGES["accelerate"], framework="accelerate", folder=str(tmp_path / "a run"))
    runtime, _ = yaml.safe_load_all(LAUNCHERS["kubernetes"].write(job))
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    variables = {
        "torchrun": {"HEAD": "n1"},
        "kubernetes": {"PET_NODE_RANK": "3", "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "29500"},
        "skypilot": {"SKYPILOT_NODE_IPS": "n1\nn2", "SKYPILOT_NODE_RANK": "3"},
    }
    scripts = {
        "torchrun": LAUNCHERS["torchrun"].write(job),
        "kubernetes": pod["containers"][0]["args"][0],
        "skypilot": yaml.safe_load(LAUNCHERS["skypilot"].write(job))["run"],
    }
    settings = str(Path(job.folder, "settings.yaml"))
    for name, script in scripts.items():
        shown = subprocess.run(
            ["bash", "-c", script.replace("exec accelerate", "printf '%s\\n'")],
            env={**os.environ, **variables[name]},
            text=True,
            capture_output=True,
            timeout=200,
            check=True,
        ).stdout.splitlines()
        given = dict(zip(shown[1:-1:2], shown[2:-1:2], strict=True))
        assert (shown[0], shown[-1]) == ("launch", "train.py")
        assert (given["--config_file"], given["--num_machines"], given["--num_processes"]) == (settings, "8", "64")
        assert (given["--main_process_ip"], given["--main_process_port"]) == ("n1", "29500")
        assert given.get("--machine_rank", given.get("--rdzv_backend")) == ("c10d" if name == "torchrun" else "3")
    slurm = LAUNCHERS["slurm"].write(job)
    check_shell(slurm)
    assert "accelerate launch --config_file" in slurm
    assert '--main_process_ip "$head" --main_process_port "$port" --max_restarts 0' in slurm


def test_flags_of_megatron_include_what_is_not_a_size() -> None:
    """Without them Megatron-LM's defaults would make another model, with dropout 0.1 and another rotary base."""
    flags = model_settings(catalog.load("models", "deepseek-v3"))
    expected = {"--rotary-base": "10000", "--hidden-dropout": "0", "--moe-router-group-topk": "4", "--mscale": "1"}
    assert {flag: str(flags[flag]) for flag in expected} == expected
    assert {"--multi-latent-attention", "--moe-router-enable-expert-bias"} <= set(flags)
    with pytest.raises(MeshwrightError, match=r"MW-LAUNCH-005.*sinks"):
        model_settings(catalog.load("models", "gpt-oss-20b"))


def test_experts_are_balanced_in_megatron_where_the_model_states_no_weight() -> None:
    """Megatron-LM's own default weight is zero; DeepSeek-V3 balances by its bias instead."""
    flags = model_settings(catalog.load("models", "mixtral-8x7b"))
    assert (flags["--moe-router-load-balancing-type"], flags["--moe-aux-loss-coeff"]) == ("aux_loss", "0.01")
    assert model_settings(catalog.load("models", "deepseek-v3"))["--moe-router-load-balancing-type"] == "none"


@pytest.mark.parametrize(("zero", "fsdp"), [(1, False), (2, True), (3, True)])
def test_megatron_fsdp_has_its_format_and_not_the_single_queue(zero: int, fsdp: bool) -> None:
    """Megatron-LM refuses ZeRO-2 and 3 with another checkpoint format, and with CUDA_DEVICE_MAX_CONNECTIONS=1."""
    job = job_of(
        LARGE,
        f"plan.zero={zero}",
        "plan.pp=1",
        "plan.shard=8",
        "plan.replicate=1",
        "plan.virtual=1",
        framework="megatron-lm",
    )
    assert ("fsdp_dtensor" in job.program.begin) == fsdp
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in job.program.variables) == (not fsdp)


def test_flags_of_megatron_give_back_dense_layers_and_shared_experts() -> None:
    config = load(ROOT / LARGE, ["model=deepseek-v3", "plan.pp=1", "plan.shard=8", "plan.recompute=full"])
    facts = read_facts(FRAMEWORKS["megatron-lm"].table, settings_of(config, FRAMEWORKS["megatron-lm"]).settings).facts
    back = shape_of(facts, "")
    assert (back.model.dense_layers, back.model.shared_width, back.model.experts) == (3, 2048, 256)


def test_a_plan_that_the_framework_cannot_run_or_express_is_refused() -> None:
    with pytest.raises(MeshwrightError, match=r"MW-PLAN-023.*ZeRO-1"):
        job_of(framework="torchtitan")
    with pytest.raises(MeshwrightError, match=r"MW-LAUNCH-005.*nano"):
        job_of(SMALL, "plan.zero=3", "plan.replicate=1", "plan.shard=2", framework="torchtitan")
    with pytest.raises(MeshwrightError, match=r"MW-LAUNCH-005.*workload\.optimizer"):
        job_of(LARGE, "workload.optimizer=sgd", framework="megatron-lm")


def test_without_a_name_the_framework_of_the_plan_s_stack_is_started() -> None:
    assert job_of(framework="").program.framework == "megatron-lm"
    assert job_of(SMALL, framework="").program.framework == "meshwright"
    assert job_of(framework="Megatron-LM").program.framework == "megatron-lm"


def test_torchtitan_s_names_of_models_are_read_as_the_catalog_s() -> None:
    for entry, (name, flavor) in MODELS.items():
        found = catalog.load("models", catalog_model(f"{name} {flavor}") or entry)
        assert found.hidden == catalog.load("models", entry).hidden


def test_accelerate_shards_the_ranks_beside_tensor_parallelism() -> None:
    """Its ParallelismConfig refuses tp > 1 with replicas only; tensor parallelism alone has no data-parallel ranks."""
    replicas = ("plan.pp=1", "plan.sp=false", "plan.recompute=full", "plan.zero=0", "plan.shard=1", "plan.replicate=8")
    with pytest.raises(
        MeshwrightError, match=r"MW-PLAN-023: accelerate does not run ZeRO-0 with tensor or expert parallelism"
    ):
        job_of(LARGE, *replicas, framework="accelerate")
    one_group = ("model=llama3-8b", "cluster.gpus=8", "workload.batch=8", *replicas[:-1], "plan.replicate=1")
    assert job_of(LARGE, *one_group, framework="accelerate").config.plan.tp == 8
