"""From a checkpoint's `mtp.*` tensors to a drafter; kind and number of stages are what the tensors show."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import CheckpointError, ConfigError
from engine.model.config import ModelConfig
from engine.model.draft import Drafter
from engine.model.draft_dspark import DSparkDrafter
from engine.model.draft_weights import dspark_weights
from engine.model.layout import sniff_layout
from engine.model.model import DeepseekV4
from engine.model.mtp import ClassicDrafter, classic_weights
from engine.model.quantised import Stored
from engine.model.taker import Taker
from engine.model.tensor_specs import Draft


class _Counted(Taker):
    """A Taker that knows what was taken."""

    def __init__(self, weights: Mapping[str, Stored], model: DeepseekV4) -> None:
        super().__init__(weights, model.device, model.dtype, keeps=model.ops.keeps)
        self.taken: set[str] = set()

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        """As Taker.stored."""
        self.taken.add(name)
        return super().stored(name, shape)


def load_drafter(
    config: ModelConfig, weights: Mapping[str, Stored], model: DeepseekV4, *, block: int = 0
) -> Drafter:
    """The drafter of a checkpoint, beside its target.

    weights  of the loader with draft=True, or dummy ones; only `mtp.*` is looked at
    block    tokens of a draft; 0: what the checkpoint was trained for
    raises   ConfigError where draft and target don't fit; CheckpointError for a tensor that is missing,
             misshapen or of no use
    """
    stored = [name for name in weights if name.startswith("mtp.")]
    layout = sniff_layout(config, dict.fromkeys(stored, "F32"))
    if layout.draft is Draft.NONE:
        raise CheckpointError("speculation needs a draft, but the checkpoint has no mtp.* tensor")
    _check_target(config, model)
    taker = _Counted(weights, model)
    if layout.draft is Draft.DSPARK:
        drafter: Drafter = DSparkDrafter(
            config, dspark_weights(config, taker, layout.stages, model.head.head), model, block
        )
    else:
        if layout.stages != 1:
            raise CheckpointError(f"mtp.* holds {layout.stages} classic modules; drafting takes 1")
        drafter = ClassicDrafter(config, classic_weights(config, taker, model.head.head), model, block)
    if unused := sorted(set(stored) - taker.taken):
        raise CheckpointError(f"{unused[0]} is of no use to the draft ({len(unused)} such tensors)")
    return drafter


def _check_target(config: ModelConfig, model: DeepseekV4) -> None:
    """raises ConfigError where the target can't lend what the draft shares with it."""
    rows, hidden = model.head.head.shape
    if rows != config.vocab_size:
        raise ConfigError(
            f"the draft needs the head's {config.vocab_size} rows on every rank, but this one holds {rows}"
        )
    if hidden != config.hidden_size:
        raise ConfigError(f"the draft is {config.hidden_size} wide, but the target is {hidden}")
    if any(config.extra_ratios):
        raise ConfigError(
            f"config.json: compress_ratios gives the draft's stages {list(config.extra_ratios)}, not zeros"
        )
