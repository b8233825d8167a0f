"""The section [optimizer] of a run file: learning rate, schedule, weight decay, and what happens when gradients are not finite.

    [optimizer]
    learning_rate = 3e-4
    schedule = "cosine"         # after the warm-up: constant, cosine, linear, or wsd (warm-up, stable, decay)
    warmup = 2000               # steps of the linear warm-up
    min_learning_rate = 0.1     # share of the learning rate that is left after the decay
    weight_decay = 0.1          # of matrices; biases and norm weights have none
    on_nan = "skip"             # NaN or infinite gradients: skip the step, roll back to the last checkpoint, or stop

Which optimizer it is stays `workload.optimizer`, because it decides how much memory a plan needs. docs/optimizers.md has the formulas.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from meshwright.describe.base import Described, Size, Whole
from meshwright.describe.plan import Plan
from meshwright.describe.variants import readers
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError

READ_BY_SOME = ("betas", "epsilon", "scale_with_width", "weight_decay", "decay_embeddings", "momentum")
WSD_DECAY_SHARE = 0.1  # of the steps of a run: the decay of WSD, if decay_steps is 0
Share = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Described):
    """Hyperparameters of the optimizer, which a plan does not contain."""

    learning_rate: float = Field(default=1e-3, ge=0)
    """after the warm-up"""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """of the learning rate after the warm-up; wsd: stable, then a linear decay"""
    warmup: Whole = 10
    """steps of the linear warm-up"""
    decay_steps: Whole = 0
    """steps of the decay; 0: until the end of the run (wsd: its last tenth)"""
    decay_start: Whole = 0
    """first step of the decay of wsd; 0: it ends with the run"""
    min_learning_rate: float = Field(default=0.1, ge=0, le=1)
    """share of the learning rate that is left after the decay"""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """decay of Adam's first and second moment"""
    epsilon: float = Field(default=1e-8, gt=0)
    """added to the root of Adam's second moment"""
    weight_decay: float = Field(default=0.1, ge=0)
    """of matrices, under adamw and muon"""
    decay_embeddings: bool = True
    """weight decay also applies to embeddings"""
    momentum: Share = 0.9
    """of momentum SGD and Muon"""
    clip: float = Field(default=1.0, gt=0)
    """largest global gradient norm; workload.clip = false: no clipping"""
    ema: Share = 0.0
    """decay of a moving average of the weights, such as 0.999; 0: none"""
    scale_with_batch: Whole = 0
    """batch for which learning_rate was tuned: it is scaled to workload.batch; 0: not scaled"""
    scale_with_width: Whole = 0
    """hidden size for which learning_rate was tuned: scaled to model.hidden; 0: not scaled"""
    on_nan: Literal["skip", "rollback", "stop"] = "stop"
    """NaN or infinite gradients: skip the step, go back to the last checkpoint, or stop"""
    most_skips: Size = 10
    """steps skipped in a row, or rollbacks without progress, after which the run stops"""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        """Raise if an option is set that has no effect with the schedule, or with `on_nan`."""
        changed = self.as_dict()
        schedule, nan = "with this schedule", "with on_nan = stop"
        constant, stops = self.schedule == "constant", self.on_nan == "stop"
        for name, unread, where, why, fix in (
            ("decay_steps", constant, schedule, "A constant learning rate does not decay", "schedule=cosine"),
            ("min_learning_rate", constant, schedule, "A constant learning rate does not decay", "schedule=cosine"),
            ("decay_start", self.schedule != "wsd", schedule, "Other decays start after the warm-up", "schedule=wsd"),
            ("most_skips", stops, nan, "The run stops at the first step whose gradients are not finite", "on_nan=skip"),
        ):
            if unread and name in changed:
                what = f"optimizer.{name}={changed[name]:g} has no effect {where}"
                raise MeshwrightError("MW-OPT-001", what, why=why, fix=f"--set optimizer.{fix}")
        return self

    def check(self, workload: Workload, plan: Plan) -> Self:
        """Raise if an option is set that the workload's optimizer or the plan does not use."""
        changed, kind = self.as_dict(), workload.optimizer
        for name in READ_BY_SOME:
            if name in changed and kind not in (kinds := readers(name)):
                raise MeshwrightError(
                    "MW-OPT-002",
                    f"optimizer.{name} has no effect with workload.optimizer={kind}",
                    valid=[f"workload.optimizer={one}" for one in kinds],
                    fix=f"--set workload.optimizer={kinds[0]}",
                )
        if "clip" in changed and not workload.clip:
            what = f"optimizer.clip={self.clip:g} has no effect with workload.clip=false"
            raise MeshwrightError("MW-OPT-002", what, fix="--set workload.clip=true")
        if workload.ema and not self.ema:
            what = "workload.ema=true without the decay of the average, optimizer.ema"
            raise MeshwrightError("MW-OPT-002", what, fix="--set optimizer.ema=0.999")
        for name, on in (("ema", self.ema > 0), ("on_nan", self.on_nan == "rollback")):
            if on and plan.average_every:
                what = f"optimizer.{name}={changed[name]} with plan.average_every={plan.average_every}"
                why = "Replicas of local SGD train different weights between their averages, and would do it separately"
                raise MeshwrightError("MW-OPT-002", what, why=why, fix="--set plan.average_every=0")
        return self

    def with_steps(self, steps: int) -> Self:
        """A copy in which the length of the decay is a number, for a run of `steps` steps.

        A resumed run has the same schedule as the run that it continues, however long it is: the run folder contains this copy."""
        if self.schedule == "constant":
            return self
        length = max(1, steps - self.warmup)
        if self.schedule == "wsd":
            length = self.decay_steps or max(1, round(WSD_DECAY_SHARE * steps))
            return self.but(decay_steps=length, decay_start=self.decay_start or max(self.warmup, steps - length, 1))
        return self.but(decay_steps=self.decay_steps or length)
