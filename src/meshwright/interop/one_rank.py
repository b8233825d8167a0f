"""One rank of a large run in another framework: the command that starts it, and the time and memory in its log.

    torchtitan     comm.mode = "fake_backend": NGPU is the size of the world, one process runs
    Megatron-LM    --fake-process-group, with WORLD_SIZE and RANK of the target in the environment

Neither replaces the values of collectives, and neither balances experts. Both print a line for each step; the first lines are warm-up.
"""

import shlex
from pathlib import Path

from meshwright.describe.config import Config
from meshwright.describe.files import read_text
from meshwright.errors import MeshwrightError
from meshwright.interop.files import read_settings
from meshwright.interop.logs import steps_in
from meshwright.predict.one_rank import RankMeasurement

LIMIT = 50_000_000
COMMANDS = {
    "torchtitan": "NGPU={world} COMM_MODE=fake_backend CONFIG_FILE={file} ./run_train.sh --training.steps 10 --metrics.log_freq 1",
    "megatron-lm": "WORLD_SIZE={world} RANK=0 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=29500 python pretrain_gpt.py $(cat {file}) "
    "--fake-process-group --train-iters 10 --log-interval 1",
}


def command_of(file: str, world: int) -> str:
    """The command that runs rank 0 of the settings in a file."""
    framework = read_settings(file).framework.name
    if framework not in COMMANDS:
        raise MeshwrightError(
            "MW-MEASURE-004",
            f"{framework} cannot run one rank of a large world",
            why="It has no switch for a fake process group",
            valid=list(COMMANDS),
            fix="measure the plan with our trainer: meshwright migrate, or a plan file",
        )
    return COMMANDS[framework].format(world=world, file=shlex.quote(file))


def measured_in(log: str, config: Config) -> RankMeasurement:
    """The median step after the warm-up, and the peak of memory, in the log of such a run."""
    found = steps_in(read_text(Path(log), LIMIT), config)
    if not found.seconds or not found.reserved_gib:  # on a CPU torchtitan prints 0 GiB
        raise MeshwrightError(
            "MW-MEASURE-005",
            f"'{log}' has no {'memory' if found.seconds else 'steps'} of a training",
            why="Read are lines of torchtitan (tps, memory) and of Megatron-LM (elapsed time per iteration, max allocated)",
            fix="the output of the command that `meshwright measure SETTINGS` prints",
        )
    rounds = config.workload.batch // (config.plan.dp * config.plan.microbatch)
    tiny = 1e-9  # logs do not tell the end of a step apart
    note = "values of collectives and the balance of experts are the framework's" + (
        "" if found.allocated_gib else "; memory is reserved, not allocated"
    )
    return RankMeasurement(
        0, 0, rounds, len(found.seconds), found.median - tiny, tiny, found.spread,
        found.allocated_gib or found.reserved_gib, found.reserved_gib, None, None, (note,),
    )  # fmt: skip
