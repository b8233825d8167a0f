"""Bugs to plant in Transformers' Trainer, by replacing functions of it."""

from transformers import Trainer


def means_of_means(chosen):
    """Each micro-batch is divided by its own tokens, as before release 4.46."""
    plain = Trainer.get_batch_samples

    def get_batch_samples(self, *args, **kwargs):
        batches, _ = plain(self, *args, **kwargs)
        return batches, None

    Trainer.get_batch_samples = get_batch_samples


def tokens_of_this_rank(chosen):
    plain = Trainer.get_batch_samples

    def get_batch_samples(self, *args, **kwargs):
        self.args.average_tokens_across_devices = False
        return plain(self, *args, **kwargs)

    Trainer.get_batch_samples = get_batch_samples


def loss_is_not_divided(chosen):
    plain = Trainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        return plain(self, *args, **kwargs) * chosen.accumulate

    Trainer.compute_loss = compute_loss


def rotary_is_shifted(chosen):
    from transformers.models.llama import modeling_llama as llama

    plain = llama.LlamaRotaryEmbedding.forward
    llama.LlamaRotaryEmbedding.forward = lambda self, x, position_ids: plain(self, x, position_ids * (1 + chosen.rank))


def plant(chosen):
    globals()[chosen.bug](chosen)
