"""Which part of a checkpoint one rank keeps: its routed experts, perhaps a part of the vocabulary's head."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.groups import Groups
from engine.model.shards import Shard, whole
from engine.model.tensor_specs import TensorSpec

_EXPERT = re.compile(r"\.ffn\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of what is split; everything else is whole on every rank.

    experts     routed experts, of every layer
    vocabulary  rows of the head
    """

    experts: range
    vocabulary: range

    def rule(self, name: str, spec: TensorSpec) -> Shard | None:
        """The loader's rule for this share."""
        if name.startswith("mtp."):
            # Drafting is local: its experts are on every rank.
            return whole(name, spec)
        expert = _EXPERT.search(name)
        if expert is not None and int(expert[1]) not in self.experts:
            return None
        if name == "head.weight":
            return Shard(0, self.vocabulary.start, self.vocabulary.stop)
        return whole(name, spec)


def share_of(config: ModelConfig, groups: Groups, *, split_head: bool) -> Share:
    """The share of the rank that has these groups.

    split_head  the head's rows are split over the data-parallel ranks
    raises      ConfigError where experts or vocabulary don't divide
    """
    experts = _part(config.n_routed_experts, groups.ep.rank, groups.ep.size, "routed experts")
    if not split_head:
        return Share(experts, range(config.vocab_size))
    return Share(
        experts, _part(config.vocab_size, groups.dp.rank, groups.dp.size, "tokens of the vocabulary")
    )


def _part(count: int, rank: int, ranks: int, what: str) -> range:
    if count % ranks:
        raise ConfigError(f"{count} {what} don't divide into {ranks} ranks")
    size = count // ranks
    return range(rank * size, (rank + 1) * size)
