"""What a plan may say that is costed but cannot be run, and why, told before any process is started. No torch here."""

from __future__ import annotations

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError


def check_supported(model: Model, plan: Plan) -> None:
    gathered = plan.tp_form == "all-gather" and model.kind == "transformer"
    refused = {
        "tp_form": (gathered and model.hidden % plan.tp > 0,
                    f"Each rank makes hidden/tp columns of a layer's output, and {plan.tp} does not divide {model.hidden}"),
        "sp": (plan.sp and plan.tp > 1 and model.kind == "mlp", "A row of an mlp is one sample: it has no sequence"),
    }  # fmt: skip
    for field, (bad, why) in refused.items():
        if bad:
            raise MeshwrightError(
                "MW-PAR-001",
                f"plan.{field}={getattr(plan, field)} is planned and costed, not run",
                why=why,
                fix=f"--set plan.{field}={Plan.model_fields[field].default}",
            )
