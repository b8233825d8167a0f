"""What every driver of a run does: read jobs, train each for two steps with the framework, write what happened on this rank as JSON.

All ranks of a group run the same jobs in turn. A job is the words and the file that Meshwright wrote, with the sizes of the plan. A rank that
outlives its time limit prints where it stands and ends, so that no process is left behind.
"""

import contextlib
import faulthandler
import json
import os
import sys
import traceback

import torch
import torch.distributed as dist

STEPS = 2


def main(train):
    """Run `train` on every job of the file that RUN_JOBS names; write the answers of this rank after each."""
    with open(os.environ["RUN_JOBS"]) as stream:
        jobs = json.load(stream)
    faulthandler.dump_traceback_later(float(os.environ["RUN_SECONDS"]), exit=True)
    answers = {}
    for name, job in jobs.items():
        torch.manual_seed(0)
        try:
            answers[name] = train(job)
        except (Exception, SystemExit) as error:
            answers[name] = {"refused": "".join(traceback.format_exception(error))[-3000:]}
        rank = os.environ.get("RANK", "0")
        with open(f"{os.environ['RUN_JOBS']}.{rank}", "w") as stream:
            json.dump(answers, stream)
        if "refused" in answers[name]:
            sys.stderr.write(answers[name]["refused"])
            os._exit(1)  # the other ranks may wait for this one: they end when its connections close
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    os._exit(0)  # some frameworks leave threads behind


def tokens(job, step):
    """The sequences of one step, the same on every rank; one token more than the sequence length, so that labels are the next tokens."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, job["vocab"], (job["batch"], job["seq"] + 1), generator=generator)


def microbatches(job, step, data_rank, data_ranks):
    """The micro-batches of a data-parallel rank as (inputs, labels): a contiguous share of the global batch, cut into micro-batches."""
    share = tokens(job, step).chunk(data_ranks)[data_rank]
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in share.split(job["microbatch"])]


def average(value, group=None):
    """The mean over the ranks of a group of a number that each computed on its share of the batch."""
    if not dist.is_initialized():
        return float(value)
    total = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total) / dist.get_world_size(group)


def count_forwards(module):
    """A list that gets the batch size of every forward pass of a module."""
    rows = []

    def note(_module, args, kwargs):
        first = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        if torch.is_grad_enabled():  # a pipeline infers shapes without gradients
            rows.append(first.shape[0])

    module.register_forward_pre_hook(note, with_kwargs=True)
    return rows


def llama(job):
    """Transformers' Llama (or Mixtral, for a model with experts) with the sizes of the plan, the same weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=job["vocab"], hidden_size=job["hidden"], intermediate_size=job["ffn"], num_hidden_layers=job["layers"],
        num_attention_heads=job["heads"], num_key_value_heads=job["kv_heads"], max_position_embeddings=job["seq"],
        tie_word_embeddings=job["tied"], use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def next_token_loss(logits, labels):
    """Cross entropy of the next tokens, averaged over the micro-batch."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def elements_of_states(optimizer):
    """Elements of Adam's first moment that this rank holds."""
    from torch.distributed.tensor import DTensor

    moments = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
    return sum((m.to_local() if isinstance(m, DTensor) else m).numel() for m in moments)


def elements_of_parameters(module):
    """Elements of parameters that this rank holds: the local part of a DTensor."""
    from torch.distributed.tensor import DTensor

    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters())
