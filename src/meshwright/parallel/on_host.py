"""Numbers that the host reads later: the copy begins at once, and only reading waits for it, not for what the device does after it."""

import torch
from torch import Tensor


class OnHost:
    def __init__(self, numbers: Tensor) -> None:
        self.copied, self.done = numbers.to("cpu", non_blocking=numbers.is_cuda), None
        if numbers.is_cuda:
            self.done = torch.cuda.Event()
            self.done.record()

    def values(self) -> Tensor:
        if self.done is not None:
            self.done.synchronize()
        return self.copied
