"""Bugs to plant in DeepSpeed, by replacing functions of it."""

import common
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage3, stage_1_and_2


def loss_is_not_divided(chosen):
    plain = common.loss_of
    common.loss_of = lambda logits, labels: plain(logits, labels) * chosen.accumulate


def gradients_are_summed(chosen):
    plain = stage_1_and_2.DeepSpeedZeroOptimizer.average_tensor

    def average_tensor(self, tensor, *args, **kwargs):
        return plain(self, tensor.mul_(2), *args, **kwargs)

    stage_1_and_2.DeepSpeedZeroOptimizer.average_tensor = average_tensor


def parameters_are_not_gathered(chosen):
    stage_1_and_2.all_gather_dp_groups = lambda *args, **kwargs: None


def partitions_are_not_updated(chosen):
    kind = stage3.DeepSpeedZeroOptimizer_Stage3
    plain = kind._reassign_or_swap_out_partitioned_parameters
    kind._reassign_or_swap_out_partitioned_parameters = lambda self, group: None if chosen.rank else plain(self, group)


def norm_is_local(chosen):
    kind = stage_1_and_2.DeepSpeedZeroOptimizer

    def scaled_global_norm(self, norm_type=2):
        flat = [g for group in self.averaged_gradients.values() for g in group if g is not None]
        return sum((g.float() ** 2).sum() for g in flat) ** 0.5

    kind.scaled_global_norm = scaled_global_norm


def tied_weights_are_not_summed(chosen):
    PipelineEngine._INSTRUCTION_MAP = {
        kind: (lambda self, *a, **k: None) if "TiedGrads" in kind.__name__ else function
        for kind, function in PipelineEngine._INSTRUCTION_MAP.items()
    }


def gradients_are_kept(chosen):
    DeepSpeedEngine.zero_grad = lambda self: None


def partition_of_one_rank_is_not_reduced(chosen):
    kind = stage3.DeepSpeedZeroOptimizer_Stage3
    name = next(
        n
        for n in ("_avg_scatter_grads", "__avg_scatter_grads", "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads")
        if hasattr(kind, n)
    )
    plain = getattr(kind, name)
    setattr(
        kind, name, lambda self, *args, **kwargs: [g * 2 if chosen.rank else g for g in plain(self, *args, **kwargs)]
    )


def gradient_sent_is_halved(chosen):
    plain = PipelineEngine._exec_send_grads

    def send(self, buffer_id):
        inputs = self.pipe_buffers["inputs"][buffer_id]
        if not isinstance(inputs, tuple):
            inputs.grad.mul_(0.5)
        return plain(self, buffer_id)

    PipelineEngine._exec_send_grads = send
    PipelineEngine._INSTRUCTION_MAP = {
        k: send if "SendGrad" in k.__name__ else f for k, f in PipelineEngine._INSTRUCTION_MAP.items()
    }


def copies_are_not_reduced(chosen):
    DeepSpeedEngine.allreduce_gradients = lambda self, *args, **kwargs: None


def plant(chosen):
    globals()[chosen.bug](chosen)
