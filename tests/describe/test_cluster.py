"""Clusters: the hardware of the catalog, and the ports on the path between two devices."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.api import estimate
from meshwright.cost.library import library_of
from meshwright.describe import catalog
from meshwright.describe.accelerator import Accelerator
from meshwright.describe.cluster import Cluster, Level, Link, uniform
from meshwright.errors import MeshwrightError

WANTED = {
    "accelerators": ("v100-sxm2-16gb", "a100-40gb", "a100-80gb", "h100-sxm", "h100-pcie", "h200", "h800", "b200", "gb200",
                     "mi300x", "rtx-4090", "cpu"),
    "links": ("nvlink3", "nvlink4", "nvlink5", "pcie4-x16", "pcie5-x16", "ib-hdr", "ib-ndr", "ib-xdr", "roce-400",
              "efa-100", "ethernet-25"),
    "clusters": ("dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "aws-p5", "gcp-a3-mega",
                 "azure-nd-h100-v5", "workstation-2x4090", "laptop"),
    "stacks": ("default", "megatron-lm", "megatron-core", "nemo-megatron", "megatron-deepspeed", "nanotron",
               "composer-fsdp", "maxtext", "oneflow", "paxml"),
}  # fmt: skip
DENSE_TFLOPS = {  # datasheets; a "with sparsity" figure would be twice this
    ("v100-sxm2-32gb", "fp16"): 125, ("a100-80gb", "bf16"): 312, ("a100-80gb", "tf32"): 156, ("h100-sxm", "bf16"): 989.4,
    ("h100-sxm", "tf32"): 494.7, ("h100-sxm", "fp8"): 1978.9, ("h200", "bf16"): 989.4, ("b200", "bf16"): 2250,
    ("b200", "fp4"): 9000, ("gb200", "fp8"): 5000, ("mi300x", "bf16"): 1307.4, ("rtx-4090", "bf16"): 165.2,
}  # fmt: skip


@pytest.mark.parametrize("kind", catalog.KINDS)
def test_every_entry_loads_and_names_its_source(kind) -> None:
    for name in catalog.names(kind):
        entry = catalog.load(kind, name)
        assert entry.name == name
        if kind != "models":
            assert entry.source, f"{kind}/{name} has no source"


@pytest.mark.parametrize("kind", WANTED)
def test_the_catalog_has_the_listed_entries(kind) -> None:
    assert set(WANTED[kind]) <= set(catalog.names(kind))


@pytest.mark.parametrize(("name", "dtype"), DENSE_TFLOPS)
def test_dense_peaks(name, dtype) -> None:
    assert catalog.load("accelerators", name).peak[dtype] == pytest.approx(DENSE_TFLOPS[name, dtype] * 1e12)


@pytest.mark.parametrize(
    ("name", "label_gb"),
    [("a100-40gb", 40), ("a100-80gb", 80), ("h100-sxm", 80), ("h200", 141), ("b200", 192), ("rtx-4090", 24)],
)
def test_usable_memory_is_a_little_below_the_label(name, label_gb) -> None:
    assert 0.92 * label_gb * 1e9 < catalog.load("accelerators", name).memory < label_gb * 2**30


def test_link_rates_are_per_direction() -> None:
    assert catalog.load("links", "nvlink4").bandwidth == 450e9
    assert catalog.load("links", "ib-ndr").bandwidth == 50e9
    assert catalog.load("links", "ib-hdr").bandwidth == 25e9


def test_a_missing_dtype_runs_at_the_rate_of_the_next_wider_one() -> None:
    a100, v100 = catalog.load("accelerators", "a100-80gb"), catalog.load("accelerators", "v100-sxm2-16gb")
    assert a100.peak_for("fp8") == a100.peak["bf16"]
    assert v100.peak_for("bf16") == v100.peak["fp16"]


def test_postal_model() -> None:
    link = Link(name="x", alpha="2us", bandwidth="10GB/s", efficiency=0.5)
    assert link.time(0) == pytest.approx(2e-6)
    assert link.time(5e9) == pytest.approx(1 + 2e-6)
    assert link.crossover == pytest.approx(1e4)  # α/β
    assert link.time(link.crossover) == pytest.approx(2 * link.alpha)


def three_levels(oversubscription: float = 1.0, ports: int = 0) -> Cluster:
    device = Accelerator(name="d", memory=1e9, memory_bandwidth=1e12, peak={"fp32": 1e12})
    fast, slow = Link(name="fast", alpha=1e-6, bandwidth=100e9), Link(name="slow", alpha=5e-6, bandwidth=10e9)
    return Cluster(
        name="c",
        accelerator=device,
        gpus=32,
        levels=(
            Level(name="node", size=4, link=fast),
            Level(name="rail", size=4, link=slow, ports=ports),
            Level(name="spine", size=2, link=slow, ports=ports, oversubscription=oversubscription),
        ),
    )


@pytest.mark.parametrize(("a", "b", "level"), [(0, 3, 0), (3, 4, 1), (0, 15, 1), (15, 16, 2), (0, 31, 2)])
def test_level_between(a, b, level) -> None:
    assert three_levels().level_between(a, b) == level == three_levels().level_between(b, a)


def test_paths_have_the_latency_and_the_ports_of_their_level() -> None:
    cluster = three_levels(oversubscription=4)
    assert cluster.path(5, 5) == (0.0, ())
    assert cluster.path(0, 1) == (1e-6, (("out", 0), ("in", 1)))
    assert cluster.path(0, 4) == (5e-6, (("nic-out", 1, 0, 0), ("nic-in", 1, 1, 0)))
    assert cluster.path(0, 31).ports == (("nic-out", 1, 0, 0), ("nic-in", 1, 7, 3), ("up", 2, 0), ("down", 2, 1))
    assert cluster.path(0, 31).ports[0] == cluster.path(0, 4).ports[0]  # one card, whatever level it reaches


def test_oversubscription_bounds_a_devices_share() -> None:
    assert three_levels().device_bandwidth(2) == pytest.approx(10e9)
    assert three_levels(oversubscription=4).device_bandwidth(2) == pytest.approx(2.5e9)
    assert three_levels(oversubscription=4).capacity(("up", 2, 0)) == pytest.approx(16 * 10e9 / 4)


def test_devices_share_cards() -> None:
    half, double = three_levels(ports=2), three_levels(ports=8)
    assert half.device_bandwidth(1) == pytest.approx(5e9)
    assert half.path(0, 4).ports[0] == half.path(1, 5).ports[0]  # two devices, one card
    assert double.device_bandwidth(1) == pytest.approx(20e9)
    assert double.capacity(("nic-out", 1, 0, 0)) == pytest.approx(20e9)


def test_a_shared_bus_is_one_port() -> None:
    laptop = catalog.load("clusters", "laptop")
    assert laptop.path(0, 1).ports == laptop.path(2, 3).ports
    assert laptop.device_bandwidth(0) * laptop.node_size == pytest.approx(laptop.capacity(("bus", 0)))


def test_meta_h100_is_oversubscribed_between_pods() -> None:
    cluster = catalog.load("clusters", "meta-h100").with_gpus(24576)
    assert cluster.spans == (8, 3072, 24576)
    assert cluster.device_bandwidth(1) / cluster.device_bandwidth(2) == pytest.approx(7)


@given(st.integers(0, 31), st.integers(0, 31))
def test_paths_are_symmetric_in_cost(a, b) -> None:
    cluster = three_levels(oversubscription=2)
    there, back = cluster.path(a, b), cluster.path(b, a)
    assert there.alpha == back.alpha
    assert sorted(map(cluster.capacity, there.ports)) == sorted(map(cluster.capacity, back.ports))


def test_a_level_beyond_the_catalog_holds_any_number() -> None:
    cluster = catalog.load("clusters", "laptop").with_gpus(64)
    assert cluster.level_between(0, 63) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpus", 10**30),
        ("gpus", -8),
        ("gpus", float("nan")),
        ("levels", []),
        ("accelerator", "h1000"),
        ("accelerator", "../h100"),
        ("price", float("inf")),
    ],
)
def test_bad_clusters_are_refused(field, value) -> None:
    with pytest.raises(MeshwrightError) as caught:
        catalog.load("clusters", "dgx-h100").but(**{field: value})
    assert caught.value.exit_code == 2


def test_the_error_for_a_bad_rate_names_the_field_and_the_units() -> None:
    with pytest.raises(MeshwrightError) as caught:
        Link(name="x", alpha="1us", bandwidth="400Gbit")
    assert caught.value.code == "MW-UNIT-002"
    assert "link.bandwidth" in str(caught.value)
    assert "Gb/s" in caught.value.valid


def test_a_uniform_cluster_matches_the_formulas() -> None:
    cluster = uniform(8, 1e-6, 1e9)
    assert cluster.world == 8
    assert cluster.path(0, 7).alpha == 1e-6
    assert cluster.device_bandwidth(0) == 1e9


def test_the_shares_of_hopper_are_those_that_bench_measured():
    text = (Path(__file__).parents[2] / "benchmarks" / "gpu" / "h200.toml").read_text("utf-8")
    measured = tomllib.loads(text)["cluster"]["accelerator"]["efficiency"]
    for device in ("h100-sxm", "h200"):
        efficiency = catalog.load("accelerators", device).efficiency
        for name in ("gemm", "flash", "fused", "memory"):
            assert getattr(efficiency, name) == round(measured[name], 2)
    assert catalog.load("accelerators", "h200").efficiency.elementwise == {
        name: round(factor, 2) for name, factor in measured["elementwise"].items()
    }


def test_a_tpu_is_planned_along_one_axis_of_its_torus() -> None:
    """Google's 1,200 GB/s both ways are six links of 100 GB/s per direction; a ring along an axis uses two. Our trainer does not run there."""
    cluster = catalog.load("clusters", "tpu-v5p")
    assert cluster.levels[0].link.bandwidth == 1200e9 / 2 / 6 * 2
    assert cluster.accelerator.planning_only
    assert library_of(cluster) == "XLA"
    estimated = estimate("llama3-8b", cluster.with_gpus(64), batch=256, plan={"shard": 64, "zero": 3})
    assert "does not run on tpu-v5p" in estimated.own_trainer.sentence


def test_links_that_texts_name() -> None:
    """A PCIe generation doubles the rate of the one before; home Ethernet carries 125 MB/s."""
    rate = {name: catalog.load("links", name).bandwidth for name in ("pcie6-x16", "pcie7-x16", "ethernet-1")}
    assert rate["pcie7-x16"] == 2 * rate["pcie6-x16"] == pytest.approx(16 * 128e9 / 8 * 242 / 256)
    assert rate["ethernet-1"] == 125e6
