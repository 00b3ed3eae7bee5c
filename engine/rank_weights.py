"""Where a rank's weights come from: a checkpoint, read as it is taken, or dummies of its geometry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from engine.config import Settings
from engine.errors import CheckpointError
from engine.model.checkpoint import open_checkpoint
from engine.model.config import ModelConfig
from engine.model.dummy import DummyWeights
from engine.model.groups import Groups
from engine.model.layout import DEEPSEEK_LAYOUT, FLOAT_LAYOUT
from engine.model.quantised import Stored
from engine.model.share import share_of
from engine.model.tensor_specs import Draft

Say = Callable[[str], None]
"""Prints one line of progress."""

SAID_PARTS = 10


@contextmanager
def rank_weights(
    settings: Settings, config: ModelConfig, groups: Groups, say: Say, *, keeps: bool
) -> Iterator[Mapping[str, Stored]]:
    """A rank's share of the weights by DeepSeek's names, each made or read when it is looked up.

    keeps   they stay in the checkpoint's formats; dummies are then made in FP8 and FP4
    raises  CheckpointError, ConfigError
    """
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    rule = share_of(config, groups, split_head=settings.enable_dp_lm_head).rule
    drafts = bool(settings.speculative_algorithm)
    if settings.load_format == "dummy":
        layout = DEEPSEEK_LAYOUT if keeps else FLOAT_LAYOUT
        if drafts and config.dspark is not None:
            layout = replace(layout, draft=Draft.DSPARK, stages=len(config.dspark.target_layer_ids))
        yield DummyWeights(config, dtype, device, rule=rule, layout=layout)
        return
    checkpoint = open_checkpoint(settings.model_path, draft=drafts)
    with checkpoint.weights(dtype, device, rule, _progress(say), keeps=keeps) as weights:
        yield weights
        if unused := weights.unread:
            raise CheckpointError(f"{unused[0]} is of no use to the model ({len(unused)} such tensors)")


def _progress(say: Say) -> Callable[[int, int, str], None]:
    """A line for each tenth of the tensors."""
    begin = time.perf_counter()

    def progress(done: int, total: int, name: str) -> None:
        if done == total or done * SAID_PARTS // total != (done - 1) * SAID_PARTS // total:
            say(f"loaded {done} of {total} tensors in {time.perf_counter() - begin:.1f} s")

    return progress
