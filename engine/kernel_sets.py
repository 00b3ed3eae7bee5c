"""Which kernels a model runs on, and chooses its tokens with: those that the settings name, or those of their
device and type.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config import Settings
from engine.errors import ConfigError
from engine.kernels.cpu import CpuOps
from engine.model.invariant import TileOps
from engine.model.ops import TorchOps
from engine.runner.choices import Choices, PlainChoices
from engine.runner.parameters import SlotParameters


def kernel_set(settings: Settings) -> str:
    """Name of the set: native for float32 on the CPU, triton for bfloat16 on a device, else torch."""
    if settings.kernels:
        return settings.kernels
    if (settings.device, settings.dtype) == ("cpu", "float32"):
        return "native"
    if (settings.device, settings.dtype) == ("cuda", "bfloat16"):
        return "triton"
    return "torch"


def operations(settings: Settings) -> TorchOps:
    """The operations of `kernel_set`. Nothing else takes their place.

    Call it where the model is loaded: kernels' flags lie on the current device.

    raises  ConfigError where they can't run on this device or in this type
    """
    name = kernel_set(settings)
    if name == "torch":
        return TileOps() if settings.deterministic else TorchOps()
    if name == "native":
        if (settings.device, settings.dtype) != ("cpu", "float32"):
            raise ConfigError(
                f"--kernels native is for float32 on the CPU, not {settings.dtype} on {settings.device}"
            )
        return CpuOps()
    # Imported where it is used: only these need Triton, which takes a second to come up.
    from engine.kernels.triton_ops import TritonOps, check_device
    from engine.kernels.triton_steady import SteadyOps

    device = torch.device(settings.device)
    check_device(device, getattr(torch, settings.dtype))
    return SteadyOps(device) if settings.deterministic else TritonOps(device)


def choices(
    ops: TorchOps, slots: int, vocab_size: int, eos_ids: Sequence[int], device: torch.device
) -> Choices:
    """What chooses tokens beside these operations: kernels beside Triton's, plain torch beside all others."""
    parameters = SlotParameters(slots, vocab_size, eos_ids, device)
    if ops.name != "triton":
        return PlainChoices(parameters)
    from engine.runner.device_choices import DeviceChoices

    return DeviceChoices(parameters)
