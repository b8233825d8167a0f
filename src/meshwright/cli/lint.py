"""`meshwright lint`: anti-patterns of a plan, with their cost in seconds."""

from __future__ import annotations

import typer

from meshwright.cli.options import ClusterOption, GpusOption, NodesOption


def command(
    file: str = typer.Argument(help="A plan file (TOML)."),
    cluster: ClusterOption = "",
    nodes: NodesOption = 0,
    gpus: GpusOption = 0,
    settings: list[str] = typer.Option(
        [], "--set", metavar="A.B=C", help="Override a field, such as --set plan.tp=8. Repeatable."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Find anti-patterns in a plan, each with its cost in seconds and a fix. Exit code 1 if a finding is significant."""
    from meshwright.describe.config import configure
    from meshwright.planner.advice.alternatives import Trial
    from meshwright.planner.advice.lint.check import check
    from meshwright.view.tables import show, show_json

    config = configure(plan=file, cluster=cluster, nodes=nodes, gpus=gpus, overrides=settings)
    now = Trial(config.model, config.cluster, config.workload, config.stack).of(config.plan)
    findings = check(config, now)
    if as_json:
        step = now.prediction.step_time_s if now else None
        show_json({"step_time_s": step, "findings": [f.as_dict() for f in findings]})
    else:
        from meshwright.view.lint import page

        show(page(config, findings, now))
    if any(f.weighs for f in findings):
        raise typer.Exit(1)
