"""A host that plans steps with speculation by hand, and knows bounds of lengths, as a scheduler does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import PAGE_TOKENS
from engine.memory.pools import KVState
from engine.messages import RunStep, Sampling, SlotBind, StepDone
from engine.model.model import DeepseekV4
from engine.runner.masking import MaskSource
from engine.runner.speculative import Speculation, VerifyMode
from engine.runner.step import StepRunner
from tests.runner.driver import Driver, Planned, Request, int32
from tests.runner.scripted_drafter import ScriptedDrafter

BLOCK, SLOTS, PAGES = 5, 8, 60
TAPS = (1, 3, 4)
CPU = torch.device("cpu")
GREEDY = Sampling(600, temperature=0.0)


@dataclass
class Stream(Request):
    """A request that may be drafted for.

    total       tokens at its longest, prompt and output
    own_prompt  tokens of its own prompt, where `prompt` holds earlier output too
    """

    total: int = 0
    own_prompt: int = 0

    @property
    def known(self) -> int:
        """Tokens that the host has."""
        return len(self.prompt) + len(self.output)

    @property
    def ended(self) -> bool:
        """Whether the host takes no more of its tokens."""
        return self.known >= self.total or bool(self.errors)


class SpecDriver(Driver):
    """Plans a step at once or ahead: `in_flight` steps may each have added block + 1 tokens."""

    in_flight = 0
    slack = 0
    """What the host's bounds are above what is known."""

    @property
    def width(self) -> int:
        """Most rows of a group."""
        return self._block + 1

    def __init__(self, runner: StepRunner) -> None:
        super().__init__(runner)
        assert runner.speculation is not None
        self._block = runner.speculation.block

    def stream(
        self, slot: int, prompt: Sequence[int], sampling: Sampling, total: int, own_prompt: int = 0
    ) -> Stream:
        """A new request in a slot, used before or not."""
        self.generations[slot] = self.generations.get(slot, 0) + 1
        own = own_prompt or len(prompt)
        return Stream(slot, self.generations[slot], list(prompt), sampling, total=total, own_prompt=own)

    def plan_round(
        self, parts: Sequence[tuple[Stream, int]], budget: int = -1, *, relay: bool = True
    ) -> Planned:
        """A step with `verify`: so many tokens of a stream's prompt, or past it so many rows at most."""
        binds, entries, starts, counts, tokens, samples, verify = [], [], [], [], [], [], []
        for stream, count in parts:
            if not stream.bound:
                binds.append(self._bind(stream))
            chunk = stream.prompt[stream.planned : stream.planned + count]
            decodes = not chunk
            bound = max(stream.known - 1, len(stream.prompt)) + self.in_flight * self.width + self.slack
            starts.append(bound if decodes else stream.planned)
            counts.append(max(len(chunk), 1))
            tokens += chunk or ([-1] if relay else [stream.output[-1]])
            verify.append(count if decodes else 0)
            stream.planned += len(chunk)
            samples.append(int(decodes or stream.planned >= len(stream.prompt)))
            entries += self._pages(stream, bound + self.width if decodes else stream.planned)
        self.in_flight += 1
        self.epoch += 1
        step = RunStep(
            epoch=self.epoch,
            mode="mixed",
            slots=int32(stream.slot for stream, _ in parts),
            generations=int32(stream.generation for stream, _ in parts),
            starts=int32(starts),
            counts=int32(counts),
            tokens=int32(tokens),
            samples=bytes(samples),
            pages=np.array(entries, np.int32).tobytes(),
            binds=tuple(binds),
            verify=bytes(verify),
            budget=budget,
        )
        return Planned(step, [stream for stream, _ in parts])

    def run(self, planned: Planned) -> StepDone:
        """As Driver.run; tokens behind a stream's end are dropped, and never reach what is committed."""
        done = super().run(planned)
        if planned.step.verify:
            self.in_flight -= 1
            lengths = np.frombuffer(done.lengths, np.int32)
            for stream, length, verified, count in zip(
                planned.groups, lengths.tolist(), done.verified, done.counts, strict=True
            ):
                assert isinstance(stream, Stream)
                assert count <= max(verified, 1)
                assert stream.known <= stream.total
                if not stream.errors and stream.planned >= len(stream.prompt):
                    assert length == stream.known - 1
        return done

    def round(self, *parts: tuple[Stream, int], budget: int = -1) -> StepDone:
        """Plans and runs a step with speculation."""
        return self.run(self.plan_round(parts, budget))

    def finish(self, *streams: Stream, budget: int = -1) -> None:
        """Decodes all to their ends."""
        while left := [(stream, self.width) for stream in streams if not stream.ended]:
            self.round(*left, budget=budget)

    def _pages(self, stream: Stream, tokens: int) -> list[tuple[int, int, int, int]]:
        entries = []
        while stream.pages * PAGE_TOKENS < min(tokens, stream.total + 1):
            entries.append((stream.slot, stream.pages, self.next_page, self.next_page))
            stream.pages += 1
            self.next_page += 1
        return entries

    def _bind(self, request: Request) -> SlotBind:
        assert isinstance(request, Stream)
        request.bound = True
        return SlotBind(
            request.slot, request.generation, 7, request.child, request.sampling, request.own_prompt,
            int32(request.prompt), request.total,
        )  # fmt: skip


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 256, (length,), generator=generator).tolist()


def scripted_driver(
    model: DeepseekV4,
    mode: VerifyMode = "compact",
    masks: MaskSource | None = None,
    *,
    next_tokens: bool = False,
) -> tuple[SpecDriver, ScriptedDrafter]:
    """A runner that drafts by script, with an empty cache."""
    state = KVState(model.config, SLOTS, PAGES, PAGES, CPU, torch.float32)
    drafter = ScriptedDrafter(BLOCK, TAPS, needs_next_tokens=next_tokens)
    return SpecDriver(StepRunner(model, state, (1,), Speculation(drafter, state, mode), masks)), drafter


def plain_texts(
    model: DeepseekV4, prompts: Mapping[int, list[int]], tokens: int, sampling: Sampling = GREEDY
) -> dict[int, list[int]]:
    """Each prompt, and so many tokens that a runner without speculation makes of it."""
    state = KVState(model.config, SLOTS, PAGES, PAGES, CPU, torch.float32)
    driver = Driver(StepRunner(model, state, (1,)))
    requests = [driver.request(slot, ids, sampling) for slot, ids in prompts.items()]
    driver.step(*((request, len(request.prompt)) for request in requests))
    for _ in range(tokens - 1):
        driver.step(*((request, 1) for request in requests))
    return {request.slot: request.prompt + request.output for request in requests}
