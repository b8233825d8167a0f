"""What a recording says of the layout of a program that no framework wraps."""

import pytest
import torch
from torch import nn

from meshwright.check.frameworks.plain import FrameworkAdapter


class Silent:
    def add_local(self, name: str, gradient: torch.Tensor) -> None: ...
    def begin_clipping(self) -> None: ...
    def end_clipping(self, norm: object) -> None: ...


@pytest.mark.parametrize(("world", "layout"), [(0, "one device"), (1, "one device"), (2, "no wrapper")])
def test_ranks_without_a_wrapper_are_not_one_device(world: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: world > 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    adapter = FrameworkAdapter(Silent())
    model = nn.Linear(2, 2)
    adapter.add(model, dict(model.named_parameters()))
    assert adapter.layout() == layout
