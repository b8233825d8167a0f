"""Names of modules and parameters, as they would be on one device without wrappers."""

import gc
import re
from typing import Any

from torch import nn

WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


class Names:
    """The modules and parameters of the models of a process. A script may call parts of a model; they are named by the whole."""

    def __init__(self) -> None:
        self.modules: dict[int, str] = {}
        self.parameters: set[str] = set()

    def of(self, module: nn.Module) -> str | None:
        return self.modules.get(id(module))

    def learn(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Learn the names of the model that a module belongs to; the parameters that are new."""
        if id(module) in self.modules:
            return {}
        model = topmost(module)
        wrapped = {name for name, part in model.named_modules() if is_wrapper(part)}
        shifts = layer_shifts(model)
        for name, part in model.named_modules():
            self.modules[id(part)] = plain_name(name, wrapped, shifts)
        new: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            plain = plain_name(name, wrapped, shifts)
            if plain not in self.parameters and plain not in new:
                new[plain] = parameter
        self.parameters |= new.keys()
        return new


def is_wrapper(module: nn.Module) -> bool:
    """A module that only holds another, called `module`: DDP, an engine, a wrapper for 16 bits."""
    return list(module._modules) == ["module"] and not module._parameters


def plain_name(name: str, wrapped: set[str], shifts: dict[str, int]) -> str:
    """A name without the wrappers on its way, and with the number that a layer has in the whole model."""
    parts, at = [], ""
    for part in name.split(".") if name else []:
        outer, at = at, f"{at}.{part}".lstrip(".")
        if part in WRAPPERS or (part == "module" and outer in wrapped):
            continue
        parts.append(str(int(part) + shifts[outer]) if part.isdigit() and outer in shifts else part)
    return ".".join(parts)


def layer_shifts(model: nn.Module) -> dict[str, int]:
    """By list of layers or experts: what is added to their numbers on this rank. Megatron's layers know their number, from 1, and its layers
    of experts know which these are."""
    shifts = {}
    for name, part in model.named_modules():
        experts = getattr(part, "local_expert_indices", None)
        if isinstance(experts, list) and experts:
            shifts[f"{name}.experts.local_experts"] = experts[0]
        number = getattr(part, "layer_number", None)
        if isinstance(number, int) and (match := re.fullmatch(r"(.*)\.(\d+)", name)):
            shifts[match[1]] = number - 1 - int(match[2])
    return shifts


def topmost(module: nn.Module) -> nn.Module:
    """The outermost module that contains this one."""
    parents: dict[int, nn.Module] = {}
    for other in gc.get_objects():
        if issubclass(type(other), nn.Module):  # `isinstance` would wake lazy objects of other libraries
            for child in other._modules.values():
                if child is not None:
                    parents.setdefault(id(child), other)
    seen = {id(module)}
    while (parent := parents.get(id(module))) is not None and id(parent) not in seen:
        seen.add(id(parent))
        module = parent
    return module


QUERY_HEADS = ("num_attention_heads", "n_heads", "n_head", "heads")
KEY_HEADS = ("num_key_value_heads", "num_query_groups", "n_kv_heads", "num_kv_heads", "kv_heads")


def model_settings(module: nn.Module) -> dict[str, Any]:
    """Heads of queries, and of keys and values, and the family of Transformers, as far as the settings of a model say them."""
    for part in topmost(module).modules():
        for settings in (getattr(part, name, None) for name in ("config", "model_args", "args", "model")):
            queries, keys = (
                next((n for name in names if isinstance(n := getattr(settings, name, None), int)), 0)
                for names in (QUERY_HEADS, KEY_HEADS)
            )
            if queries:
                return {"heads": (queries, keys or queries), "model_type": str(getattr(settings, "model_type", ""))}
    return {}
