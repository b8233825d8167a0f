"""`meshwright simulate`: show the step of a plan as a timeline."""

import json
from typing import Unpack

from meshwright import api
from meshwright.cli.options import TrainingOptions, described
from meshwright.cli.output import writable
from meshwright.describe.files import write_text
from meshwright.errors import unknown
from meshwright.view.tables import show


@described
def command(
    model: str = "",
    cluster: str = "",
    plan: str = "",
    trace: str = "",
    html: str = "",
    detail: str = "",
    as_json: bool = False,
    **asked: Unpack[TrainingOptions],
) -> None:
    """Simulate the step of a plan action by action and show it as a timeline per rank."""
    from meshwright.view.simulate import DETAILS, choose_detail, spans

    if detail and detail not in DETAILS:
        raise unknown("MW-SIM-001", "detail", detail, DETAILS, "--detail {}")
    writable(trace, html)
    simulation = api.simulate(model, cluster, plan=plan, **asked)
    result, walked = simulation.estimate, simulation.walked
    if trace:
        from meshwright.view.trace import trace_events

        write_text(trace, json.dumps(trace_events(spans(result, walked, detail))))
    if html:
        from meshwright.view.page.bundle import document
        from meshwright.view.page.subject import Subject

        write_text(html, document(Subject.of_estimate(result), first="timeline"))
    if as_json:
        print(json.dumps(simulation.as_dict() | {"detail": detail or choose_detail(result, walked)}))
        return

    show(simulation)
    for what, where in (("trace", trace), ("page", html)):
        if where:
            show(f"[dim]{what} written to {where}[/]")
