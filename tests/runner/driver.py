"""A host that plans steps by hand: slots, pages and columns, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.config import PAGE_TOKENS
from engine.messages import RunStep, Sampling, SlotBind, StepDone
from engine.runner.step import StepRunner


@dataclass
class Request:
    """One request as the host sees it."""

    slot: int
    generation: int
    prompt: list[int]
    sampling: Sampling
    child: int = 0
    planned: int = 0
    pages: int = 0
    bound: bool = False
    output: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass
class Planned:
    """A step and which requests its row groups are."""

    step: RunStep
    groups: list[Request]


class Driver:
    """Plans steps for a runner and applies their answers."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self.epoch = 0
        self.next_page = 1
        self.generations: dict[int, int] = {}

    def request(self, slot: int, prompt: Sequence[int], sampling: Sampling, child: int = 0) -> Request:
        """A new request in a slot, used before or not."""
        self.generations[slot] = self.generations.get(slot, 0) + 1
        return Request(slot, self.generations[slot], list(prompt), sampling, child)

    def plan(self, parts: Sequence[tuple[Request, int]], *, relay: bool = True) -> Planned:
        """The step that runs so many new tokens of each request; 1 past the prompt decodes.

        relay  decode inputs are -1; else the host's own copy of the last token
        """
        binds, entries, tokens, samples = [], [], [], []
        starts = [request.planned for request, _ in parts]
        for request, count in parts:
            if not request.bound:
                binds.append(self._bind(request))
            end = request.planned + count
            while request.pages * PAGE_TOKENS < end:
                entries.append((request.slot, request.pages, self.next_page, self.next_page))
                request.pages += 1
                self.next_page += 1
            own = request.prompt[request.planned : end]
            if not own:
                own = [-1] if relay else [request.output[-1]]
            tokens += own
            samples.append(int(end >= len(request.prompt)))
            request.planned = end
        self.epoch += 1
        step = RunStep(
            epoch=self.epoch,
            mode="mixed",
            slots=int32(request.slot for request, _ in parts),
            generations=int32(request.generation for request, _ in parts),
            starts=int32(starts),
            counts=int32(count for _, count in parts),
            tokens=int32(tokens),
            samples=bytes(samples),
            pages=np.array(entries, np.int32).tobytes(),
            binds=tuple(binds),
        )
        return Planned(step, [request for request, _ in parts])

    def run(self, planned: Planned) -> StepDone:
        """Execute a planned step and give its tokens to the requests."""
        done = self.runner.execute(planned.step)
        assert done.epoch == planned.step.epoch
        for group, message in done.failed:
            planned.groups[group].errors.append(message)
        tokens = iter(np.frombuffer(done.token_ids, np.int32).tolist())
        for request, count in zip(planned.groups, done.counts, strict=True):
            request.output += [next(tokens) for _ in range(count)]
        assert next(tokens, None) is None
        return done

    def step(self, *parts: tuple[Request, int]) -> StepDone:
        """Plan and run at once."""
        return self.run(self.plan(parts))

    def generate(self, request: Request, tokens: int, chunk: int = 10_000) -> list[int]:
        """Prefill in chunks, then decode alone."""
        while request.planned < len(request.prompt):
            self.step((request, min(chunk, len(request.prompt) - request.planned)))
        while len(request.output) < tokens and not request.errors:
            self.step((request, 1))
        return request.output

    def _bind(self, request: Request) -> SlotBind:
        request.bound = True
        prompt = int32(request.prompt)
        return SlotBind(
            request.slot, request.generation, 7, request.child, request.sampling, len(request.prompt), prompt
        )


def int32(values: object) -> bytes:
    """A column of a message."""
    return np.array(list(values), np.int32).tobytes()  # type: ignore[call-overload]
