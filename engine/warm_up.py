"""Real steps before the first request: they pack weights, choose the threads, and find what is NaN."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.config import PAGE_TOKENS, Settings
from engine.errors import CheckpointError
from engine.memory.pages import pages_for
from engine.messages import RunStep, Sampling, SlotBind, StepDone
from engine.model.config import C4
from engine.runner.step import StepRunner
from engine.threads import choose_threads

WARM_TOKENS = 16
WARM_STEPS = 4


def warm_up(runner: StepRunner, settings: Settings, say: Callable[[str], None]) -> None:
    """Runs steps in slot 1, and leaves the slot to be bound anew.

    Every rank runs the same steps at once, so that their collectives meet.

    raises  CheckpointError where target or draft give NaN
    """
    steps = _WarmSteps(runner)
    if settings.device == "cpu":
        choose_threads(settings.threads, torch.set_num_threads, steps.plain, say, settings.dp_size)
    else:
        steps.plain()
        context = settings.context_length or runner.state.config.max_position_embeddings
        # None is larger than what is admitted, a chunk and rows that decode beside it: those were measured,
        # and the cache has the rest.
        steps.prompts(min(settings.chunked_prefill_size + runner.state.slots - 1, context))
        steps.logits(runner.state.slots - 1)
        runner.model.ops.warm(context // C4, runner.state.config.index_topk)
    block = 0 if runner.speculation is None else runner.speculation.block
    if block:
        steps.draft(block)
    runner.choices.warm(1, block)


class _WarmSteps:
    """Steps of one request in slot 1, whose draws are seeded."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self._epoch = 0

    def plain(self) -> None:
        """A prompt, then a few tokens."""
        self._step(0, WARM_TOKENS, 0)
        for position in range(WARM_TOKENS, WARM_TOKENS + WARM_STEPS):
            self._step(position, 1, 0)

    def prompts(self, most: int) -> None:
        """Steps of up to `most` tokens of every size for which kernels are compiled apart.

        A compiler would take seconds of somebody's step.
        """
        room = PAGE_TOKENS * min(self.runner.state.full_pages, self.runner.state.window_pages) - PAGE_TOKENS
        longest = self.runner.state.config.max_position_embeddings
        for count in chunk_sizes(min(most, room, longest)):
            self._step(0, count, 0)

    def logits(self, most: int) -> None:
        """Of up to `most` rows, likewise: those of a prompt's step are as many as prompts end in it."""
        model = self.runner.model
        streams = model.streams(torch.zeros(most, dtype=torch.int64, device=model.device))
        for count in chunk_sizes(most):
            model.logits(streams[:count], count)

    def draft(self, block: int) -> None:
        """A prompt, then rounds of drafts, verified in full."""
        self._step(0, WARM_TOKENS, 0)
        for step in range(WARM_STEPS):
            bound = WARM_TOKENS + step * (block + 1)
            done = self._step(bound, 1, block + 1)
            survival = np.frombuffer(done.survival, np.float32)
            # A draft with NaN counts as one that can't survive, and a real one never comes down to 0.
            if survival.size != block or not (survival > 0).all():
                raise CheckpointError(f"the draft gives NaN: its tokens survive with {survival.tolist()}")

    def _step(self, start: int, count: int, verify: int) -> StepDone:
        self._epoch -= 1
        rows = verify or count
        ends_at = self.runner.state.config.max_position_embeddings
        done = self.runner.execute(
            RunStep(
                epoch=self._epoch,
                mode="decode" if start else "extend",
                slots=_column(1),
                generations=_column(0),
                starts=_column(start),
                counts=_column(count),
                tokens=(np.arange(count) % self.runner.model.config.vocab_size).astype(np.int32).tobytes(),
                samples=b"\1",
                ranks=((1 if verify else -1, rows, rows if verify else 1),)
                * self.runner.model.groups.dp.size,
                pages=b"" if start else _pages(pages_for(count)),
                binds=() if start else (SlotBind(1, 0, 0, 0, _SAMPLING, count, b"", ends_at),),
                verify=bytes([verify]) if verify else b"",
                budget=-1 if verify else 0,
            )
        )
        if done.failed:
            raise CheckpointError(f"a step of the warm-up failed: {done.failed[0][1]}")
        return done


def chunk_sizes(most: int) -> list[int]:
    """Numbers of rows up to `most`: cuts change behind powers of two, and code with multiples of 16."""
    powers = [1 << k for k in range(1, most.bit_length())]
    apart = [size - 3 for size in (*powers, most) if size > 4]
    return sorted({*powers, *apart, most})


def _pages(count: int) -> bytes:
    """Of slot 1 the first pages, by number from 1 on."""
    return _column(*(number for page in range(count) for number in (1, page, page + 1, page + 1)))


# Draws, so that a drafting step keeps its logits and looks at them.
_SAMPLING = Sampling(max_new_tokens=1, temperature=1.0)


def _column(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()
