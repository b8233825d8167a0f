"""Trial runs of a user's module before the first step: does the plan compute what one device computes?

stages      the forward of the pipeline stages, one after the other on this rank, against the plain forward
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.parallel.user_module.batches import tensors_in, undisturbed
from meshwright.parallel.user_module.stages import Recorded, StageModule, copy_structure


def rounding(dtype: torch.dtype) -> float:
    """The relative difference that rounding may cause: half of the digits of a dtype."""
    return float(torch.finfo(dtype).eps ** 0.5)


def differ(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> bool:
    """Whether two tensors differ by more than rounding, relative to the largest element (or `least`). Two NaN are equal."""
    if a.shape != b.shape:
        return True
    if not a.numel():
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return not torch.equal(a, b)
    bound = rounding(a.real.dtype) * max(float(a.nan_to_num().abs().max()), least)
    return not torch.allclose(a, b, rtol=0.0, atol=bound, equal_nan=True)


@torch.no_grad()
def check_stages(module: nn.Module, seen: Recorded, spans: list[range], example: Any) -> None:
    """Run the stages on the example, each as its rank will, and raise if the output is not the plain forward's. Before its first layer a
    stage takes the random state that the plain forward had there, so that dropout drops the same elements."""
    hidden: Any = torch.zeros(1)
    with undisturbed(module):
        for span in spans:
            stage = StageModule(copy_structure(module), seen, span, len(seen.numbers), lambda output, _: output)
            stage.inputs = example
            state = seen.random[span[0]]
            if span[0]:
                stage.layers[0].register_forward_pre_hook(lambda *_, state=state: state.restore())
            try:
                hidden = stage(hidden)
            except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
                raise MeshwrightError(
                    "MW-OWN-007",
                    f"the layers {span[0]} to {span[-1]} of '{seen.path}' do not run as a stage: {type(error).__name__}: {error}",
                    why="A stage runs the module's forward with zeros in place of what other stages compute",
                    fix="plan.pp=1",
                ) from error
    pairs = zip(tensors_in(hidden), tensors_in(seen.output), strict=False)
    if any(differ(staged, plain) for staged, plain in pairs):
        raise MeshwrightError(
            "MW-OWN-007",
            "the pipeline's forward of the example is not the module's",
            why="Stages would train another model than one device",
            fix="plan.pp=1, or check=False if forward is random in a way that a seed does not repeat",
        )
