"""`meshwright estimate`: what will training cost?"""

from typing import Any, Unpack

from meshwright import api
from meshwright.cli.options import TrainingOptions, described
from meshwright.cli.output import writable
from meshwright.describe.files import write_text
from meshwright.errors import MeshwrightError
from meshwright.view.tables import show, show_json


@described
def command(
    model: str = "",
    cluster: str = "",
    plan: str = "",
    explain: str = "",
    from_measure: list[str] = [],
    html: str = "",
    decode: bool = False,
    as_json: bool = False,
    **asked: Unpack[TrainingOptions],
) -> None:
    """Predict step time, memory and traffic of one plan, by part.

    With --decode: generating text instead of training. The KV cache, and the times of a prompt of --seq tokens and of one more token."""
    writable(html)
    question: dict[str, Any] = {**asked}
    if decode:
        if html or explain or from_measure or asked["batch"] or asked["tokens"]:
            raise MeshwrightError(
                "MW-CLI-003",
                "--decode cannot be combined with --html, --explain, --from-measure, --batch or --tokens",
                why="It generates text, for every number of sequences that fits",
                fix="--decode alone, with --seq for the length of the context",
            )
        generated = api.decode(model, cluster, plan=plan, **question)
        from meshwright.view.decode import page as decode_page

        show_json(generated.as_dict()) if as_json else show(decode_page(generated))
        return
    if from_measure:
        from meshwright.calibrate.runs.from_rank import measured_stack

        question["stack"] = measured_stack(from_measure, asked["stack"])
    result = api.estimate(model, cluster, plan=plan, **question)
    from meshwright.interop.files import is_settings_file, read_settings
    from meshwright.view import settings as settings_view

    source = next((f for f in (plan, model) if is_settings_file(f)), "")
    reading = read_settings(source) if source else None
    sized = asked["gpus"] or asked["nodes"]
    if reading is not None and (sized or abs(reading.assembled.gpus) != result.plan.world):
        # else the number is the file's, or is listed as assumed
        reading = read_settings(source, gpus=result.plan.world)
    if html:
        from meshwright.view.page.bundle import document
        from meshwright.view.page.subject import Subject

        write_text(html, document(Subject.of_estimate(result), first="overview"))
    if as_json:
        show_json(result.as_dict() | ({"settings": settings_view.as_dict(reading)} if reading else {}))
        return
    if reading:
        show(settings_view.page(reading, source))
    from meshwright.view.explain import explain as explained

    show(explained(result, explain) if explain else result)
