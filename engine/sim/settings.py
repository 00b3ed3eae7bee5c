"""A scenario's bounds as the settings, the wiring and the served model of a server."""

from __future__ import annotations

import dataclasses
from functools import cache

from api.checks import Bounds as ApiBounds
from api.served import Served
from engine.actors.wiring import Wiring, wiring
from engine.config import NANO, Settings
from engine.model.encoding import load_encoding
from engine.model.tokenizer import load_tokenizer
from engine.sim.scenario import Scenario


def settings_of(plan: Scenario) -> Settings:
    """The settings of a server with these bounds."""
    bounds = plan.bounds
    return Settings(
        model_path=str(NANO),
        dp_size=bounds.ranks,
        max_running_requests=bounds.slots,
        max_queued_requests=bounds.queued,
        chunked_prefill_size=bounds.chunk_tokens,
        context_length=bounds.context_tokens,
        watchdog_s=bounds.watchdog_ms / 1000,
        snapshot_s=bounds.snapshot_s,
        drain_s=bounds.drain_s,
        stream_buffer=bounds.stream_buffer,
    )


def wiring_of(plan: Scenario) -> Wiring:
    """specs/system.toml with the mailbox sizes of the scenario."""
    base = wiring()
    sizes = plan.bounds.mailbox
    if not sizes:
        return base
    actors = {
        name: dataclasses.replace(actor, mailbox=sizes.get(name, actor.mailbox))
        for name, actor in base.system.actors.items()
    }
    return Wiring(dataclasses.replace(base.system, actors=actors), base.digest)


@cache
def served_of(context: int) -> Served:
    """The shipped tokenizer and chat format."""
    tokenizer = load_tokenizer(NANO)
    bounds = ApiBounds(
        vocab_size=tokenizer.vocab_size,
        context_length=context,
        max_n=16,
        max_group=64,
        max_top_logprobs=5,
        temperature=1.0,
        top_p=1.0,
    )
    return Served("sim", tokenizer, load_encoding(NANO), bounds, 0, frozenset({"overlap"}))
