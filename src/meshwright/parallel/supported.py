"""What a plan may say that is costed but not run, told before any process is started. No torch here."""

from __future__ import annotations

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines import SCHEDULES


def check_supported(model: Model, plan: Plan) -> None:
    refused = {
        "compression": plan.compression != "none" and plan.zero > 0,
        # Sequence parallelism keeps saved tensors by hooks of its own, unless the layer is made again as a whole.
        "offload": plan.offload in ("activations", "both") and plan.sp and plan.tp > 1 and plan.recompute != "full",
        "tp_form": plan.tp_form != "megatron" and plan.tp > 1 and model.kind != "mlp",
        "sp": plan.sp and plan.tp > 1 and model.kind == "mlp",
        "schedule": plan.pp > 1 and plan.schedule not in SCHEDULES,
        "reduce": plan.reduce == "microbatch" and plan.dp * plan.cp > 1 and (not plan.zero or plan.shard * plan.cp == 1),
    }  # fmt: skip
    for field, bad in refused.items():
        if bad:
            raise MeshwrightError("MW-PAR-001", f"plan.{field}={getattr(plan, field)} is planned and costed, not run",
                                  why=f"Running {model.kind} models, it must be unset",
                                  fix=f"--set plan.{field}={Plan.model_fields[field].default}")  # fmt: skip
    if model.kind == "transformer" and plan.tp > model.kv_groups:
        raise MeshwrightError("MW-PAR-001", f"tp={plan.tp} is more than the {model.kv_groups} KV heads of {model.name}",
                              why="Copies of a KV head on several ranks are planned and costed, not run",
                              fix=f"--set plan.tp={model.kv_groups}")  # fmt: skip
