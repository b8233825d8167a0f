"""A variant added from outside the package goes through every command; one that lacks a part raises and names the part."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli import main
from meshwright.describe import plugins
from meshwright.describe.config import load
from meshwright.describe.plan import Plan
from meshwright.describe.schedules import SCHEDULES, Schedule
from meshwright.describe.variants import ACTIVATIONS, ATTENTIONS, COMPRESSIONS, OPTIMIZERS, Compression
from meshwright.errors import MeshwrightError
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.write import settings_of
from meshwright.programs.pipelines import build, check, in_flight, makespan, program_of, walk
from meshwright.programs.pipelines.program import looped

FILE = """
[model]
name = "small"
hidden = 64
layers = 4
heads = 4
ffn = 128
vocab = 256
max_positions = 64

[workload]
batch = 8
seq = 32
precision = "fp32"

[plan]
pp = 2
schedule = "reversed-gpipe"
"""


def reversed_gpipe(ranks, microbatches, virtual=1):
    lists = [
        [*((r, "F", m) for m in range(microbatches)), *((r, "B", m) for m in reversed(range(microbatches)))]
        for r in range(ranks)
    ]
    return program_of("reversed-gpipe", lists, looped(ranks, 1), microbatches)


REVERSED = Schedule(
    "reversed-gpipe",
    "GPipe whose backwards start with the last micro-batch",
    build=reversed_gpipe,
    paths=lambda p, m, v, overlap: [(m + p - 1, m + p - 1, m + p - 1, 2 * (p - 1))],
    in_flight=lambda p, m, v, r: m * v,
)


SIGNS = Compression(
    "signs",
    "one bit for each value, and a scale",
    passes=3.0,
    wire=lambda r: [("all_gather", r.ranks * (4 + r.elements / 8))],
    buffers=lambda r, sent: (sent, sent + r.elements),
)


@pytest.fixture
def plug_in():
    added = []

    def add(variant):
        registry = SCHEDULES if isinstance(variant, Schedule) else COMPRESSIONS
        registry.register(variant)
        added.append((registry, variant.name))

    yield add
    for registry, name in reversed(added):
        registry.remove(name)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(FILE)
    return str(path)


def run(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as leaving:
        main(list(arguments))
    shown = capsys.readouterr()
    assert (leaving.value.code or 0) == code, shown.err
    return shown.err if code else shown.out


def test_a_schedule_from_outside_goes_through_the_commands(plug_in, file, capsys):
    plug_in(REVERSED)
    program = build("reversed-gpipe", 4, 6)
    check(program)
    assert walk(program).makespan == makespan("reversed-gpipe", 4, 6)
    assert in_flight("reversed-gpipe", 4, 6) == 6
    estimate = json.loads(run(capsys, "estimate", "--plan", file, "--cluster", "dgx-h100", "--gpus", "2", "--json"))
    assert estimate["step_time_s"] > 0
    assert "reversed-gpipe" in run(capsys, "simulate", file, "--cluster", "dgx-h100", "--gpus", "2")
    assert "reversed-gpipe" in run(capsys, "show", "reversed-gpipe", "--stages", "3", "--microbatches", "4")
    fixed = ("--cluster", "dgx-h100", "--gpus", "8", "--batch", "64", "--seq", "128", "--json")
    planned = json.loads(run(capsys, "plan", "gpt2-small", *fixed, "--fix", "schedule=reversed-gpipe", "--fix", "pp=4"))
    assert planned["plans"][0]["plan"]["schedule"] == "reversed-gpipe"
    assert "reversed-gpipe" not in run(capsys, "plan", "gpt2-small", *fixed, "--without", "reversed-gpipe")


@pytest.mark.parametrize("part", ["build", "paths", "in_flight"])
def test_a_schedule_without_a_part_raises_where_the_part_is_needed_only(plug_in, file, capsys, part):
    plug_in(replace(REVERSED, **{part: None}))
    commands = {
        "build": ("show", "reversed-gpipe", "--stages", "3"),
        "paths": ("estimate", "--plan", file, "--cluster", "dgx-h100", "--gpus", "2"),
        "in_flight": ("estimate", "--plan", file, "--cluster", "dgx-h100", "--gpus", "2"),
    }
    text = run(capsys, *commands[part], code=2)
    assert "MW-VARI-001" in text
    assert f"'reversed-gpipe' has no part '{part}'" in text
    run(
        capsys, "plan", "gpt2-small", "--cluster", "dgx-h100", "--gpus", "8", "--batch", "64", "--seq", "128", "--json"
    )  # a plan that does not name it


COMPRESSED = (
    "estimate",
    "llama3-8b",
    "--cluster",
    "dgx-h100",
    "--gpus",
    "8",
    "--batch",
    "64",
    "--seq",
    "2048",
)
DATA_PARALLEL = ("--set", "plan.shard=8", "--set", "plan.zero=2", "--set", "plan.recompute=full")


def test_a_compression_from_outside_is_costed(plug_in, capsys):
    plug_in(SIGNS)
    traffic = {}
    for name in ("none", "signs"):
        shown = run(capsys, *COMPRESSED, *DATA_PARALLEL, "--set", f"plan.compression={name}", "--json")
        traffic[name] = json.loads(shown)["traffic_bytes"]["dp"]
    assert traffic["signs"] < traffic["none"]


@pytest.mark.parametrize("part", ["wire", "buffers"])
def test_a_compression_without_a_part_names_it(plug_in, capsys, part):
    plug_in(replace(SIGNS, **{part: None}))
    text = run(capsys, *COMPRESSED, *DATA_PARALLEL, "--set", "plan.compression=signs", code=2)
    assert f"MW-VARI-001: the gradient compression 'signs' has no part '{part}'" in text
    run(capsys, *COMPRESSED, *DATA_PARALLEL, "--json")


def test_a_compression_that_no_module_runs_names_the_missing_part(plug_in):
    from meshwright.parallel.numerics.compress.compressors import make_compressor
    from meshwright.proof.emulation.compressors import compressed_sum

    plug_in(SIGNS)
    with pytest.raises(MeshwrightError, match="'signs' has no part 'make'"):
        make_compressor("signs")
    with pytest.raises(MeshwrightError, match="'signs' has no part 'emulate'"):
        compressed_sum(Plan(compression="signs"))


def test_every_compression_of_ours_has_every_part():
    import meshwright.parallel.numerics.compress.compressors
    import meshwright.proof.emulation.compressors  # noqa: F401

    assert set(COMPRESSIONS.having("wire", "buffers", "make")) == set(COMPRESSIONS)
    assert set(COMPRESSIONS.having("emulate")) == set(COMPRESSIONS) - {"none"}


TEMPERED = Path(__file__).parents[1] / "plugins" / "tempered.py"  # an attention kind and an optimizer in one file
REGISTRIES = (FRAMEWORKS, ATTENTIONS, OPTIMIZERS, SCHEDULES, COMPRESSIONS, ACTIVATIONS)
SMALL = """
[model]
name = "small"
hidden = 64
layers = 2
heads = 4
kv_heads = 2
ffn = 128
vocab = 256
max_positions = 64
attention = "tempered"
attention_options = { power = 2.0 }

[workload]
batch = 8
seq = 32
precision = "fp32"
optimizer = "signed"

[plan]
tp = 2
param_dtype = "fp32"
"""


@pytest.fixture
def loads_plugins():
    """Take out what a test's plug-ins registered."""
    before = [len(registry) for registry in REGISTRIES]
    yield
    plugins.LOADED.clear()
    for registry, count in zip(REGISTRIES, before, strict=True):
        for name in reversed(registry.names[count:]):
            registry.remove(name)


@pytest.fixture
def tempered(loads_plugins, tmp_path):
    """A plan file beside a plug-in."""
    (tmp_path / "tempered.py").write_text(TEMPERED.read_text())
    path = tmp_path / "plan.toml"
    path.write_text('plugins = ["tempered.py"]\n' + SMALL)
    return str(path)


ON_NODE = ("--cluster", "dgx-h100", "--gpus", "2")


def test_attention_and_optimizer_of_a_plug_in_go_through_the_commands(tempered, capsys):
    shown = run(capsys, "estimate", "--plan", tempered, *ON_NODE)
    assert "(tempered)" in shown
    estimate = json.loads(run(capsys, "estimate", "--plan", tempered, *ON_NODE, "--json"))
    grouped = ("--set", "model.attention=gqa", "--set", "model.attention_options={}")
    other = json.loads(run(capsys, "estimate", "--plan", tempered, *ON_NODE, *grouped, "--json"))
    model = load(tempered, ["cluster=dgx-h100"]).model
    assert model.total - model.but(attention="gqa", attention_options={}).total == 2 * (
        2 * 64 * 32 + 4
    )  # K and V of all heads, factors
    assert estimate["traffic_bytes"] == other["traffic_bytes"]
    assert "small" in run(capsys, "simulate", tempered, *ON_NODE)
    planned = json.loads(run(capsys, "plan", tempered, *ON_NODE, "--json"))
    assert planned["plans"]


def test_verify_trains_a_plug_in_on_ranks_and_train_records_it(tempered, tmp_path, capsys):
    shown = run(capsys, "verify", tempered, *ON_NODE, "--steps", "2")
    assert "trains what one device trains: 2 steps on 2 ranks" in shown
    written = load(tempered, ["cluster=dgx-h100"]).to_toml()
    assert tomllib.loads(written)["plugins"] == [str(tmp_path / "tempered.py")]


@pytest.mark.parametrize("part", ["block", "lower", "key_width", "rotated", "small", "module"])
def test_an_attention_kind_without_a_part_names_it(tempered, capsys, part):
    plugins.load([str(TEMPERED)])
    ATTENTIONS.provide("tempered", **{part: None})
    plugins.LOADED.append(str(Path(tempered).parent / "tempered.py"))  # the same file, loaded already
    if part in ("block", "lower", "rotated"):
        text = run(capsys, "estimate", "--plan", tempered, *ON_NODE, code=2)
        assert f"MW-VARI-001: the attention kind 'tempered' has no part '{part}'" in text
        return
    from meshwright.models.transformer import Transformer
    from meshwright.proof.small import small_rotation

    model = load(tempered, ["cluster=dgx-h100"]).model
    with pytest.raises(MeshwrightError, match=f"the attention kind 'tempered' has no part '{part}'"):
        small_rotation(model, 8) if part == "small" else Transformer(model, range(2))


@pytest.mark.parametrize("part", ["make", "replay"])
def test_an_optimizer_without_a_part_names_it(loads_plugins, part):
    from meshwright.describe.optimizer import Optimizer
    from meshwright.proof.emulation.update import ReplayedOptimizer

    plugins.load([str(TEMPERED)])
    OPTIMIZERS.provide("signed", **{part: None})
    with pytest.raises(MeshwrightError, match=f"the optimizer 'signed' has no part '{part}'"):
        OPTIMIZERS.part("signed", "make") if part == "make" else ReplayedOptimizer("signed", Optimizer(), True)


def test_an_optimizer_of_a_plug_in_costs_what_its_states_cost(loads_plugins, capsys):
    adam = (
        "estimate",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "8",
        "--set",
        "plan.shard=8",
        "--set",
        "plan.zero=1",
        "--json",
    )
    memory = {}
    for name in ("sgd", "signed", "adamw"):
        words = (*adam, "--set", f"workload.optimizer={name}", "--plugin", str(TEMPERED))
        memory[name] = json.loads(run(capsys, *words))["memory_gib"]
    assert memory["signed"] - memory["sgd"] == pytest.approx(memory["adamw"] - memory["signed"], rel=1e-3)
    assert memory["sgd"] < memory["signed"]


def test_every_variant_of_ours_has_its_torch_part_or_is_for_planning_only():
    import meshwright.models.transformer
    import meshwright.proof.emulation.update
    import meshwright.training.optimizer.make
    import meshwright.view.launch_files  # noqa: F401

    planning = {name for name, kind in ATTENTIONS.items() if kind.planning_only}
    assert set(ATTENTIONS.having("block", "check", "key_width", "rotated", "lower")) == set(ATTENTIONS)
    assert set(ATTENTIONS.having("module", "small")) == set(ATTENTIONS) - planning
    assert set(OPTIMIZERS.having("make", "replay")) == set(OPTIMIZERS)
    assert set(ACTIVATIONS.having("function")) == set(ACTIVATIONS)
    assert set(FRAMEWORKS.having("program")) == set(FRAMEWORKS)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, "MW-VARI-003: the plug-in 'mine.py' cannot be loaded: there is no file"),
        ("1 / 0", "MW-VARI-003: the plug-in 'mine.py' cannot be loaded. ZeroDivisionError: division by zero"),
        (
            "from meshwright.describe.schedules import SCHEDULES, Schedule\nSCHEDULES.register(Schedule('1f1b', 'again'))",
            "MW-VARI-002: the plug-in 'mine.py' cannot be loaded: the pipeline schedule '1f1b' exists already",
        ),
    ],
)
def test_a_plug_in_that_cannot_be_loaded_is_an_error(loads_plugins, tmp_path, capsys, source, text):
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    path = tmp_path / "plan.toml"
    path.write_text('plugins = ["mine.py"]\nmodel = "gpt2-small"\n')
    assert text in run(capsys, "estimate", "--plan", str(path), *ON_NODE, code=2)


def test_plugins_that_are_no_list_are_refused(loads_plugins, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('plugins = "mine.py"\nmodel = "gpt2-small"\n')
    with pytest.raises(MeshwrightError, match="MW-VARI-003: plugins is not a list of files"):
        load(path)


def test_a_framework_of_a_plug_in_is_planned_for_written_and_started(loads_plugins, tmp_path, capsys):
    settings = tmp_path / "settings.toml"
    plugin = ("--plugin", str(TEMPERED.with_name("trainkit.py")))
    asked = ("gpt2-small", "--cluster", "dgx-h100", "--gpus", "8", "--batch", "64", "--seq", "1024")
    run(capsys, "plan", *asked, "--for", "trainkit", "--write", str(settings), *plugin)
    assert tomllib.loads(settings.read_text())["mesh"]["data"] == 8
    assert "Trainkit" in run(capsys, "estimate", str(settings), "--cluster", "dgx-h100", "--gpus", "8")
    path = tmp_path / "plan.toml"
    path.write_text(
        'model = "gpt2-small"\n[cluster]\nextends = "dgx-h100"\n[workload]\nbatch = 64\nseq = 1024\n[plan]\nreplicate = 8\n'
    )
    launch = ("launch", str(path), "--for", "trainkit", "--torchrun", "--out", "-")
    assert "words=(-m trainkit --config" in run(capsys, *launch)
    FRAMEWORKS.provide("trainkit", program=None)
    assert "MW-VARI-001: the framework 'trainkit' has no part 'program'" in run(capsys, *launch, code=2)


def test_settings_of_a_framework_say_that_it_lacks_an_attention_kind(tempered):
    config = load(tempered, ["cluster=dgx-h100", "cluster.gpus=2"])
    assert settings_of(config, FRAMEWORKS["automodel"]).inexpressible["model.attention"] == ("tempered", "gqa")


def test_an_option_that_an_attention_kind_lacks_is_refused(tempered):
    with pytest.raises(MeshwrightError, match=r"attention_options.powr does not exist.*Valid: power"):
        load(tempered, ["cluster=dgx-h100", "model.attention_options.powr=2"])


def test_a_name_is_registered_once():
    with pytest.raises(MeshwrightError, match="MW-VARI-002"):
        SCHEDULES.register(Schedule("1f1b", "again"))


def test_an_unknown_name_is_refused_with_the_known_ones(plug_in):
    plug_in(REVERSED)
    with pytest.raises(MeshwrightError, match=r"MW-CONF-003.*reversed-gpipe.*Fix: --set plan.schedule=gpipe"):
        Plan(schedule="gpip")


def test_columns_grow_with_the_registry(plug_in):
    before = len(SCHEDULES.column("splits"))
    plug_in(REVERSED)
    assert len(SCHEDULES.column("splits")) == before + 1
    assert np.array_equal(SCHEDULES.column("splits")[-1:], [False])
