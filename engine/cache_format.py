"""What the caches hold: values of the model's type, or FP8 rows; by the settings and the kernel set."""

from __future__ import annotations

from engine.config import Settings
from engine.errors import ConfigError
from engine.kernel_sets import kernel_set
from engine.model.config import KVFormat, ModelConfig
from engine.model.rounding import check_groups


def cache_format(settings: Settings, config: ModelConfig) -> KVFormat:
    """The format that --kv-cache-dtype asks for.

    By default FP8 on devices whose kernels read it, as the released weights were trained for, else the
    model's type.

    raises  ConfigError where the kernel set doesn't read that format, or the geometry has no FP8 rows
    """
    wanted, name = settings.kv_cache_dtype, kernel_set(settings)
    if wanted == "auto":
        wanted = "fp8" if name == "triton" and settings.device == "cuda" else settings.dtype
    if wanted in ("float32", "bfloat16"):
        if wanted != settings.dtype:
            raise ConfigError(f"--kv-cache-dtype {wanted} is for --dtype {wanted}, not {settings.dtype}")
        return "model"
    if name == "native" or (name == "torch" and settings.deterministic):
        why = "--deterministic by plain torch" if name == "torch" else f"--kernels {name}"
        raise ConfigError(f"--kv-cache-dtype {wanted}: caches of {why} hold values of the model's type")
    check_groups(config)
    return "fp8"
