"""What a real rank is made of: the model's loader and the scheduler's core."""

from __future__ import annotations

import faulthandler
import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from engine.actors.capacity import CostTable
from engine.actors.core import Core
from engine.actors.device import Device, DeviceThread, StepRunner
from engine.actors.grammar_keys import GrammarLimits
from engine.actors.intake import RankSetup
from engine.actors.links import Ref
from engine.actors.mailbox import Mailbox
from engine.actors.no_matchers import NoMatchers
from engine.actors.rank import Rank
from engine.actors.schedule import Graphs
from engine.actors.speculation import Speculation
from engine.actors.timers import Timers
from engine.allocator import fill_tuples
from engine.config import Settings
from engine.errors import ConfigError
from engine.memory.pages import ASIDE
from engine.messages import StepDone

if TYPE_CHECKING:
    from engine.grammar.pipeline_loader import Matchers
    from engine.model.groups import Groups
    from engine.runner.graphs import Graphs as Recorded


LOADERS = 2
"""Threads that load grammars; one that is slow doesn't hold up all others."""

LOADER_S = 1.0
"""What the end of a rank waits for threads that load grammars; less than lifecycle_release.PART_S."""


def speculation_of(settings: Settings, block: int, costs: CostTable | None) -> Speculation | None:
    """How the rank speculates with what was loaded; None where it doesn't.

    block   drafted tokens of a round; 0: no draft was loaded
    costs   of its steps
    raises  ConfigError where the settings ask for drafts that nobody makes
    """
    if not settings.speculative_algorithm:
        return None
    if not block:
        raise ConfigError(f"--speculative {settings.speculative_algorithm}, but no draft was loaded")
    return Speculation(block, settings.speculative_verify_mode, costs)


class ModelParts:
    """Parts of `engine.rank_process` for a rank that runs a model."""

    _rank = 0
    _meeting = ""
    _groups: Groups | None = None
    _device = "cpu"
    _matchers: Matchers | None = None
    _graphs: Recorded | None = None

    def place(self, rank: int, meeting: str) -> None:
        """As Parts.place."""
        self._rank, self._meeting = rank, meeting

    def load(self, settings: Settings, say: Callable[[str], None]) -> StepRunner:
        """Weights, cache, warm-up. Imports torch, a second for which the link's greeting must not wait."""
        import torch

        from engine.kernel_sets import kernel_set
        from engine.loading import load_rank
        from engine.model.groups import ONE, Group, Groups
        from engine.runner.collectives import open_groups
        from engine.runner.near import bytes_of_steps, open_near

        ranks, device = settings.dp_size, torch.device(settings.device)
        self._device = settings.device
        if not self._meeting:
            # Ranks whose models share nothing agree on steps, and need no collective.
            return load_rank(settings, say, Groups(Group(self._rank, ranks, None, None), ONE))
        meet_at = f"file://{self._meeting}/groups"
        self._groups = open_groups(self._rank, ranks, settings.ep_size, device, meet_at, settings.watchdog_s)
        if kernel_set(settings) == "triton":
            self._groups = open_near(self._groups, device, bytes_of_steps(settings), settings.watchdog_s, say)
        return load_rank(settings, say, self._groups)

    def device(
        self, load: Callable[[], StepRunner], deliver: Callable[[StepDone], None], timers: Timers
    ) -> Device:
        """A thread of its own."""
        return DeviceThread(load, deliver)

    def matchers(self, settings: Settings, runner: StepRunner, mailbox: Mailbox, timers: Timers) -> Ref:
        """Threads that load grammars."""
        from engine.grammar.pipeline_loader import Matchers
        from engine.loaded import Loaded

        if not isinstance(runner, Loaded) or runner.grammars is None:
            return NoMatchers(mailbox.tell_first)
        limits = GrammarLimits(
            workers=LOADERS,
            queued=settings.max_running_requests + settings.max_queued_requests,
            cache_bytes=settings.grammar_cache_bytes,
            cache_entries=settings.grammar_cache_entries,
            timeout_s=settings.grammar_timeout_s,
        )
        self._matchers = Matchers(runner.grammars, limits, mailbox.tell_first, timers)
        return self._matchers

    def wall_s(self) -> float:
        """The host's wall clock."""
        return time.time()

    def settle(self) -> None:
        """What start-up made lives as long as the process; no collection needs to walk it again."""
        gc.collect()
        gc.freeze()
        fill_tuples()

    def dump(self) -> None:
        """To standard error."""
        faulthandler.dump_traceback(all_threads=True)

    def core(self, settings: Settings, rank: int, runner: StepRunner) -> Core:
        """The scheduler for what was loaded."""
        from engine.loaded import Loaded

        if not isinstance(runner, Loaded):
            raise ConfigError(f"a rank can't be set up from a {type(runner).__name__}")
        sizes = runner.sizes
        setup = RankSetup(
            rank=rank,
            ranks=settings.dp_size,
            slots=sizes.slots - 1 - ASIDE,
            queued=settings.max_queued_requests,
            chunk_tokens=settings.chunked_prefill_size,
            context_tokens=sizes.context_length,
            window_tokens=runner.config.sliding_window,
            full_pages=sizes.full_pages - ASIDE,
            window_pages=sizes.window_pages - ASIDE,
            eos_ids=runner.eos_ids,
            watchdog_ms=int(settings.watchdog_s * 1000),
            graphs=Graphs() if runner.graphs is None else Graphs(decode=runner.graphs.tokens),
            speculation=speculation_of(settings, runner.block, runner.costs),
        )
        self._graphs = runner.graphs
        return Rank(setup, runner.figures)

    async def release(self, part: str) -> None:
        """On a thread: a device's library may take its time.

        First go the threads that fill what a step reads. One that loads a grammar can't be stopped: after a
        moment the end goes on without it.
        """
        if part == "graphs" and self._matchers is not None:
            matchers, self._matchers = self._matchers, None
            with anyio.move_on_after(LOADER_S):
                await anyio.to_thread.run_sync(matchers.close, abandon_on_cancel=True)
        if self._device == "cpu" and self._groups is None:
            return  # Host memory goes with the process, sooner than a collection takes.
        await anyio.to_thread.run_sync(self._release, part, abandon_on_cancel=True)

    def _release(self, part: str) -> None:
        if part == "graphs" and self._graphs is not None:
            # They name caches, and the groups whose collectives they captured.
            self._graphs.close()
            self._graphs = None
        elif part == "caches" and self._device == "cuda":
            # Nothing refers to the runner any more, but objects of a model may refer to each other.
            import torch

            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()
        elif part == "groups" and self._groups is not None:
            from engine.runner.collectives import close_groups

            close_groups(self._groups)
