"""Outputs of nccl-tests become measured points: every layout that its versions print, its conventions of bandwidth, and files that are refused."""

import re

import pytest

from calibrate.nccl_output import DEVICE, FACTORS, OLD, SIZES, as_json, old_text, text
from meshwright.calibrate.calibration import calibrate
from meshwright.calibrate.nccl_tests import PROGRAMS, read_nccl_tests, read_result
from meshwright.calibrate.points import Bench
from meshwright.cli import main
from meshwright.cost.collective import choose
from meshwright.describe.config import load_cluster
from meshwright.errors import MeshwrightError

NODE = ["gpu01"] * 8
TWO_NODES = ["gpu01"] * 8 + ["gpu02"] * 8


def seconds(size: int) -> float:
    return 20e-6 + size / 150e9


def spanned(bench: Bench) -> list[tuple[int, float]]:
    return [(point.bytes, point.median_s) for point in bench.points]


EXPECTED = [
    (size, pytest.approx(seconds(size), rel=2e-3)) for size in SIZES
]  # times are printed with at least three digits


WRITTEN = [
    (write, program)
    for write in (text, old_text, as_json)
    for program in FACTORS
    if program in OLD or write is not old_text
]


@pytest.mark.parametrize(("write", "program"), WRITTEN)
def test_points_are_those_of_the_table(write, program: str) -> None:
    bench = read_nccl_tests(write(program, NODE, seconds), f"{program}_perf.txt")
    assert spanned(bench) == EXPECTED
    assert {point.operation for point in bench.points} == {PROGRAMS[program][0]}
    assert (bench.world, set(bench.hosts)) == (8, {"gpu01"})
    largest = bench.points[-1]
    assert largest.bus_bandwidth == pytest.approx(
        FACTORS[program](8) * largest.bytes / seconds(largest.bytes), rel=2e-3
    )
    assert largest.concurrent == (8 if program == "sendrecv" else 1)


@pytest.mark.parametrize(
    "prefix",
    ["[1,0]<stdout>:", "[prterun-node1-77@1,0]<stdout>: ", "0: ", "gpu01: ", "2026-01-02T03:04:05.678Z stdout F "],
)
def test_a_launcher_s_prefix_and_nccl_s_log_are_skipped(prefix: str) -> None:
    lines = text("all_reduce", TWO_NODES, seconds, prefix=prefix).splitlines()
    lines.insert(9, "gpu01:149:157 [1] NCCL INFO Channel 00/24 :    0   1   2   3 via P2P/CUMEM")
    assert spanned(read_nccl_tests("\n".join(lines), "log")) == EXPECTED


def test_a_rank_of_json_is_a_gpu_not_a_process() -> None:
    """With -g 8 the file lists one device for the process of eight GPUs."""
    bench = read_nccl_tests(as_json("all_gather", TWO_NODES, seconds, gpus_per_process=8), "out.json")
    assert {host: len(ranks) for host, ranks in bench.hosts.items()} == {"gpu01": 8, "gpu02": 8}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("all-gather 2 nodes.txt", "all-gather"),
        ("alltoall_perf.log", "all-to-all"),
        ("nccl_all_to_all.txt", "all-to-all"),
        ("out.txt", None),
    ],
)
def test_an_output_that_does_not_name_its_test_needs_a_name(name: str, found: str | None) -> None:
    """all_gather_perf and alltoall_perf print the same columns."""
    written = text("all_gather", NODE, seconds, names_program=False)
    if found:
        assert read_nccl_tests(written, name).points[0].operation == found
        return
    with pytest.raises(
        MeshwrightError, match=r"MW-BENCH-003: .*does not say which test.* Valid: all_gather_perf, alltoall_perf\. Fix"
    ):
        read_nccl_tests(written, name)


@pytest.mark.parametrize("program", ["all_reduce", "reduce_scatter", "sendrecv", "broadcast"])
def test_the_bandwidths_show_which_test_ran(program: str) -> None:
    assert (
        read_nccl_tests(text(program, NODE, seconds, names_program=False), "out.txt").points[0].operation
        == PROGRAMS[program][0]
    )


GOOD = text("all_reduce", NODE, seconds)
REFUSED = {
    "a part": (GOOD[: GOOD.index("# Out of")], "ends before"),
    "no table": (GOOD[: GOOD.index("#       size")], "ends before"),
    "a cut line": (re.sub(r"(\n +16777216 .*?float .{20}).*", r"\1", GOOD), "line of 16777216 bytes is incomplete"),
    "two runs": (GOOD + text("all_gather", NODE, seconds), "holds 2 tables"),
    "two processes without MPI": (GOOD.replace("Rank  1 ", "Rank  0 "), "not numbered"),
    "a missing rank": (re.sub(r"#  Rank  7 .*\n", "", GOOD), r"busbw / algbw = 1.75 is not that of all_reduce_perf on 7 ranks"),
    "a missing rank, unnamed": (re.sub(r"#  Rank  7 .*\n|all_reduce_perf", "", GOOD), r"busbw / algbw = 1.75 is not that of any test on 7 ranks"),
    "another test": (GOOD.replace("all_reduce_perf", "all_gather_perf"), "not that of all_gather_perf on 8 ranks"),
    "a test that is unknown": (GOOD.replace("all_reduce_perf", "hypercube_perf"), "hypercube_perf has no point"),
    "two names": (f"./all_gather_perf && ./all_reduce_perf\n{GOOD}", "names several tests"),
    "groups": (GOOD.replace("Rank  7 Group  0", "Rank  7 Group  1"), "Several groups"),
    "wrong values": (GOOD.replace("values : 0 OK", "values : 3 FAILED"), "3 wrong values"),
    "the host's time": (GOOD.replace("    time", " cputime"), "option -C"),
    "one rank": (text("all_reduce", NODE[:1], seconds), "1 ranks"),
    "JSON of the host's time": (as_json("all_reduce", NODE, seconds).replace('"time"', '"cpu_time"'), "option -C"),
    "a part of JSON": (as_json("all_reduce", NODE, seconds)[:-300], "not complete"),
    "JSON without results": ('{"version":2,"start_time":"x","config":{}}', "has no"),
    "JSON of another shape": ('{"version":2,"start_time":"x","config":3}', "not complete"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_is_not_one_whole_run_is_refused(what: str, tmp_path, capsys) -> None:
    written, why = REFUSED[what]
    (tmp_path / "out.txt").write_text(written)
    with pytest.raises(SystemExit):
        main(["calibrate", str(tmp_path / "out.txt")])
    error = capsys.readouterr().err.replace("\n", " ")
    assert error.startswith("MW-BENCH-003"), error
    assert re.search(why, error), error


def test_other_text_is_neither_a_bench_nor_nccl_tests(tmp_path) -> None:
    (tmp_path / "out.txt").write_text("nccl-tests: command not found\n")
    with pytest.raises(MeshwrightError, match=r"MW-BENCH-001: .* nor the output of nccl-tests"):
        read_result(tmp_path / "out.txt")


def as_measured(program: str, hosts: list[str], factor: float) -> Bench:
    """A run on a cluster whose collective takes `factor` times the catalog's time for each byte."""
    cluster = load_cluster("dgx-h100")
    operation = PROGRAMS[program][0]

    def measured(size: int) -> float:
        slower = choose(cluster, operation, size, len(hosts)).seconds
        return slower + (factor - 1) * size / 1e9 * choose(cluster, operation, 1e9, len(hosts)).seconds

    return read_nccl_tests(text(program, hosts, measured), "out.txt")


def test_the_collectives_of_nccl_tests_become_factors_on_the_catalog_s_links() -> None:
    runs = [
        as_measured("all_reduce", TWO_NODES, 2.0),
        as_measured("all_gather", NODE, 1.0),
        as_measured("sendrecv", TWO_NODES, 1.0),
    ]
    result = calibrate(runs)
    assert result.expected.name == "dgx-h100"
    assert result.levels == []
    factors = {(f.operation, f.across): f.factors.bytes for f in result.factors}
    assert factors["all-reduce", True] > 1.9
    assert factors["all-gather", False] == pytest.approx(1.0, abs=0.03)
    assert factors["point-to-point", True] == pytest.approx(1.0, abs=0.03)
    notes = " ".join(result.notes)
    assert "measured by `nccl-tests`" in notes
    assert "all-reduce between nodes: " in notes
    assert "slow" in notes
    assert (
        "not measured, so as the catalog's dgx-h100 has them: all-reduce inside a node, reduce-scatter inside a node, "
        in notes
    )
    assert "all-gather inside a node" not in notes.partition("not measured, so")[2]
    for point in runs[0].points:  # the cost model then gives the measured times
        assert choose(result.cluster, "all-reduce", point.bytes, 16).seconds == pytest.approx(point.median_s, rel=0.15)


@pytest.mark.parametrize(
    ("busbw", "slow"),
    [(5e9, 100), (300e9, 1.5)],  # NCCL over TCP; a network of usual rate and with less latency than the catalog's
)
def test_a_network_far_from_the_catalog_s_is_the_measured_one(busbw: float, slow: float) -> None:
    run = read_nccl_tests(text("all_reduce", TWO_NODES, lambda n: 38e-6 + n * 2 * 15 / 16 / busbw), "out.txt")
    result = calibrate([run])
    (factors,) = result.factors
    assert factors.factors.bytes > slow
    assert not factors.refused
    assert any("between nodes" in note and note.endswith("slow (normal: up to 1.5×)") for note in result.notes)
    for point in run.points:
        assert choose(result.cluster, "all-reduce", point.bytes, 16).seconds == pytest.approx(point.median_s, rel=0.25)


@pytest.mark.parametrize(
    ("hosts", "cluster", "legal"),
    [
        (["gpu01"] * 4, "dgx-h100", True),
        (TWO_NODES, "dgx-h100", True),
        (["gpu01", "gpu02"], "dgx-h100", False),  # would be priced as two GPUs of one node
        (["gpu01", "gpu02"] * 8, "dgx-h100", False),  # ranks that alternate between hosts
        (["gpu01"] * 4 + ["gpu02"] * 4, "dgx-h100", False),
        ([f"gpu{k // 4}" for k in range(72)], "gb200-nvl72", True),  # 18 hosts in one NVLink domain
        ([f"gpu{k // 4}" for k in range(144)], "gb200-nvl72", True),
        ([f"gpu{k // 4}" for k in range(100)], "gb200-nvl72", False),
    ],
)
def test_ranks_must_lie_in_one_node_or_fill_nodes(hosts: list[str], cluster: str, legal: bool) -> None:
    bench = read_nccl_tests(text("all_reduce", hosts, seconds), "out.txt")
    if legal:
        assert calibrate([bench], cluster).factors
        return
    with pytest.raises(
        MeshwrightError, match=f"MW-CALIB-006: nccl-tests ran {len(hosts)} ranks on . hosts|on 25 hosts"
    ):
        calibrate([bench], cluster)


def test_an_unknown_device_is_not_taken_for_another_one() -> None:
    written = text("all_reduce", NODE, seconds).replace(DEVICE, "NVIDIA Graphics Device")
    with pytest.raises(
        MeshwrightError, match="MW-CALIB-007: the catalog has no cluster with the device 'NVIDIA Graphics Device'"
    ):
        calibrate([read_nccl_tests(written, "out.txt")])


def test_bench_shows_an_output_and_writes_it_as_a_result(tmp_path, capsys) -> None:
    (tmp_path / "all_reduce_perf.txt").write_text(GOOD)
    with pytest.raises(SystemExit) as leaving:
        main(["bench", "--read", str(tmp_path / "all_reduce_perf.txt"), "--json", str(tmp_path / "bench.json")])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert "nccl-tests" in out
    assert re.search(r"1 GiB +7.18 ms +150 GB/s +262 GB/s", out), out
    assert read_result(tmp_path / "bench.json") == read_result(tmp_path / "all_reduce_perf.txt")


def test_a_bench_shows_the_line_of_each_collective(tmp_path, capsys) -> None:
    """20 µs + n/150 GB/s: α, rate, the size at which half of the rate is reached, and what one of 8 ranks sends."""
    (tmp_path / "all_reduce.txt").write_text(text("all_reduce", NODE, seconds))
    with pytest.raises(SystemExit):
        main(["bench", "--read", str(tmp_path / "all_reduce.txt")])
    row = next(line for line in capsys.readouterr().out.splitlines() if re.match(r" all-reduce +nccl +8 +20 µs", line))
    assert re.search(r"20 µs +150 GB/s +2\.86 MiB +26[23] GB/s", row)  # 20e-6 · 150e9 = 3 MB; 2·7/8 · 150
