"""A cluster file stands wherever a catalog name of a cluster may stand, in every command."""

import json

import pytest

from meshwright.cli import main
from meshwright.describe.config import configure, load, load_cluster
from meshwright.errors import MeshwrightError

CLUSTER = """
[cluster]
extends = "laptop"
name = "measured"
[[cluster.levels]]
name = "node"
size = 2
link = { name = "loopback", alpha = "30us", bandwidth = "2GB/s" }
[[cluster.levels]]
name = "network"
size = 64
link = { name = "wire", alpha = "1ms", bandwidth = "25MB/s" }
"""
PLAN = (
    'model = "nano"\ncluster = "laptop"\nstack = "gloo-cpu"\n[workload]\nbatch = 8\nseq = 32\n[plan]\nreplicate = 4\n'
)


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path / "cluster.toml"


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path / "plan.toml"


def output_of(arguments, capsys) -> dict:
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    out = capsys.readouterr().out
    assert left.value.code in (0, 1), out
    return json.loads(out)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["estimate", "nano", "--nodes", "2", "--cluster"], ["step_time_s"]),
        (
            [
                "plan",
                "nano",
                "--nodes",
                "2",
                "--batch",
                "8",
                "--seq",
                "32",
                "--set",
                "plan.pp=1",
                "--set",
                "plan.cp=1",
                "--cluster",
            ],
            ["plans", 0, "step_time_s"],
        ),
        (["simulate", "PLAN", "--nodes", "2", "--cluster"], ["step_time_s"]),
        (["lint", "PLAN", "--gpus", "4", "--cluster"], ["step_time_s"]),
        (["config", "show", "PLAN", "--nodes", "2", "--cluster"], ["cluster", "levels", 1, "link", "alpha"]),
        (["show", "all-reduce", "--ranks", "4", "--size", "1MB", "--cluster"], ["time_s"]),
    ],
)
def test_commands_take_the_links_of_the_file(arguments, path, cluster, plan, tmp_path, capsys) -> None:
    """The same file with a slower network gives a larger number, and the latency that the file says."""
    arguments = [plan if a == "PLAN" else a for a in arguments]
    slow = tmp_path / "slow.toml"
    slow.write_text(CLUSTER.replace('"1ms"', '"40ms"').replace('"25MB/s"', '"1MB/s"'))

    def value(file):
        found = output_of([*arguments, file, "--json"], capsys)
        for key in path:
            found = found[key]
        return found

    assert value(slow) > value(cluster)


def test_catalog_shows_a_file(cluster, capsys) -> None:
    found = output_of(["catalog", "clusters", cluster, "--json"], capsys)
    assert found["name"] == "measured"
    assert [level["size"] for level in found["levels"]] == [2, 64]


def test_verify_and_train_have_the_options() -> None:
    """They call `api.load` with the cluster; their runs are tested where ranks are started."""
    from meshwright import api

    for name in ("verify", "train"):
        with pytest.raises(MeshwrightError, match="MW-CONF-004"):
            api.load("nano", cluster="missing.toml")
        with pytest.raises(SystemExit) as left:
            main([name, "plan-that-is-not-there.toml", "--cluster", "dgx-h100", "--nodes", "1"])
        assert left.value.code == 2


def test_plan_file_names_a_cluster_file_beside_it(cluster, plan) -> None:
    plan.write_text(PLAN.replace('"laptop"', '"cluster.toml"'))
    config = load(plan)
    assert config.cluster.levels[1].link.alpha == 1e-3
    assert config.origin("cluster.name") == f"{cluster}:4"
    assert config.cluster.world == 4  # the file does not say how many devices: those of the plan
    assert configure(plan=plan, cluster=cluster, nodes=3).cluster.world == 6


def test_table_may_start_from_a_cluster_file(cluster, plan) -> None:
    plan.write_text(PLAN.replace('cluster = "laptop"\n', "") + '[cluster]\nextends = "cluster.toml"\nprice = 2.5\n')
    found = load(plan).cluster
    assert (found.name, found.price, found.levels[0].size) == ("measured", 2.5, 2)
    assert configure("nano", cluster, set=["cluster.levels.0.size=4"]).cluster.node_size == 4


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (None, "MW-CONF-004", "cannot read"),
        ("[plan]\ntp = 2\n", "MW-CONF-002", r"has no \[cluster\]"),
        ("[cluster\n", "MW-CONF-006", "not TOML"),
        ('[cluster]\nextends = "laptop"\nnode_size = 4\n', "MW-CONF-001", "node_size"),
        ('cluster = "bad.toml"\n', "MW-CONF-008", "extends itself"),
        ('extends = "bad.toml"\n', "MW-CONF-008", "extends itself"),
    ],
)
def test_wrong_files_are_refused(text, code, says, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(MeshwrightError, match=says) as found:
        load_cluster("bad.toml")
    assert found.value.code == code


def test_calibrated_cluster_is_written_into_plan_files(cluster, tmp_path) -> None:
    config = configure("nano", cluster, nodes=2)
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert load(tmp_path / "again.toml").cluster == config.cluster
