"""Where a run starts: weights drawn from the seed, or those of a Transformers folder (`run.start_from`, `train --from`).

Everything that can be wrong with a folder is found before any rank starts: no tensor is read, only config.json, the headers of
the safetensors files and the tokenizer. The model of the run may differ from the one in config.json only in what training is free
to choose (dropout, losses of the router, padding of the vocabulary).
"""

import json
import shutil
from pathlib import Path

from meshwright.describe import hf
from meshwright.describe.adapter import Adapter
from meshwright.describe.config import Config
from meshwright.describe.files import read_text
from meshwright.describe.run_folder import ORIGINAL
from meshwright.describe.sharding import parameters
from meshwright.errors import MeshwrightError, cannot_write, shown
from meshwright.models.hf.folder import COMPANIONS, CONFIG
from meshwright.models.hf.peft import PeftFolder, PeftWeights
from meshwright.models.hf.weights import FolderWeights, fingerprint
from meshwright.models.initialise import DrawnWeights, Weights, WithDrawnAdapters
from meshwright.training.checkpoint.folder import CHECKPOINTS, complete
from meshwright.units import Json

TOKENIZER, TOKENIZER_LIMIT = "tokenizer.json", 500_000_000


def check_start(config: Config, run_folder: Path | None = None) -> None:
    """Raise if the folder that a run starts from does not have the weights of its model, or has a tokenizer that is too large."""
    folder = config.run.start_from
    check_adapter(config)
    if not folder or (has_checkpoint(run_folder) and not config.adapter.on):
        return
    found = hf.read(folder)
    if missing := [entry for entry in found.not_run if entry not in config.model.not_run]:
        raise MeshwrightError(
            "MW-HF-020",
            f"'{folder}' has parts that `train` computes in another way: {'; '.join(missing)}",
            why="Its weights would belong to another function",
        )
    if different := hf.different_fields(config.model, found):
        fields = [f"{name} = {shown(ours)} instead of {shown(theirs)}" for name, (ours, theirs) in different.items()]
        raise MeshwrightError(
            "MW-HF-021",
            f"the model of the run is not the one in '{folder}': {', '.join(fields[:4])}",
            why="Its weights would not fit",
            fix=f"--set model={folder}",
        )
    FolderWeights(folder, config.model).check()
    check_tokenizer(Path(folder), config.model.vocab)


def check_tokenizer(folder: Path, vocabulary: int) -> None:
    """Raise if the tokenizer of a folder has a token that its model does not have."""
    path = folder / TOKENIZER
    if not path.is_file():
        return
    try:
        largest = largest_token(json.loads(read_text(path, TOKENIZER_LIMIT)))
    except (json.JSONDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        raise MeshwrightError("MW-DATA-013", f"'{path}' is not a tokenizer file", fix="download it again") from None
    if largest >= vocabulary:
        raise MeshwrightError(
            "MW-HF-022",
            f"the tokenizer in '{folder}' has the token {largest:,}, and the model has {vocabulary:,} tokens",
            why="Tokens are counted from 0: the embedding has no row for it",
            fix="add rows to the embedding in Transformers (resize_token_embeddings), or use the tokenizer of this model",
        )


def largest_token(tokenizer: Json) -> int:
    """The largest token of a parsed tokenizer.json. A vocabulary is a table of numbers, or a list (Unigram)."""
    vocabulary = tokenizer["model"].get("vocab", {})
    tokens = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = [token["id"] for token in tokenizer.get("added_tokens", [])]
    return max((*tokens, *added), default=-1)


def initial_weights(config: Config, seed: int = 0) -> Weights | None:
    """The weights that a run starts from; None: they are drawn from its seed."""
    folder, model = config.run.start_from, config.model
    if not folder:
        return None
    base = FolderWeights(folder, model)
    if model.adapter.start_from:
        return PeftWeights(model.adapter.start_from, model, base.family, base)
    return WithDrawnAdapters(base, DrawnWeights(model, seed)) if model.adapter.rank else base


def check_adapter(config: Config) -> None:
    """Raise if a run cannot start from the PEFT folder that it names, or would quantise a base that is quantised already."""
    folder, adapter = config.run.start_from, config.adapter
    if adapter.start_from and not folder:
        raise MeshwrightError(
            "MW-ADPT-010",
            f"adapter.start_from = '{adapter.start_from}' without run.start_from",
            why="An adapter belongs to the weights that it was trained on, and these would be drawn",
            fix="--from FOLDER, the Transformers folder of its base",
        )
    if not folder or (adapter.base == "plain" and not adapter.start_from):
        return  # a resume without adapters needs the folder no more
    base = FolderWeights(folder, config.model)
    quantised = base.folder.config.get("quantization_config")
    if adapter.base != "plain" and isinstance(quantised, dict):
        raise MeshwrightError(
            "MW-ADPT-013",
            f"adapter.base={adapter.base}, and the weights in '{folder}' are quantised already ({quantised.get('quant_method')})",
            why="They would be rounded twice",
            fix="--set adapter.base=plain, or a folder with the original weights",
        )
    if adapter.start_from:
        found = PeftFolder(adapter.start_from).adapter(config.model, base.family)
        changed = {n: getattr(found, n) for n in SAME_ADAPTER if getattr(found, n) != getattr(adapter, n)}
        if set(resolved(adapter, config)) != set(resolved(found, config)) or "rank" in changed:
            words = [
                f"--set adapter.{n}={shown_value(getattr(found, n))}"
                for n in SAME_ADAPTER
                if getattr(found, n) != getattr(Adapter(), n)
            ]
            raise MeshwrightError(
                "MW-ADPT-011",
                f"the adapter in '{adapter.start_from}' has other ranks or targets than [adapter]",
                why=f"It has rank {found.rank} on {', '.join(found.targets)}",
                fix=" ".join(words),
            )
        PeftWeights(adapter.start_from, config.model, base.family, base).check()


SAME_ADAPTER = ("rank", "expert_rank", "alpha", "scaling", "targets", "trains")


def resolved(adapter: Adapter, config: Config) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of all adapters of a model."""
    model = config.model.but(adapter=adapter)
    return [(p.name, p.shape) for p in parameters(model, range(model.layers)) if p.is_adapter]


def shown_value(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)


def base_of(config: Config, seed: int) -> Json:
    """What identifies the frozen weights that a checkpoint of adapters belongs to: their folder and a hash of its files' headers, or the seed."""
    if not config.adapter.on:
        return {}
    if not config.run.start_from:
        return {"seed": seed}
    folder = Path(config.run.start_from)
    return {"folder": str(folder.resolve()), "fingerprint": fingerprint(folder)}


def has_checkpoint(run_folder: Path | None) -> bool:
    """Whether a run has got further than its start: it then needs the folder that it started from no more."""
    return run_folder is not None and bool(complete(run_folder / CHECKPOINTS))


def copy_companions(config: Config, run_folder: Path) -> None:
    """Copy config and tokenizer into the run folder: its export then needs nothing else."""
    if not config.run.start_from:
        return
    source, out = Path(config.run.start_from), run_folder / ORIGINAL
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, *COMPANIONS):
            if (source / name).is_file():
                shutil.copyfile(source / name, out / name)
    except OSError as error:
        raise cannot_write(out, error) from error
