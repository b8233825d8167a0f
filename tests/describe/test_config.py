"""Configurations: names, files that extend files, overrides, origins, and writing TOML."""

import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.describe import catalog
from meshwright.describe.config import Config, configure, diff, load
from meshwright.describe.files import LIMIT
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.schema import schema
from meshwright.errors import MeshwrightError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
BASE = """
model = "llama3-70b"
stack = "megatron-core"
[cluster]
extends = "dgx-h100"
gpus = 64
[workload]
batch = 512
seq = 8192
[plan]
tp = 8
pp = 2
shard = 4
zero = 1
"""


@pytest.fixture
def base(tmp_path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def refused(path: Path | str, *overrides: str) -> MeshwrightError:
    with pytest.raises(MeshwrightError) as caught:
        load(path, overrides)
    assert caught.value.exit_code == 2
    return caught.value


def test_names_and_tables_resolve(base) -> None:
    config = load(base)
    assert config.model == catalog.load("models", "llama3-70b")
    assert config.cluster == catalog.load("clusters", "dgx-h100").with_gpus(64)
    assert config.stack == catalog.load("stacks", "megatron-core")
    assert config.plan == Plan(tp=8, pp=2, shard=4, zero=1)
    assert config.check() is config


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_are_possible(path) -> None:
    load(path).check()


def test_every_value_has_its_origin(base) -> None:
    config = load(base, ["plan.zero=3"])
    assert config.origin("model.name") == f"{base}:2"
    assert config.origin("model.layers") == "models/llama3-70b"
    assert config.origin("cluster.gpus") == f"{base}:6"
    assert config.origin("cluster.accelerator.name") == "clusters/dgx-h100"
    assert config.origin("cluster.accelerator.memory") == "accelerators/h100-sxm"
    assert config.origin("cluster.levels.1.link.bandwidth") == "links/ib-ndr"
    assert config.origin("plan.tp") == f"{base}:11"
    assert config.origin("plan.zero") == "--set"
    assert config.origin("plan.cp") == "default"
    assert set(config.origins) <= set(config.values()), "an origin of a value that is not there"


def test_a_file_extends_another(base, tmp_path) -> None:
    (tmp_path / "deeper").mkdir()
    child = tmp_path / "deeper" / "child.toml"
    child.write_text('extends = "../base.toml"\nmodel = "llama3-8b"\n[plan]\npp = 1\nshard = 8\n')
    config = load(child)
    assert config.model.name == "llama3-8b"
    assert config.plan == Plan(tp=8, pp=1, shard=8, zero=1)
    assert config.origin("plan.shard") == f"{child}:5"
    assert config.origin("plan.tp").endswith("base.toml:11")


def test_a_table_over_a_name_keeps_the_other_fields(tmp_path, base) -> None:
    child = tmp_path / "child.toml"
    child.write_text('extends = "base.toml"\n[model]\nlayers = 4\n[cluster.accelerator]\nmemory = "60GiB"\n')
    config = load(child)
    assert (config.model.layers, config.model.hidden) == (4, 8192)
    assert config.cluster.accelerator.memory == 60 * 2**30
    assert config.cluster.accelerator.peak["bf16"] == 989.4e12
    assert config.cluster.gpus == 64


def test_a_name_replaces_a_section(tmp_path, base) -> None:
    child = tmp_path / "child.toml"
    child.write_text('extends = "base.toml"\ncluster = "dgx-a100"\n')
    config = load(child)
    assert config.cluster.accelerator.name == "a100-80gb"
    assert config.cluster.gpus == 64  # no longer set: the plan's world size
    assert config.origin("cluster.gpus") == "the plan's world size"


def test_replaced_values_leave_no_origin(tmp_path, base) -> None:
    child = tmp_path / "child.toml"
    child.write_text('extends = "base.toml"\n[cluster]\nlevels = [{ name = "all", size = 64, link = "nvlink5" }]\n')
    config = load(child)
    assert len(config.cluster.levels) == 1
    assert set(config.origins) <= set(config.values()), "an origin of a value that is not there"


def test_a_level_may_extend_a_link(tmp_path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("""
    model = "nano"
    [cluster]
    name = "mine"
    accelerator = { extends = "h200", memory = "100GiB" }
    levels = [{ name = "node", size = 8, link = { extends = "nvlink4", efficiency = 0.5 } }]
    """)
    cluster = load(path).cluster
    assert cluster.levels[0].link.bandwidth == 450e9
    assert cluster.levels[0].link.efficiency == 0.5
    assert cluster.accelerator.memory == 100 * 2**30
    assert load(path).origin("cluster.levels.0.link.efficiency").startswith(str(path))
    assert load(path).origin("cluster.levels.0.link.alpha") == "links/nvlink4"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("plan.tp=4", "plan.tp", 4),
        ("plan.sp=true", "plan.sp", True),
        ("plan.schedule=gpipe", "plan.schedule", "gpipe"),
        ("plan.bucket=100MB", "plan.bucket", 100e6),
        ('plan.order=["tp","cp","dp","pp"]', "plan.order", ("tp", "cp", "dp", "pp")),
        ("model=llama3-8b", "model.layers", 32),
        ("cluster.accelerator=h200", "cluster.accelerator.name", "h200"),
        ("cluster.accelerator.memory=60GiB", "cluster.accelerator.memory", 60 * 2**30),
        ("cluster.levels.1.link.alpha=9us", "cluster.levels.1.link.alpha", 9e-6),
        ("cluster.levels.1.ports=4", "cluster.levels.1.ports", 4),
        ("cluster.levels.2.link=ib-xdr", "cluster.levels.2.link.bandwidth", 100e9),
        ("workload.tokens=15T", "workload.tokens", 15e12),
        ("cluster.accelerator.peak.bf16=1PFLOP/s", "cluster.accelerator.peak.bf16", 1e15),
    ],
)
def test_overrides(base, override, path, value) -> None:
    config = load(base, [override])
    assert config.values()[path] == value
    assert config.origin(path) == "--set" or path != override.partition("=")[0]


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("dp", ("dp",)),
        ("dp,tp", ("dp", "tp")),
        ("dp+tp", ("dp", "tp")),
        ('["dp", "tp"]', ("dp", "tp")),
        ("", ()),
        ("[]", ()),
    ],
)
def test_a_list_is_written_with_commas(base, text, axes) -> None:
    assert load(base, [f"plan.overlap={text}"]).plan.overlap == axes
    assert Plan(overlap=text if "[" not in text else list(axes)).overlap == axes


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("plan.layers_per_stage=38,42", "plan.layers_per_stage", (38, 42)),
        ("plan.order=tp,pp,cp,dp", "plan.order", ("tp", "pp", "cp", "dp")),
        ("stack.can.zero=1,2", "stack.can.zero", (1, 2)),
        ("optimizer.betas=0.9,0.99", "optimizer.betas", (0.9, 0.99)),
        ("data.path=a.bin, b.bin", "data.path", ("a.bin", "b.bin")),
        ("run.loggers=wandb", "run.loggers", ("wandb",)),
    ],
)
def test_every_list_takes_commas(base, override, path, value) -> None:
    found = load(base, [override])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_wrong_item_of_a_list_is_mended_in_the_whole_list(base) -> None:
    error = refused(base, "stack.fused=norm,lossy")
    assert error.fix == "--set stack.fused=norm,loss"
    assert load(base, [error.fix.removeprefix("--set ")]).stack.fused == ("norm", "loss")
    assert refused(base, "plan.tp=").what == "plan.tp = [] is not valid"
    assert refused(base, "model.moe=3").fix == ""


def test_later_overrides_win(base) -> None:
    assert load(base, ["plan.tp=2", "plan.tp=4"]).plan.tp == 4


@pytest.mark.parametrize(
    ("override", "code", "fix"),
    [
        ("plam.tp=8", "MW-CONF-010", "--set plan.tp"),
        ("plan.tpp=8", "MW-CONF-001", "tp"),
        ("plan.tp", "MW-CONF-011", ""),
        ("plan..tp=8", "MW-CONF-011", ""),
        ("=8", "MW-CONF-011", ""),
        ("plan.tp=[1", "MW-CONF-011", ""),
        ("plan.tp=-8", "MW-CONF-003", ""),
        ("plan.tp=nan", "MW-CONF-003", ""),
        ("cluster.gpus=1000000000000000000000000000000", "MW-CONF-003", ""),
        ("cluster.levels.9.ports=4", "MW-CONF-011", ""),
        ("plan.tp.x=4", "MW-CONF-011", ""),
        ("model=../../etc/passwd", "MW-CAT-002", ""),
        ("model=llama3-70B", "MW-CAT-002", "llama3-70b"),
        ("plan=zero3", "MW-CONF-009", ""),
        ("plan.tp=" + "9" * 20_000, "MW-CONF-011", ""),
        (".".join(["plan", *["a"] * 50]) + "=1", "MW-CONF-011", ""),
    ],
)
def test_bad_overrides(base, override, code, fix) -> None:
    error = refused(base, override)
    assert error.code == code
    assert error.fix == fix or not fix
    assert len(str(error)) < 3000


LONG = {
    "kind": "longrope", "factor": 2.0, "original_positions": 16, "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0],
    "interleaved": True, "attention_factor": 1.2,
}  # fmt: skip


def test_rotary_positions_windows_and_scales_round_trip_through_toml(tmp_path) -> None:
    model = {
        "hidden": 16,
        "layers": 4,
        "heads": 4,
        "ffn": 16,
        "vocab": 32,
        "rope": LONG,
        "window": 3,
        "full_layers": [1, 2],
    }
    model |= {"sinks": True, "swiglu_limit": 7.0, "attention_scale": 0.5, "embedding_dropout": 0.1}
    config = Config.from_parts(model, "dgx-h100", workload={"batch": 8, "seq": 64})
    assert config.model.rope.long_factor == (2.0, 3.0)
    path = tmp_path / "model.toml"
    path.write_text(config.to_toml())
    assert load(path).model == config.model


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_dim": 5},
        {"positions": "learned", "rope": {"kind": "linear", "factor": 2.0}},
        {"activation": "gelu", "swiglu_limit": 7.0},
        {"rope": {"kind": "yarn", "factor": 2.0}},
        {"rope": {"kind": "dynamic", "factor": 2.0}, "rope_dim": 2, "max_positions": 8},
        {"rope": LONG | {"long_factor": [1.0]}},
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(fields) -> None:
    with pytest.raises(MeshwrightError, match=r"MW-MODEL-009.*Fix: --set") as caught:
        Model(hidden=16, layers=4, heads=4, ffn=16, vocab=32, **fields)
    assert caught.value.exit_code == 2


def test_a_round_trip_through_toml(base, tmp_path) -> None:
    config = load(base, ["cluster.levels.1.link.alpha=9us", "model.layers=10", "plan.overlap=[]", "stack.fused=[]"])
    again = tmp_path / "again.toml"
    again.write_text(config.to_toml())
    assert load(again) == config
    assert tomllib.loads(config.to_toml())["model"] == {"extends": "llama3-70b", "layers": 10}


@pytest.mark.parametrize("kind", ["models", "clusters", "stacks"])
def test_every_catalog_entry_round_trips(kind, tmp_path) -> None:
    path = tmp_path / "entry.toml"
    for name in catalog.names(kind):
        parts = {"model": "nano", "cluster": "laptop", kind[:-1]: catalog.load(kind, name)}
        config = Config.from_parts(**parts)
        path.write_text(config.to_toml())
        assert load(path) == config
        assert config.to_dict()[kind[:-1]] == name


@given(
    st.fixed_dictionaries(
        {"tp": st.sampled_from([1, 2, 4]), "pp": st.sampled_from([1, 2]), "microbatch": st.integers(1, 4)},
        optional={
            "bucket": st.floats(1, 1e12),
            "recompute": st.sampled_from(["none", "selective", "full"]),
            "comm_dtype": st.sampled_from(["bf16", "fp32"]),
            "overlap": st.lists(st.sampled_from(["dp", "tp"]), unique=True),
            "layers_per_stage": st.just([]),
        },
    )
)
def test_any_plan_round_trips(fields) -> None:
    config = Config.from_parts("llama3-8b", "dgx-h100", plan=fields)
    again = Config.from_parts(**tomllib.loads(config.to_toml()))
    assert again == config


def test_differences(base, tmp_path) -> None:
    other = tmp_path / "other.toml"
    other.write_text('extends = "base.toml"\n[plan]\ntp = 4\nshard = 8\n[cluster]\nprice = 2.5\n')
    assert diff(load(base), load(other)) == {"plan.shard": (4, 8), "plan.tp": (8, 4), "cluster.price": (0.0, 2.5)}
    assert diff(load(base), load(base)) == {}


def test_a_cluster_without_a_size_gets_that_of_the_plan(tmp_path) -> None:
    assert Config.from_parts("llama3-8b", "dgx-h100", plan={"tp": 8, "replicate": 4}).cluster.world == 32
    assert Config.from_parts("llama3-8b", "dgx-h100").cluster.world == 8
    assert Config.from_parts("nano", "laptop", plan={"replicate": 2}).cluster.world == 2
    # A workstation of two cards does not grow to fit a plan.
    assert Config.from_parts("nano", "workstation-2x4090", plan={"replicate": 64}).cluster.world == 2


def test_a_hugging_face_config_is_a_model(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,'
        ' "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64}'
    )
    path = tmp_path / "plan.toml"
    path.write_text('model = "config.json"\ncluster = "laptop"\n')
    config = load(path)
    assert (config.model.hidden, config.model.layers) == (64, 2)
    assert config.origin("model.hidden") == str(tmp_path / "config.json")


# Bad input


def test_the_error_for_a_missing_file_suggests_similar_names(base) -> None:
    error = refused(base.parent / "bsae.toml")
    assert error.code == "MW-CONF-004"
    assert error.fix == str(base)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[plan", "MW-CONF-006"),
        ("tp = ", "MW-CONF-006"),
        ("a = " + "9" * 10_000, "MW-CONF-006"),
        ("a = " + "[" * 5000, "MW-CONF-007"),
        ("a = " + "[" * 50 + "]" * 50, "MW-CONF-007"),
        ("a." * 400_000 + "a = 1", "MW-CONF-007"),
        ("[plam]", "MW-CONF-010"),
        ("[plan]\ntp = 8\ntp = 4", "MW-CONF-006"),
        ("plan = 3", "MW-CONF-009"),
        ("extends = 3", "MW-CONF-009"),
        ("extends = 'none.toml'", "MW-CONF-004"),
        ('[plan]\nextends = "x"', "MW-CONF-009"),
        ("[model]\nextends = 3", "MW-CONF-009"),
        ("[workload]\nbatch = nan", "MW-CONF-003"),
        ("[workload]\nbatch = -inf", "MW-CONF-003"),
        ("[workload]\nbatch = -8", "MW-CONF-003"),
        ("[workload]\nbatch = 2024-01-01", "MW-CONF-003"),
        ("[workload]\nbatch = true", "MW-CONF-003"),
        ("[cluster]\nextends = 'laptop'\nlevels = 3", "MW-CONF-003"),
        ("[cluster]\nextends = 'laptop'\nlevels = [3]", "MW-CONF-003"),
        ('[cluster]\naccelerator = "h1000"', "MW-CAT-002"),
        ('model = "llama3-70b/../x"', "MW-CAT-002"),
        ('model = "none.json"', "MW-CONF-004"),
        ('model = "a\\u0000b.json"', "MW-CONF-004"),
    ],
)
def test_malformed_files(tmp_path, text, code) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text if "model" in text else 'model = "nano"\n' + text)
    if "cluster" not in text:
        path.write_text('cluster = "laptop"\n' + path.read_text())
    error = refused(path)
    assert error.code == code, str(error)
    assert len(str(error)) < 3000
    assert [p.name for p in tmp_path.iterdir()] == ["bad.toml"], "something was written"


def test_a_section_is_missing(tmp_path) -> None:
    path = tmp_path / "few.toml"
    path.write_text('model = "nano"\n')
    assert refused(path).code == "MW-CONF-002"
    path.write_text("# nothing yet\n")
    assert "is empty" in str(refused(path))
    path.write_text("tp = 8\n")
    assert refused(path).fix == "[plan]\ntp = 8"


def test_memory_without_a_unit_is_refused(tmp_path) -> None:
    path = tmp_path / "unit.toml"
    path.write_text(
        'model = "nano"\n[cluster]\nextends = "dgx-h100"\naccelerator = { extends = "h100-sxm", memory = 80 }\n'
    )
    assert refused(path).fix == "80GiB"


def test_a_missing_file_names_only_a_similar_one(tmp_path) -> None:
    (tmp_path / "plan-a.toml").touch()
    assert refused(tmp_path / "plan-b.toml").fix == str(tmp_path / "plan-a.toml")
    assert refused(tmp_path / "other.toml").fix == ""
    (tmp_path / "some.json").write_text("{}")
    assert "neither a plan file nor settings" in str(refused(tmp_path / "some.json"))


def test_binary_junk_folders_and_pipes(tmp_path) -> None:
    (tmp_path / "junk.toml").write_bytes(bytes(range(256)) * 100)
    assert refused(tmp_path / "junk.toml").code == "MW-CONF-006"
    assert refused(tmp_path).code == "MW-CONF-004"
    os.mkfifo(tmp_path / "pipe.toml")
    assert refused(tmp_path / "pipe.toml").code == "MW-CONF-004"
    assert refused(tmp_path / ("x" * 5000)).code == "MW-CONF-004"
    assert refused("a\0b").code == "MW-CONF-004"


def test_a_huge_file_is_refused_by_its_size(tmp_path) -> None:
    path = tmp_path / "huge.toml"
    with open(path, "wb") as file:
        file.truncate(100_000_000)  # a hole: costs no disk
    error = refused(path)
    assert error.code == "MW-CONF-005"
    assert "100,000,000" in str(error)
    path.write_text("#" * LIMIT)
    assert refused(path).code == "MW-CONF-006"  # comments only


def test_files_that_extend_each_other(tmp_path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    assert "extends itself. a.toml → b.toml" in str(refused(tmp_path / "a.toml"))
    for i in range(20):
        (tmp_path / f"c{i}.toml").write_text(f'extends = "c{i + 1}.toml"')
    assert refused(tmp_path / "c0.toml").code == "MW-CONF-008"


# Schema


def test_the_schema_has_every_field() -> None:
    made = schema()
    assert set(made["properties"]) == {
        "extends",
        "plugins",
        "model",
        "cluster",
        "stack",
        "workload",
        "plan",
        "adapter",
        "data",
        "optimizer",
        "checkpoint",
        "run",
    }
    name, tabled = made["properties"]["model"]["anyOf"]
    assert name["type"] == "string"
    assert {"extends", "hidden", "kv_heads"} <= set(tabled["properties"])
    assert set(schema("plan")["properties"]) == set(Plan.model_fields)
    assert schema("plan")["properties"]["bucket"]["type"] == ["number", "string"]
    assert made["$defs"]["Link"]["anyOf"][0]["type"] == "string"


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "examples/clusters").glob("*.toml")), ids=lambda p: p.name
)
def test_the_cluster_examples_load(path):
    config = configure("llama3-8b", path)
    assert config.cluster.accelerator.efficiency.measured


@pytest.mark.parametrize(("section", "name"), [("model", "nano"), ("cluster", "laptop"), ("stack", "megatron-core")])
def test_a_section_with_only_the_name_of_an_entry_is_refused(tmp_path, section, name):
    """It would be shown under that name and have other values."""
    names = {"model": "nano", "cluster": "laptop", "stack": "default"}
    lines = [f'{key} = "{value}"' for key, value in names.items() if key != section]
    file = tmp_path / "plan.toml"
    file.write_text("\n".join([*lines, f"[{section}]", f'name = "{name}"']))
    with pytest.raises(MeshwrightError, match=rf'MW-CONF-002.*Fix: {section} = "{name}"'):
        load(file)
    file.write_text("\n".join([*lines, f"[{section}]", f'extends = "{name}"']))
    assert getattr(load(file), section).name == name


@pytest.mark.parametrize("stack", catalog.names("stacks"))
def test_a_written_stack_is_read_again(tmp_path, stack):
    config = configure("nano", "laptop", stack=stack)
    (tmp_path / "plan.toml").write_text(config.to_toml())
    assert load(tmp_path / "plan.toml").stack == config.stack
