"""The division into stages that nanotron makes itself is the same in published rows, estimates, plans and settings."""

import json

import numpy as np
import pytest

from meshwright.calibrate.runs import accuracy
from meshwright.calibrate.runs.validate import predict_rows
from meshwright.cli import run_command
from meshwright.describe import catalog
from meshwright.describe.config import Config, configure
from meshwright.describe.plan import Plan, framework_stages, in_framework
from meshwright.describe.workload import Workload
from meshwright.interop.files import read_settings
from meshwright.interop.frameworks.megatron import MEGATRON
from meshwright.interop.frameworks.nanotron import NANOTRON
from meshwright.interop.write import settings_of, write_file
from meshwright.lower.step import step_program
from meshwright.planner.search.space import Space
from meshwright.predict.estimate import estimate

LLAMA = catalog.load("models", "llama3-8b")
STACK = catalog.load("stacks", "nanotron")


def by_thresholds(model, pp):
    """nanotron's loop: cumulative costs of the blocks, the next stage after the block that passes the threshold of its stage."""
    layer = 4 * model.hidden**2 + 3 * model.ffn * model.hidden
    cumulative = np.cumsum([0] + [layer] * model.layers + [0, model.vocab * model.hidden, 0])
    stage, layers = 0, [0] * pp
    for block, cost in enumerate(cumulative):
        layers[stage] += 1 <= block <= model.layers
        stage += cost > cumulative[-1] * (stage + 1) / pp
    return tuple(layers)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "mistral-7b"])
def test_the_division_is_that_of_nanotrons_loop(name, pp):
    model = catalog.load("models", name)
    expected = by_thresholds(model, pp)
    assert min(expected) > 0
    assert framework_stages(model, STACK, pp) == expected
    assert max(expected) == expected[0]


def test_every_stage_has_a_layer_and_other_frameworks_divide_evenly():
    assert framework_stages(LLAMA, STACK, 16)[-2:] == (
        1,
        1,
    )  # the head weighs as much as two of the layers that a share has
    assert framework_stages(LLAMA, STACK, 1) == ()
    assert framework_stages(LLAMA, catalog.load("stacks", "torchtitan"), 4) == ()
    given = Plan(pp=4, layers_per_stage=(8, 8, 8, 8))
    assert in_framework(given, LLAMA, STACK) is given


def test_a_batch_of_plans_has_the_division_of_its_stack():
    plans = [Plan(pp=4), Plan(tp=4), Plan(pp=2, tp=2), Plan(pp=4)]
    batch = step_program(LLAMA, plans, Workload(batch=32, seq=2048), STACK).batch
    assert batch.uneven == {(9, 9, 8, 6): [0, 3], (18, 14): [2]}


def test_an_estimate_of_a_plan_is_the_prediction_of_the_published_run(capsys):
    """An estimate costs every rank of the pipeline, rows a rank with the mean of all blocks, whose ramp differs by less than 0.1% here."""
    row = next(
        r
        for r in accuracy.runs()
        if r["file"] == "ultrascale_playbook" and (r["pp"], r["tp"], r["dp"], r["micro_batch"]) == ("4", "2", "2", "1")
    )
    (run,) = predict_rows([row])
    c = run.case
    without = run.plan.but(layers_per_stage=())
    found = estimate(c.config.but(plan=without))
    assert run.plan.layers_per_stage == found.plan.layers_per_stage == framework_stages(c.model, STACK, 4)
    assert found.prediction.memory_gib == pytest.approx(run.prediction.memory_gib)
    assert found.prediction.step_time_s == pytest.approx(run.prediction.step_time_s, rel=1e-3)
    sizes = {key: getattr(c.model, key) for key in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "tied")}
    words = [f"model.{key}={value}" for key, value in sizes.items()]
    words += [f"plan.{key}={value}" for key, value in without.as_dict().items() if key in SET and value]
    arguments = ["llama3-8b", "--cluster", "aws-p5", "--gpus", row["gpus"], "--stack", "nanotron"]
    arguments += ["--batch", row["global_batch"], "--seq", row["seq_len"], "--json"]
    assert run_command("estimate", [*arguments, *(part for word in words for part in ("--set", word))]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert tuple(answer["plan"]["layers_per_stage"]) == run.plan.layers_per_stage
    assert answer["step_time_s"] == pytest.approx(found.prediction.step_time_s)


SET = ("tp", "sp", "pp", "replicate", "shard", "zero", "microbatch", "bucket", "schedule")


def test_settings_say_the_division_of_the_framework_that_reads_them(tmp_path):
    """What nanotron divides itself comes back from its settings; an even division it cannot say, nor Megatron-LM nanotron's."""
    fields = {"plan": {"pp": 4, "shard": 4, "zero": 1, "tp": 2, "sp": True}, "batch": 32, "seq": 2048, "nodes": 4}
    ours = configure("llama3-8b", "aws-p5", stack="nanotron", **fields)
    path = tmp_path / "nanotron.yaml"
    assert not write_file(ours, NANOTRON, path).inexpressible
    assert "tp_linear_async_communication: true" in path.read_text()
    assert read_settings(path).plan.layers_per_stage == (9, 9, 8, 6)
    even = configure("llama3-8b", "aws-p5", stack="megatron-core", **fields)
    lost = settings_of(even, NANOTRON).inexpressible
    assert lost["plan.layers_per_stage"] == ((8, 8, 8, 8), (9, 9, 8, 6))
    assert "plan.layers_per_stage" not in settings_of(even, MEGATRON).inexpressible


def test_the_search_costs_and_returns_plans_with_the_division():
    space = Space(
        Config(
            LLAMA, catalog.load("clusters", "aws-p5").with_gpus(16), workload=Workload(batch=32, seq=2048), stack=STACK
        )
    )
    rows = next(table for table in space.plans() if (table.pp > 1).any())
    batch = space.batch(rows)
    for i in range(0, len(rows), 97):
        stages = framework_stages(LLAMA, STACK, int(rows.pp[i]))
        assert space.plan(rows, i).layers_per_stage == stages
        assert batch.layers_per_stage[i] == stages
        assert space.fewest_layers(rows.pp, rows.pp)[i] == (min(stages) if stages else LLAMA.layers)
        assert space.uneven(rows)[i] == (len(set(stages)) > 1)
