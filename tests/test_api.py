"""`import meshwright`: seven functions, imported at first use, and the same numbers as the commands print."""

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys

import jsonschema_rs
import pytest

import meshwright
from meshwright.cli import main
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.view.json_schema import OUTPUTS, output_schema

NAMES = ("load", "estimate", "plan", "simulate", "verify", "parallelize", "train")
PLAN_FILE = "examples/llama3-70b-64xh100.toml"
DEMO = "examples/demo-dp2-tp2.toml"


def test_the_names_are_functions_even_after_every_submodule_is_imported():
    """Importing meshwright.X sets the attribute X of the package."""
    for found in pkgutil.iter_modules(meshwright.__path__, "meshwright."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    for name in NAMES:
        function = getattr(meshwright, name)
        assert inspect.isfunction(function), name
        assert function.__doc__, name
        assert name in dir(meshwright)


def test_importing_meshwright_loads_no_heavy_module():
    code = "import sys, meshwright; assert meshwright.__version__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert not {"torch", "numpy", "pydantic"} & {name.split(".")[0] for name in done.stdout.split()}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'optimize'"):
        getattr(meshwright, "optimize")  # noqa: B009


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main([*arguments, "--json"])
    assert not leaving.value.code
    return json.loads(capsys.readouterr().out)


def as_json(result):
    return json.loads(json.dumps(result.as_dict()))


def check_schema(name, document):
    """The document has the keys that `docs/stability.md` promises; without one of them it is refused."""
    validator = jsonschema_rs.validator_for(output_schema(name))
    validator.validate(document)
    for key in output_schema(name)["required"]:
        assert not validator.is_valid({k: v for k, v in document.items() if k != key})


def test_estimate_and_simulate_return_what_the_commands_print(capsys):
    estimated = meshwright.estimate(PLAN_FILE, set=["plan.tp=4", "plan.shard=8"])
    shown = printed(capsys, "estimate", PLAN_FILE, "--set", "plan.tp=4", "--set", "plan.shard=8")
    assert shown == as_json(estimated)
    check_schema("estimate", shown)
    simulated = printed(capsys, "simulate", PLAN_FILE)
    check_schema("simulate", simulated)
    del simulated["detail"]  # of the drawing
    assert simulated == as_json(meshwright.simulate(PLAN_FILE))


def test_plan_returns_what_the_command_prints(capsys):
    question = ["llama3-8b", "--cluster", "dgx-h100", "--nodes", "1", "--batch", "32", "--seq", "4096"]
    data = printed(capsys, "plan", *question, "--set", "plan.tp=2")
    check_schema("plan", data)
    result = as_json(meshwright.plan("llama3-8b", "dgx-h100", nodes=1, batch=32, seq=4096, set=["plan.tp=2"]))
    del data["seconds"], result["seconds"]  # of the search
    assert data == result


def test_objects_tables_and_names_are_equivalent():
    config = meshwright.load(PLAN_FILE)
    expected = meshwright.estimate(PLAN_FILE).prediction.step_time_s
    named = meshwright.estimate(
        config.model.name, config.cluster, plan=config.plan, stack=config.stack, batch=512, seq=8192
    )
    assert meshwright.estimate(config).prediction.step_time_s == expected == named.prediction.step_time_s
    assert meshwright.load("nano", set=["cluster=laptop", "plan.replicate=2"]).plan.replicate == 2
    assert meshwright.load(config, set=["plan.microbatch=2"]).plan == config.plan.but(microbatch=2)
    replaced = meshwright.estimate(PLAN_FILE, plan=Plan(tp=8, replicate=8, recompute="full")).plan
    assert (replaced.pp, replaced.zero) == (1, 0)  # an object replaces the plan of the file


def test_a_plan_file_on_another_cluster_uses_that_cluster():
    cluster = meshwright.load("nano", set=["cluster=dgx-a100", "cluster.gpus=64"]).cluster
    result = meshwright.plan(PLAN_FILE, cluster, without=["pp"])
    assert result.estimate.cluster.accelerator.name == cluster.accelerator.name != "h100-sxm"


def test_verify_and_train_return_their_objects(tmp_path):
    proof = meshwright.verify(DEMO, steps=1, ranks=2, device="cpu", set=["plan.tp=1"])
    assert proof.passed
    check_schema("verify", as_json(proof))
    records = []
    training = meshwright.train(
        DEMO, steps=2, device="cpu", out=tmp_path / "run", set=["plan.tp=1"], listen=records.append, calibrate=False
    )
    assert [r.loss for r in records] == [r.loss for r in training.steps]
    assert (tmp_path / "run" / "measurement.json").exists()
    check_schema("train", as_json(training))


def test_bad_input_is_one_clear_error():
    with pytest.raises(MeshwrightError, match=r"MW-CONF-002: \[cluster\] is missing"):
        meshwright.load("nano")
    with pytest.raises(MeshwrightError, match="MW-CLI-003"):
        meshwright.estimate("nano", "laptop", nodes=1, gpus=2)


def test_other_documents_have_a_schema(capsys):
    with pytest.raises(SystemExit):
        main(["lint", PLAN_FILE, "--json"])
    check_schema("lint", json.loads(capsys.readouterr().out))
    with pytest.raises(SystemExit):
        main(["estimate", "nothing.toml", "--json"])
    check_schema("error", json.loads(capsys.readouterr().out))
    for name in OUTPUTS:
        with pytest.raises(SystemExit):
            main(["config", "schema", "--output", name])
        assert json.loads(capsys.readouterr().out) == output_schema(name)
        jsonschema_rs.meta.validate(output_schema(name))
