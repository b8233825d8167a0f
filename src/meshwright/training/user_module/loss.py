"""The loss of a micro-batch: what a user's function, or the module itself, returns."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshwright.errors import MeshwrightError

Loss = Callable[[Any, Any], Tensor]


def loss_value(loss: Loss | None, output: Any, targets: Any) -> Tensor:
    """The loss of a micro-batch as one number: of the function, or what the module returns."""
    if loss is not None:
        value: Any = loss(output, targets)
    else:
        value = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(value, Tensor) or value.numel() != 1:
        kind = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise MeshwrightError(
            "MW-OWN-003",
            f"the loss is {kind}, not one number",
            why="Without a loss function the module must return its loss, as a tensor or in an attribute `loss`",
            fix='parallelize(…, loss=lambda output, targets: …), or step({"input_ids": ids, "labels": labels})',
        )
    return value.reshape(())
