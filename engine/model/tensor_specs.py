"""What is said of one stored tensor, and of a checkpoint as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.quant import FP4_GROUP, FP8_BLOCK

FLOATS = ("BF16", "F32", "F16")


class Role(Enum):
    """What a tensor is to the loader.

    MATRIX  floating point, loaded in the wanted type
    FP32    floating point, loaded as float32 whatever the wanted type
    FP8     codes [O, I] with scales beside them, FP4  packed codes [O, I / 2] with scales beside them
    SCALE   e8m0 scales of the weight of the same name
    TABLE   expert ids by token id, loaded as int32
    """

    MATRIX = "matrix"
    FP32 = "fp32"
    FP8 = "fp8"
    FP4 = "fp4"
    SCALE = "scale"
    TABLE = "table"


class Storage(Enum):
    """How matrices are stored."""

    FLOAT = "float"
    FP8 = "fp8"
    FP4 = "fp4"


class Draft(Enum):
    """What `mtp.*` holds."""

    NONE = "none"
    CLASSIC = "classic"
    DSPARK = "dspark"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor: its shape in the file, the safetensors types it may have, and its role."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    role: Role

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Shape after unpacking; differs from `shape` for FP4."""
        if self.role is Role.FP4:
            return (*self.shape[:-1], 2 * self.shape[-1])
        return self.shape


@dataclass(frozen=True, slots=True)
class Layout:
    """What a checkpoint's content decides: storage of dense and expert matrices; kind and count of drafts."""

    dense: Storage
    experts: Storage
    draft: Draft
    stages: int


def scale_name(weight: str) -> str:
    """Name of the scales of a quantised weight."""
    return weight.removesuffix(".weight") + ".scale"


def fp32(*shape: int) -> TensorSpec:
    """A tensor that is loaded as float32."""
    return TensorSpec(shape, FLOATS, Role.FP32)


def matrix(name: str, storage: Storage, rows: int, columns: int) -> dict[str, TensorSpec]:
    """One matrix [rows, columns], with its scales where it is quantised. raises CheckpointError."""
    if storage is Storage.FLOAT:
        return {name: TensorSpec((rows, columns), FLOATS, Role.MATRIX)}
    if storage is Storage.FP8:
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        weight = TensorSpec((rows, columns), ("F8_E4M3",), Role.FP8)
        return {name: weight, scale_name(name): TensorSpec(blocks, ("F8_E8M0", "U8"), Role.SCALE)}
    if columns % FP4_GROUP:
        raise CheckpointError(f"{name}: {columns} columns don't divide into FP4 groups of {FP4_GROUP}")
    weight = TensorSpec((rows, columns // 2), ("I8", "U8"), Role.FP4)
    scale = TensorSpec((rows, columns // FP4_GROUP), ("F8_E8M0", "U8"), Role.SCALE)
    return {name: weight, scale_name(name): scale}


def head_mixing(config: ModelConfig, at: str) -> dict[str, TensorSpec]:
    """The collapse of streams whose names begin with `at`."""
    streams = config.hc_mult
    return {
        f"{at}hc_head_fn": fp32(streams, streams * config.hidden_size),
        f"{at}hc_head_base": fp32(streams),
        f"{at}hc_head_scale": fp32(1),
    }
