"""The words that start Megatron-LM's `pretrain_gpt.py`: the flags of the plan and the model, of the optimizer and of the checkpoints.

The data are mock data until they are replaced, so that the file can be started as it is and its step compared with the prediction.
"""

from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.frameworks.megatron_model import SCRIPT
from meshwright.interop.write import flag_words, settings_of
from meshwright.view.launch_files.program import TrainingProgram

NOTES = (
    "Start it in a checkout of Megatron-LM, which has pretrain_gpt.py.",
    "It trains on mock data: replace --mock-data and --tokenizer-type by --data-path and your tokenizer.",
)
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": ("1", "kernels start in the order of their launches, as overlap needs")}
DECAY = {"constant": "constant", "cosine": "cosine", "linear": "linear", "wsd": "WSD"}


def program(config: Config, plan: str, folder: str, save_every: int) -> TrainingProgram:
    """Megatron-LM loads the last checkpoint of `--load` if there is one, so the same words begin and continue a run."""
    framework = FRAMEWORKS["megatron-lm"]
    settings = settings_of(config, framework).settings
    words = [word for name, value in settings.items() for word in flag_words(framework, name, value)]
    begin = (
        SCRIPT,
        *words,
        *training_words(config),
        *("--mock-data", "--tokenizer-type", "NullTokenizer"),
        *("--save", f"{folder}/checkpoints", "--load", f"{folder}/checkpoints", "--save-interval", str(save_every)),
        *("--log-interval", "1", "--log-throughput"),
    )
    return TrainingProgram(
        framework.name, begin, notes=NOTES, install="megatron-core", variables=variables(config.plan)
    )


def variables(plan: Plan) -> dict[str, tuple[str, str]]:
    """Environment of a plan: Megatron-FSDP (ZeRO-2 and 3) refuses the single queue that the other plans need."""
    return {} if plan.zero > 1 else ONE_QUEUE


def training_words(config: Config) -> list[str]:
    """Steps, learning rate, weight decay and clipping of the run file."""
    optimizer, run = config.optimizer, config.run
    rate = optimizer.learning_rate
    words = ["--train-iters", str(run.steps), "--lr", f"{rate:g}", "--lr-decay-style", DECAY[optimizer.schedule]]
    words += ["--lr-warmup-iters", str(min(optimizer.warmup, run.steps - 1)), "--seed", str(run.seed or 1234)]
    if optimizer.schedule != "constant":
        words += ["--min-lr", f"{rate * optimizer.min_learning_rate:g}"]
    if optimizer.schedule == "wsd":
        words += ["--lr-wsd-decay-iters", str(optimizer.decay_steps or max(1, run.steps // 10))]
    words += ["--adam-beta1", f"{optimizer.betas[0]:g}", "--adam-beta2", f"{optimizer.betas[1]:g}"]
    words += ["--weight-decay", f"{optimizer.weight_decay:g}"]
    return [*words, "--clip-grad", f"{optimizer.clip if config.workload.clip else 0:g}"]
