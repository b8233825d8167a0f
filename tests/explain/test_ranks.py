"""Ranks beside each other, with traces made by hand: numbers that can be counted by eye."""

import json
import os
from pathlib import Path

import jsonschema_rs
import pytest
from chrome import HandMade

from meshwright.cli import main, run_command
from meshwright.errors import MeshwrightError
from meshwright.explain.attribution import (
    BETWEEN,
    BUBBLE,
    COMMUNICATION,
    COMPUTE,
    DATA,
    HOST,
    LAUNCHES,
    QUEUED,
    SYNCHRONISING,
    WAITING,
)
from meshwright.explain.beside import beside_plan
from meshwright.explain.collectives import annotation_of, axis_of
from meshwright.explain.explanation import explain_traces
from meshwright.explain.folder import plan_of_run, read_traces
from meshwright.explain.recognise import RecognisedTrace
from meshwright.explain.recognised_plan import axis_degrees, model_of
from meshwright.view.json_schema import output_schema

BASE = 10**18
GROUPS = [("0", "default_pg", [0, 1]), ("1", "mesh_tp", [0, 1])]


def two_ranks(tmp_path, late=0, other_clock=0, hosts=("a", "a")):
    """Backward until 400 (rank 1: 400 + late), behind it an all-reduce from 200 to 300; a gather until 600 + late, the update until 800 + late."""
    for rank in (0, 1):
        own, shift = (late, other_clock) if rank else (0, 0)
        t = HandMade(rank, 2, hosts[rank], BASE - shift * 1000, GROUPS)
        t.span("ProfilerStep#1", 0 + shift, 800 + late + shift)
        t.kernel("gemm", 0 + shift, 400 + own + shift, launched=shift)
        t.collective("allreduce", 200 + shift, 300 + shift, 1000, [0, 1], launched=50 + shift)
        t.collective("_allgather_base", 400 + own + shift, 600 + late + shift, 4000, [0, 1], "1", launched=60 + shift)
        t.kernel("adamw_kernel", 600 + late + shift, 800 + late + shift, launched=70 + shift)
        t.write(tmp_path)
    return explain_traces(read_traces([tmp_path]))


def in_us(step):
    return {part: ns / 1000 for part, ns in step.parts.items()}


def test_communication_is_exposed_or_hidden_by_axis(tmp_path):
    step = two_ranks(tmp_path).steps[0][0]
    assert in_us(step) == {(COMPUTE, "products"): 400, (COMPUTE, "optimizer"): 200, (COMMUNICATION, "tp"): 200}
    assert step.hidden == {"dp": 100_000}


def test_nccl_collectives_have_kind_group_and_bytes(tmp_path):
    c = two_ranks(tmp_path).run.ranks[0].collectives
    assert c.kind == ("all_reduce", "all_gather")
    assert c.ranks == ((0, 1), (0, 1))
    assert c.bytes.tolist() == [2000, 8000]


def test_the_time_before_the_last_rank_arrives_is_waiting(tmp_path):
    e = two_ranks(tmp_path, late=150)
    assert in_us(e.steps[0][0])[WAITING, "rank 1"] == 150
    assert in_us(e.steps[0][0])[COMMUNICATION, "tp"] == 200
    assert (WAITING, "rank 0") not in e.steps[1][0].parts
    late = e.run.late[0]
    assert late.rank == 1
    assert late.by_step == {"1": pytest.approx(150e-6)}
    slow = next(cause for cause in e.causes if cause.cause == "slow rank 1")
    assert slow.seconds == pytest.approx(150e-6)
    assert "compute (products)" in slow.evidence


@pytest.mark.parametrize("offset", [7_000_000, -7_000_000, 3_000])
def test_clocks_of_other_hosts_are_aligned_by_their_collectives(tmp_path, offset):
    e = two_ranks(tmp_path, late=150, other_clock=0, hosts=("a", "b"))
    plain = [in_us(s[0]) for s in e.steps.values()]
    for file in tmp_path.glob("rank-1.json"):
        content = json.loads(file.read_text())
        content["baseTimeNanoseconds"] += offset * 1000
        file.write_text(json.dumps(content))
    moved = explain_traces(read_traces([tmp_path]))
    assert [in_us(s[0]) for s in moved.steps.values()] == plain
    assert any("clock of rank 1" in note for note in moved.notes)


def test_idle_time_of_the_device_has_its_cause(tmp_path):
    t = HandMade(0, 1)
    t.span("ProfilerStep#1", 0, 1000)
    t.kernel("gemm", 0, 100, launched=0)
    t.kernel("gemm", 105, 200, launched=50)  # queued: a gap of 5
    t.span("cudaStreamSynchronize", 150, 201, "cuda_runtime")
    t.kernel("gemm", 260, 400, launched=250)  # launched after the host had waited: a gap of 60
    t.span("enumerate(DataLoader)#x.__next__", 410, 600)
    t.kernel("gemm", 620, 700, launched=615)  # 400 to 620: 190 of it in the loader, 30 of it the host
    t.kernel("adamw_kernel", 800, 1000, launched=790)  # the host was late: 100
    t.write(tmp_path)
    parts = in_us(explain_traces(read_traces([tmp_path])).steps[0][0])
    assert parts[HOST, QUEUED] == 5
    assert parts[HOST, SYNCHRONISING] == 60
    assert parts[DATA, "loader"] == 190
    assert parts[HOST, LAUNCHES] == 130
    assert sum(parts.values()) == 1000


def test_a_step_of_a_device_begins_when_the_kernels_before_it_have_ended(tmp_path):
    t = HandMade(0, 1)
    t.kernel("gemm", 0, 150, launched=0)  # of the step before
    for number, (begin, end) in enumerate([(100, 200), (200, 300)]):
        t.span(f"ProfilerStep#{number}", begin, end)
        t.kernel("gemm", begin + 150, end + 150, launched=begin + 10)
    t.write(tmp_path)
    steps = explain_traces(read_traces([tmp_path])).steps[0]
    assert [(s.step, s.start, s.duration) for s in steps] == [("0", 150_000, 200_000), ("1", 350_000, 100_000)]


def test_a_message_that_comes_late_is_a_bubble(tmp_path):
    t = HandMade(0, 4, groups=[("pp", "pipeline", [0, 1, 2, 3])])
    t.span("ProfilerStep#1", 0, 1000)
    for start, end in ((100, 120), (200, 320), (400, 440)):
        t.collective("recv", start, end, 1000, [0, 1, 2, 3], "pp", launched=10)
        t.kernel("gemm", end, end + 60, launched=20)
    t.write(tmp_path)
    parts = in_us(explain_traces(read_traces([tmp_path])).steps[0][0])
    assert parts[BUBBLE, "messages"] == 100 + 20
    assert parts[COMMUNICATION, "pp"] == 3 * 20


@pytest.mark.parametrize("name", ["Optimizer.step#AdamW.step", None])
def test_steps_without_marks_are_those_of_updates_or_of_the_period(tmp_path, name):
    t = HandMade(0, 1)
    for begin in (0, 1000, 2000, 3000):
        t.span("aten::embedding", begin, begin + 10, "cpu_op")
        t.span("aten::mm", begin + 10, begin + 900, "cpu_op")
        if name:
            t.span(name, begin + 900, begin + 1000)
    t.write(tmp_path)
    found = RecognisedTrace(read_traces([tmp_path])[0])
    assert [s.end - s.start for s in found.steps][:3] == [1_000_000] * 3
    assert len(found.steps) == 4


def test_ranks_that_ran_other_programs_or_steps_are_named(tmp_path):
    one, other = HandMade(0, 2), HandMade(1, 2)
    for t, step, names in ((one, 1, ("a", "b", "c")), (other, 7, ("x", "y", "z"))):
        t.span(f"ProfilerStep#{step}", 0, 100)
        for i, name in enumerate(names):
            t.span(f"aten::{name}", 10 * i, 10 * i + 5, "cpu_op")
        t.write(tmp_path)
    notes = explain_traces(read_traces([tmp_path])).notes
    assert any("another program" in note for note in notes)
    assert any("other steps" in note for note in notes)


def test_degrees_are_group_sizes(tmp_path):
    assert axis_degrees(two_ranks(tmp_path).run) == {"dp": 2, "tp": 2}


def test_the_command_prints_writes_and_escapes(tmp_path, capsys):
    bad = "<script>alert(1)</script>\x1b[31m[bold]"
    t = HandMade(0, 1)
    t.span("ProfilerStep#1", 0, 1000)
    t.kernel(f"gemm {bad}", 0, 100, launched=0, operator=("aten::mm", [[64, 2], [2, 64]], bad))
    t.span("cudaStreamSynchronize", 150, 900, "cuda_runtime")
    t.span(f"{bad}.py(3): {bad}", 0, 1000, "python_function")
    t.kernel("gemm", 950, 1000, launched=920)
    file, page = t.write(tmp_path, "one <b>.json"), tmp_path / "page.html"
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as done:
            main(["explain", str(file), "--html", str(page), *more])
        assert done.value.code == 0
    text = capsys.readouterr().out
    assert "\x1b[31m" not in text.partition('"version"')[0]
    assert "[bold]" in text
    content = page.read_text()
    assert "<script>alert" not in content
    printed = json.loads(text[text.index("{\n") :])
    assert printed["attributed"] == 1.0
    jsonschema_rs.validate(output_schema("explain"), printed)


@pytest.mark.parametrize(
    ("words", "code"),
    [(["missing.json"], "MW-EXPL-001"), ([], "MW-CLI-005"), (["--flight", "x", "y.json"], "MW-CLI-003")],
)
def test_nothing_to_read_is_an_error(words, code, capsys):
    with pytest.raises(SystemExit) as done:
        main(["explain", *words])
    assert done.value.code == 2
    assert code in capsys.readouterr().err


@pytest.mark.timeout(20)
def test_a_pipe_is_an_error_and_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "trace.json")
    with pytest.raises(SystemExit):
        main(["explain", str(tmp_path / "trace.json")])
    printed = capsys.readouterr().err
    assert "MW-EXPL-001" in printed
    assert "pipe" in printed


def test_groups_that_gloo_does_not_tell_apart_are_not_matched(tmp_path):
    for rank in (0, 1):
        t = HandMade(
            rank,
            4,
            groups=[("0", "default_pg", [0, 1, 2, 3]), ("1", "mesh_tp", [0, 1]), ("2", "mesh_dp", [rank, rank + 2])],
        )
        t.span("ProfilerStep#1", 0, 100)
        t.span("aten::mm", 0, 20 + 30 * rank, "cpu_op")
        t.span("gloo:all_reduce", 20 + 30 * rank, 90, thread=2, **{"Input Dims": [[10]], "Input type": ["float"]})
        t.write(tmp_path)
    e = explain_traces(read_traces([tmp_path]))
    assert in_us(e.steps[0][0]) == {
        (COMPUTE, "products"): 20,
        (COMMUNICATION, "unnamed groups"): 70,
        (HOST, BETWEEN): 10,
    }
    assert any("not told apart" in note for note in e.notes)


def test_a_run_folder_brings_its_plan(tmp_path):
    run, traces = tmp_path / "run", Path(__file__).parent / "traces"
    run.mkdir()
    (run / "run.json").write_text("{}")
    with pytest.raises(MeshwrightError) as error:
        read_traces([run])
    assert "--profile" in error.value.fix
    (run / "profile").mkdir()
    (run / "profile" / "rank-0.json.gz").write_bytes((traces / "gpu-item-rank-0.json.gz").read_bytes())
    (run / "plan.toml").write_text(
        'cluster = "dgx-h200"\n[model]\nhidden = 2048\nlayers = 12\nheads = 16\nkv_heads = 8\nffn = 5632\nvocab = 32000\n'
        "[workload]\nbatch = 4\nseq = 2048\n[plan]\nmicrobatch = 4\n"
    )
    assert plan_of_run([run]) == str(run / "plan.toml")
    beside = beside_plan(explain_traces(read_traces([run])), plan_of_run([run]), gpus=1)
    assert beside.source.endswith("plan.toml")
    assert beside.rows[0].predicted_s == pytest.approx(beside.rows[0].measured_s, rel=0.3)


def test_the_settings_of_a_framework_are_a_plan(tmp_path):
    settings = Path(__file__).parents[2] / "examples" / "settings"
    trace = Path(__file__).parent / "traces" / "gpu-item-rank-0.json.gz"
    beside = beside_plan(
        explain_traces(read_traces([trace])), str(settings / "torchtitan-llama3-70b.toml"), cluster="dgx-h100", gpus=64
    )
    assert beside.config.plan.world == 64
    assert beside.largest


def test_kernels_of_old_versions_take_kind_and_bytes_from_the_annotation_of_their_launch(tmp_path):
    """Before torch 2.2 a kernel has no record; the kernel of an all-to-all is called SendRecv."""
    for rank in (0, 1):
        t = HandMade(rank, 2)
        t.span("ProfilerStep#1", 0, 1000)
        for start, name in ((100, "all_to_all"), (300, "all_reduce")):
            t.span(f"nccl:{name}", start - 8, start - 2, **{"Input Dims": [[500, 4]], "Input type": ["float"]})
            t.kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", start, start + 100, launched=start - 5, stream=20)
        t.kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", 600, 700, launched=595, stream=20)
        t.write(tmp_path)
    c = explain_traces(read_traces([tmp_path])).run.ranks[0].collectives
    assert c.kind == ("all_to_all", "all_reduce", "send")
    assert c.bytes.tolist() == [8000, 8000, 0]


def test_what_a_trace_lacks_is_said(tmp_path):
    t = HandMade(0, 1)
    t.kernel("gemm", 0, 100, launched=0)
    t.span("cudaLaunchKernel", 150, 152, "cuda_runtime", correlation=99)
    t.write(tmp_path)
    doubts = RecognisedTrace(read_traces([tmp_path])[0]).doubts
    assert "1 of 2 launched kernels are not in the trace" in doubts[0]
    assert "no backward pass" in doubts[1]
    assert "no backward pass" in beside_plan(explain_traces(read_traces([tmp_path]))).what
    real = RecognisedTrace(read_traces([Path(__file__).parent / "traces" / "gpu-item-rank-0.json.gz"])[0])
    assert real.doubts == []


def test_kernels_that_were_launched_and_do_not_start_are_the_named_rest(tmp_path):
    t = HandMade(0, 1)
    t.span("ProfilerStep#1", 0, 1000)
    t.kernel("gemm", 0, 100, launched=0)
    t.kernel("gemm", 700, 1000, launched=50)
    t.write(tmp_path)
    e = explain_traces(read_traces([tmp_path]))
    assert in_us(e.steps[0][0])["other", "launched kernels that do not start"] == 600
    assert e.attributed == pytest.approx(0.4)


def test_many_ranks_keep_the_names_of_the_parts(tmp_path, capsys):
    for rank in range(8):
        t = HandMade(rank, 8)
        t.span("ProfilerStep#1", 0, 1000)
        t.kernel("gemm", 0, 900, launched=0)
        t.write(tmp_path)
    run_command("explain", [str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert sum("compute: products" in line for line in lines) == 2  # the ranks do not fit beside each other
    assert any("rank 7" in line for line in lines)


def test_the_annotations_of_our_trainer_tell_the_groups_of_gloo_apart(tmp_path):
    groups = [("0", "default_pg", [0, 1, 2, 3]), ("1", "mesh_tp", [0, 1]), ("2", "mesh_dp", [0, 2])]
    t = HandMade(0, 4, groups=groups)
    t.span("ProfilerStep#1", 0, 1000)
    for start, axis, ranks, kind, call in (
        (100, "tp", (0, 1), "all_reduce", "c10d::allreduce_"),
        (300, "dp", (0, 2), "reduce_scatter", "c10d::_reduce_scatter_base_"),
        (500, "pp", (0, 1), "send", "c10d::send"),
    ):
        t.span(annotation_of(kind, axis, ranks), start, start + 9)
        t.span(call, start + 1, start + 8, "cpu_op")
        library = {"Input Dims": [[10]], "Input type": ["float"]}
        t.span("gloo:send" if kind == "send" else "gloo:all_reduce", start + 20, start + 90, thread=2, **library)
    t.write(tmp_path)
    c = explain_traces(read_traces([tmp_path])).run.ranks[0].collectives
    assert c.kind == ("all_reduce", "reduce_scatter", "send")
    assert c.ranks == ((0, 1), (0, 2), (0, 1))
    assert [axis_of(kind, group) for kind, group in zip(c.kind, c.group, strict=True)] == ["tp", "dp", "pp"]


def test_waiting_for_a_message_is_the_bubble_and_the_longest_stage_is_named(tmp_path):
    for rank in (0, 1):
        t = HandMade(rank, 2, groups=[("pp", "pipeline", [0, 1])])
        t.span("ProfilerStep#1", 0, 1000)
        t.kernel("gemm", 0, 600 if rank else 300, launched=0)
        for begin, sent in ((610, 310), (700, 690)):
            t.collective("recv" if rank else "send", begin if rank else sent, begin + 10, 100, [0, 1], "pp", 10)
        t.write(tmp_path)
    e = explain_traces(read_traces([tmp_path]))
    assert (WAITING, "rank 1") not in e.steps[0][0].parts
    bubble = next(cause for cause in e.causes if cause.cause == "bubble")
    assert "rank 1 computes" in bubble.evidence


def test_the_stage_of_a_rank_is_its_place_in_the_pipeline_not_in_a_message(tmp_path):
    for rank in range(4):
        t = HandMade(rank, 4, groups=[("0", "default_pg", [0, 1, 2, 3]), ("1", "mesh_pp", [0, 1, 2, 3])])
        t.span("ProfilerStep#1", 0, 100)
        t.span(annotation_of("send", "pp", (rank, (rank + 1) % 4)), 10, 20)
        t.span("c10d::send", 11, 19, "cpu_op")
        t.span("gloo:send", 12, 30, thread=2)
        t.write(tmp_path)
    e = explain_traces(read_traces([tmp_path]))
    assert [rank["stage"] for rank in e.as_dict()["ranks"]] == [0, 1, 2, 3]
    assert axis_degrees(e.run) == {"pp": 4}


def test_annotations_of_other_programs_that_begin_like_ours_are_left_alone(tmp_path):
    t = HandMade(0, 2)
    t.span("ProfilerStep#1", 0, 1000)
    t.span("collective all_reduce", 90, 210)
    t.span("gloo:all_reduce", 100, 200, thread=2, **{"Input Dims": [[10]], "Input type": ["float"]})
    t.write(tmp_path)
    assert explain_traces(read_traces([tmp_path])).run.ranks[0].collectives.kind == ("all_reduce",)


def test_a_step_whose_device_runs_earlier_kernels_only_is_the_step_of_the_host(tmp_path):
    t = HandMade(0, 1)
    t.kernel("gemm", 0, 900, launched=0)
    t.span("ProfilerStep#1", 100, 200)
    t.write(tmp_path)
    e = explain_traces(read_traces([tmp_path]))
    assert [(s.step, s.duration) for s in e.steps[0]] == [("1", 100_000)]
    assert e.as_dict()["ranks"][0]["phases_s"]["forward"] >= 0


def test_products_without_a_duration_are_left_out(tmp_path):
    """Old profilers write whole microseconds."""
    t = HandMade(0, 1)
    t.span("ProfilerStep#1", 0, 100)
    t.span("aten::mm", 10, 10, "cpu_op", **{"Input Dims": [[4, 8], [8, 16]], "Input type": ["float", "float"]})
    t.write(tmp_path)
    assert explain_traces(read_traces([tmp_path])).as_dict()["ranks"][0]["products"] == []


HEADS_FIRST = "aten::scaled_dot_product_attention", ((2, 8, 512, 64), (2, 2, 512, 64))


def transformer(
    tmp_path, products, attention="flash_attn::_flash_attn_forward", dims=((2, 512, 8, 64), (2, 512, 2, 64))
):
    """Two layers with these products (rows, inputs, outputs) in forward, and a backward."""
    t = HandMade(0, 1)
    t.span("ProfilerStep#1", 0, 1000)
    for layer in range(2):
        at = 10 + 100 * layer
        t.span(
            attention,
            at,
            at + 5,
            "cpu_op",
            **{"Input Dims": [list(d) for d in dims], "Input type": ["c10::BFloat16"] * 2},
        )
        for number, (rows, inputs, outputs) in enumerate(products):
            begin = at + 10 + 10 * number
            shapes = {"Input Dims": [[rows, inputs], [inputs, outputs]], "Input type": ["c10::BFloat16"] * 2}
            t.span("aten::mm", begin, begin + 5, "cpu_op", **shapes)
    t.span("autograd::engine::evaluate_function: MmBackward0", 500, 900, "cpu_op")
    t.write(tmp_path)
    return explain_traces(read_traces([tmp_path])).run.ranks[0]


def test_heads_and_sequence_of_flash_attention_are_in_its_own_order(tmp_path):
    layer = [(1024, 512, 768), (1024, 512, 512), (1024, 512, 4096), (1024, 2048, 512)]
    model, microbatch, seq = model_of(transformer(tmp_path, layer), 1)
    assert (microbatch, seq) == (2, 512)
    assert (model["heads"], model["kv_heads"], model["head_dim"], model["ffn"]) == (8, 2, 64, 2048)


def test_attention_of_a_compiled_program_is_counted_once(tmp_path):
    """There an inner operator is called by another inner one."""
    layer = [(1024, 512, 768), (1024, 512, 512), (1024, 512, 4096), (1024, 2048, 512)]
    outer, dims = "aten::_scaled_dot_product_flash_attention", HEADS_FIRST[1]
    transformer(tmp_path, layer, outer, dims)
    content = json.loads((tmp_path / "rank-0.json").read_text())
    inner = [
        e | {"name": "aten::_flash_attention_forward", "dur": 1} for e in content["traceEvents"] if e["name"] == outer
    ]
    (tmp_path / "rank-0.json").write_text(json.dumps(content | {"traceEvents": content["traceEvents"] + inner}))
    model, _, seq = model_of(explain_traces(read_traces([tmp_path])).run.ranks[0], 1)
    assert (model["layers"], model["heads"], seq) == (2, 8, 512)


def test_products_that_are_no_layer_say_why_no_plan_is_recognised(tmp_path):
    with pytest.raises(MeshwrightError, match="MW-EXPL-004"):
        model_of(transformer(tmp_path, [(1024, 100, 512), (1024, 200, 512)], *HEADS_FIRST), 1)
