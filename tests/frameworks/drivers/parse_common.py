"""What every driver does: read cases as JSON, parse each with the framework, print what it parsed or why it refused as JSON."""

import contextlib
import importlib.machinery
import io
import json
import sys
import traceback
from unittest.mock import MagicMock


def stub(*names):
    """Put an empty module in the place of a package of GPU kernels, which parsing does not call; torch goes on without it."""
    import torch._inductor.compile_fx
    import torch.utils._triton

    torch.utils._triton.has_triton_package()  # its answer is cached
    for name in names:
        module = MagicMock(name=name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__, module.__version__ = [], "3.6.0"
        sys.modules[name] = module


@contextlib.contextmanager
def world(ranks):
    """A process group of so many ranks whose messages go nowhere: a framework builds its own groups and meshes in it, as rank 0."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trainer_answer(arguments, world, recomputes):
    """The plan in the arguments of Transformers' Trainer; FSDP is what its plug-in of accelerate has. `recomputes`: without FSDP."""
    plugin = arguments.fsdp_plugin_args
    assert not plugin or (plugin["fsdp_version"], plugin["auto_wrap_policy"]) == (2, "TRANSFORMER_BASED_WRAP")
    assert not (plugin and recomputes)  # its own checkpointing gathers the weights once more
    recomputes = arguments.fsdp_config.get("activation_checkpointing", False) if plugin else recomputes
    micro, steps = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    reshard = {"reshard": plugin["reshard_after_forward"]} if plugin else {}
    return {
        "recompute": "full" if recomputes else "none", "dp": world, "zero": 3 if plugin else 0, **reshard,
        "microbatch": micro, "accumulation": steps, "batch": micro * steps * world,
        "dtype": "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32",
    }  # fmt: skip


def main(parse):
    """Run `parse` on every case of standard input."""
    cases = json.load(sys.stdin)
    answers = {}
    for name, case in cases.items():
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                answers[name] = parse(case)
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            words = said.getvalue()[-600:] if isinstance(error, SystemExit) else ""
            answers[name] = {
                "refused": f"{type(error).__name__}: {str(error)[:600]} {words} ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})"
            }
    print("ANSWER " + json.dumps(answers))
