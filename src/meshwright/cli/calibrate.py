"""`meshwright calibrate`: a cluster file from the results of `bench`, or a stack file from measured runs."""

from pathlib import Path
from typing import Any

from meshwright.cli.options import described
from meshwright.cli.output import patient, writable
from meshwright.describe.files import write_text
from meshwright.errors import MeshwrightError
from meshwright.view.calibrate import adjusted_page, page, traced_page
from meshwright.view.tables import show, show_json


@described
def command(
    files: list[str] = [],
    out: str = "",
    expect: str = "",
    name: str = "",
    runs: str = "",
    from_run: list[str] = [],
    tokens_per_s: list[str] = [],
    memory: list[str] = [],
    stack: str = "",
    from_trace: list[str] = [],
    plan: str = "",
    cluster: str = "",
    as_json: bool = False,
) -> None:
    """Fit constants to measurements: of links and collectives, of all stacks, or of the stack of a run.

    With results of `bench`: latency and bandwidth of every level; prints a verdict for each level against the catalog: normal, or slow by a
    factor with likely causes. With outputs of nccl-tests (all_reduce_perf, all_gather_perf, reduce_scatter_perf, alltoall_perf, sendrecv_perf):
    factors of these collectives on the links of the catalog's cluster, inside a node and between nodes. Use the file as --cluster FILE.
    With --from-run: the numbers of a stack, the catalog's values and what was measured, combined by Bayes' rule. Use the file as --stack FILE.
    With --from-trace: the numbers of a stack and the factors of collectives, from a profiler trace of a plan. Use the file as
    --cluster FILE --stack FILE.
    With --runs: the numbers of all stacks of the catalog, from published runs."""
    writable(out)
    sources = [bool(files), bool(runs), bool(from_run), bool(from_trace)]
    if sum(sources) > 1:
        what = "FILE, --runs, --from-run and --from-trace cannot be combined"
        raise MeshwrightError("MW-CLI-003", what, fix="run calibrate once for each")
    of_sources: dict[str, dict[str, Any]] = {
        "--from-run": {"--tokens-per-s": tokens_per_s, "--memory": memory},
        "--from-trace": {"--plan": plan, "--cluster": cluster},
        "--from-run or --from-trace": {"--stack": stack},
    }
    for source, options in of_sources.items():
        given = [option for option, value in options.items() if value]
        if given and not any(from_run if name == "--from-run" else from_trace for name in source.split(" or ")):
            fix = (
                "--from-run PLAN.toml --tokens-per-s 41000"
                if "run" in source
                else "--from-trace FOLDER --plan PLAN.toml"
            )
            raise MeshwrightError("MW-CLI-003", f"{given[0]} needs {source}", fix=fix)
    if runs:
        toml, data, pages, what = fitted_stacks(runs)
    elif from_run:
        toml, data, pages, what = adjusted_stack(from_run, tokens_per_s, memory, stack, name)
    elif from_trace:
        toml, data, pages, what = traced_stack(from_trace, plan, cluster, stack, name)
    else:
        toml, data, pages, what = fitted_cluster(files, expect, name)
    if out:
        write_text(out, toml)

    if as_json:
        show_json(data)
        return
    show(*pages)
    if out:
        use = {"numbers": "", "cluster and stack": f": use --cluster {out} --stack {out}"}
        print(f"{what} written to {out}" + use.get(what, f": use --{what} {out}"))


Fitted = tuple[str, Any, list[Any], str]  # content of the file, what --json prints, the pages, and what was fitted


def fitted_cluster(files: list[str], expect: str, name: str) -> Fitted:
    """Fit a cluster to bench results."""
    from meshwright.calibrate.calibration import calibrate
    from meshwright.calibrate.nccl_tests import read_result

    result = calibrate([read_result(file) for file in files], expect, name)
    return result.to_toml(), result.as_dict(), [page(result)], "cluster"


def fitted_stacks(runs: str) -> Fitted:
    """Fit the numbers of all stacks to a table of runs, and show how they predict sources that were left out."""
    from meshwright.calibrate.runs import accuracy, left_out, rows
    from meshwright.calibrate.runs.validate import predict_rows
    from meshwright.view import validate as view

    table = accuracy.runs() if runs == "published" else list(rows.read(runs))
    with patient("fitting"):
        result = left_out.leave_out(left_out.enough(predict_rows(table, respond=left_out.responding(table))))
        unnamed = left_out.without_stacks(result.runs)
    bands, scores = accuracy.bands(result, unnamed), left_out.scores(result)
    overall = left_out.macro_scores(scores)
    data = {
        "overall": left_out.finite_or_none(overall),
        "sources": {name: s.as_dict() for name, s in scores.items()},
        "bands": {level: band.__dict__ for level, band in bands.items()},
        "stacks": accuracy.stack_numbers(result.fit),
    }
    pages = [view.unseen_table(scores, overall), "", view.bands_table(bands), "", view.stacks_table(result.fit)]
    return accuracy.to_toml(result.fit, bands), data, pages, "numbers"


def adjusted_stack(from_run: list[str], tokens_per_s: list[str], memory: list[str], stack: str, name: str) -> Fitted:
    """Adjust a stack to measured runs of the user."""
    from meshwright.calibrate.runs.from_run import adjusted, measured_runs

    result = adjusted(measured_runs(from_run, tokens_per_s, memory, stack), name)
    return result.to_toml(), result.as_dict(), [adjusted_page(result)], "stack"


def traced_stack(from_trace: list[str], plan: str, cluster: str, stack: str, name: str) -> Fitted:
    """Adjust a stack and links to the profiler traces of one run."""
    from meshwright.describe.run_folder import is_run, present_plan
    from meshwright.explain.calibration import calibrate_from_trace
    from meshwright.explain.explanation import explain_traces
    from meshwright.explain.folder import read_traces
    from meshwright.interop.files import configure

    paths = [Path(path) for path in from_trace]
    if not plan and not is_run(paths[0]):
        what = "a trace does not say the settings of its run"
        raise MeshwrightError("MW-CALIB-008", what, fix=f"--from-trace {from_trace[0]} --plan PLAN.toml")
    config = configure(Path(plan) if plan else present_plan(paths[0]), cluster, stack=stack).check()
    result = calibrate_from_trace(explain_traces(read_traces(paths)), config, name)
    return result.to_toml(), result.as_dict(), [traced_page(config.stack, result)], "cluster and stack"
