"""Which part of a stored tensor a rank keeps, and where that part lies in payload and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from engine.errors import CheckpointError
from engine.model.quant import FP4_GROUP, FP8_BLOCK
from engine.model.quantised import Stored
from engine.model.tensor_specs import Role, TensorSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that a rank keeps: `start` to `stop` (exclusive) of unpacked dimension `dim`."""

    dim: int
    start: int
    stop: int


ShardRule = Callable[[str, TensorSpec], Shard | None]
"""Which part of a tensor this rank keeps; None where it keeps nothing of it. Scales follow their weight."""


def whole(name: str, spec: TensorSpec) -> Shard | None:
    """The rule of a single rank: keep everything."""
    return Shard(0, 0, spec.logical_shape[0])


def stored_shards(name: str, role: Role, shard: Shard) -> tuple[Shard, Shard]:
    """The parts of payload and scales that hold a logical part.

    raises  CheckpointError where the cut falls inside a scale's block
    """
    unit = {Role.FP8: FP8_BLOCK, Role.FP4: FP4_GROUP if shard.dim == 1 else 1}.get(role, 1)
    packed = 2 if role is Role.FP4 and shard.dim == 1 else 1
    if shard.start % unit:
        raise CheckpointError(f"{name}: a shard from {shard.start} cuts a scale's block of {unit}")
    payload = Shard(shard.dim, shard.start // packed, -(-shard.stop // packed))
    return payload, Shard(shard.dim, shard.start // unit, -(-shard.stop // unit))


class RankWeights(Mapping[str, Stored]):
    """Weights of one rank by DeepSeek's names, scales with their weights; a subclass says what each is."""

    def __init__(self, specs: Mapping[str, TensorSpec], rule: ShardRule) -> None:
        self._specs = specs
        kept = {name: rule(name, spec) for name, spec in specs.items() if spec.role is not Role.SCALE}
        self._shards = {name: shard for name, shard in kept.items() if shard is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def __contains__(self, name: object) -> bool:
        return name in self._shards
