"""Parameters of the training model under the names of DeepSeek's checkpoints, and back."""

import re

import torch
from torch import Tensor

from training.model import Model

_STACK = re.compile(r"(layers\.\d+\.ffn)\.(w[123])$")
_SHARED = re.compile(r"(layers\.\d+\.ffn)\.shared_(w[123])$")
_MIX = re.compile(r"(layers\.\d+)\.(hc_attn|hc_ffn)\.(fn|base|scale)$")
_HEAD = {
    "head.fn": "hc_head_fn",
    "head.base": "hc_head_base",
    "head.scale": "hc_head_scale",
    "head.norm.weight": "norm.weight",
}


def checkpoint_name(name: str) -> str:
    """DeepSeek's name of a tensor; a stack of experts gets `{}` where the expert's number goes."""
    if match := _STACK.match(name):
        return f"{match[1]}.experts.{{}}.{match[2]}.weight"
    if match := _SHARED.match(name):
        return f"{match[1]}.shared_experts.{match[2]}.weight"
    if match := _MIX.match(name):
        return f"{match[1]}.{match[2]}_{match[3]}"
    return _HEAD.get(name, name)


def to_checkpoint(model: Model) -> dict[str, Tensor]:
    """Every parameter, bias and hash table under DeepSeek's names; experts one by one; tensors are views."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        target = checkpoint_name(name)
        if "{}" in target:
            tensors.update({target.format(i): expert for i, expert in enumerate(tensor)})
        else:
            tensors[target] = tensor
    return tensors


def from_checkpoint(model: Model, tensors: dict[str, Tensor]) -> None:
    """Copies named tensors into the model.

    raises  KeyError for a missing name, ValueError where names are left over
    """
    used: set[str] = set()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            target = checkpoint_name(name)
            if "{}" in target:
                names = [target.format(i) for i in range(tensor.shape[0])]
                tensor.copy_(torch.stack([tensors[n] for n in names]))
            else:
                names = [target]
                tensor.copy_(tensors[target])
            used.update(names)
    if left := sorted(set(tensors) - used):
        raise ValueError(f"{len(left)} tensors are not of this model, {left[0]} among them")
