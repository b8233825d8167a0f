"""DeepSpeed's settings of a launch script: the JSON file that its `--deepspeed_config` names.

    cat <<EOT > $config_json                   {"zero_optimization.stage": 1, "bf16.enabled": true, …}, beside the script's flags
    {"zero_optimization": {"stage": 1}, …}

Most scripts write the file themselves; otherwise it may lie beside the script. DeepSpeed's engine takes the ZeRO stage and the precision from the
file. Megatron-DeepSpeed takes batches from its flags (`set_train_batch_size` in its training.py), so those of the file count without flags only.
"""

import json
import os
import re
from pathlib import Path

from meshwright.describe.files import read_text
from meshwright.errors import MeshwrightError
from meshwright.interop.keys import Settings, flags, flattened, is_open, plain
from meshwright.interop.shell.open_values import CLOSE, OPEN, as_written
from meshwright.interop.shell.scripts import Script, file_beside

NAMES = ("--deepspeed_config", "--deepspeed-config")
BATCHES = {"train_batch_size": "--global-batch-size", "train_micro_batch_size_per_gpu": "--micro-batch-size"}
OPEN_NUMBER = re.compile(rf"([:\[,]\s*){OPEN}([^{CLOSE}]*){CLOSE}(?=\s*[,\]}}])")


def deepspeed_settings(script: Script, folder: Path | None) -> Settings:
    """The settings in the file that `--deepspeed_config` names, which then replace this flag of the script; {} where the file is not known, which
    `script.left_open` then says. `folder`: that of the script; None: no file is read."""
    given = flags(script.args)
    flag = next((each for each in NAMES if isinstance(given.get(each), str)), "")
    name = given.get(flag, "")
    try:
        found = json_file(name, script, folder) if name else None
    except (MeshwrightError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        if not name or is_open(name):  # such a value is named as left open without this
            return {}
        script.left_open.append(f"--deepspeed_config = {name[:60]}, whose JSON is not in the script, nor beside it")
        return {}
    script.args = [word for word in script.args if word not in (flag, name, f"{flag}={name}")]
    settings = flattened(found)
    for key, batch in BATCHES.items():
        if key in settings and batch in given:
            value = settings.pop(key)
            if not is_open(value) and not is_open(given[batch]) and plain(value) != plain(given[batch]):
                script.assumed.append(f"{batch} = {given[batch]}, not the {key} = {value} of {name}")
    if all(batch in given for batch in BATCHES.values()):
        settings.pop("gradient_accumulation_steps", None)
    return settings


def json_file(name: str, script: Script, folder: Path | None) -> object:
    """The content of a JSON file that a script writes, or that lies beside it; an open value is a text such as "$STAGE"."""
    written = script.files.get(os.path.normpath(name))
    if written is not None:
        text = OPEN_NUMBER.sub(lambda found: found[1] + json.dumps(found[2]), written)
        return json.loads(as_written(text))
    place = file_beside(folder, name) or (None if Path(name).is_absolute() else file_beside(folder, Path(name).name))
    return None if place is None else json.loads(read_text(place))
