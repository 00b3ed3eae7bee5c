"""The largest steps that the settings admit, run at the start: no request finds no room for them.

First on a cache of a few pages, before the real one is sized, to learn what they take; then on the real one,
so that the allocator has the blocks. A long context needs no memory of its own: all its logical pages are the
same few. What a step computes then means nothing, and isn't looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine.cache_sizes import CacheSizes
from engine.config import PAGE_TOKENS, Settings
from engine.memory.pages import pages_for
from engine.memory.pools import KVState
from engine.messages import RunStep, Sampling, SlotBind
from engine.model.draft import Drafter
from engine.model.model import DeepseekV4
from engine.runner.speculative import Speculation
from engine.runner.step import StepRunner

Say = Callable[[str], None]

# Every processor at once: each makes tensors of its own.
SAMPLING = Sampling(
    max_new_tokens=PAGE_TOKENS, min_new_tokens=1, temperature=0.9, top_p=0.9, top_k=50, min_p=0.01,
    frequency_penalty=0.1, logit_bias=((0, 0.1),), seed=1, ignore_eos=True, logprobs=0,
)  # fmt: skip
SCORED = msgspec.structs.replace(SAMPLING, prompt_logprobs=0)


@dataclass(frozen=True, slots=True)
class Admitted:
    """What the settings admit of one step.

    requests  that hold a slot
    chunk     most prompt tokens
    context   most tokens of a request, prompt and output
    tokens    that the cache holds at most, of all requests together
    width     rows that a request decodes at most
    """

    requests: int
    chunk: int
    context: int
    tokens: int
    width: int

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each request: as many as the cache has room for are as long as they can be."""
        long = max(1, self.tokens // (pages_for(self.context) * PAGE_TOKENS))
        lengths = np.full(self.requests, min(PAGE_TOKENS, self.context))
        # The last one reads its prompt, the others decode.
        lengths[-min(long, self.requests) :] = self.context
        return lengths


def admitted(settings: Settings, sizes: CacheSizes, block: int) -> Admitted:
    """By the settings, for a cache of these sizes and drafts of `block` tokens."""
    tokens = (sizes.full_pages - 1) * PAGE_TOKENS
    context = min(sizes.context_length, tokens)
    chunk = min(settings.chunked_prefill_size, context - 1)
    return Admitted(sizes.slots - 1, chunk, context, tokens, block + 1)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What steps take of a device beside weights and caches: the largest, and what only decodes."""

    largest: int
    decode: int

    def kept(self, settings: Settings) -> int:
        """What the cache must leave: captured steps have memory of their own, as much as the largest."""
        return self.largest + (0 if settings.disable_cuda_graph else self.decode)


def told_of_steps(taken: StepBytes) -> str:
    """One line for the person who sizes a server."""
    return f"steps take up to {taken.largest >> 20} MiB, those that only decode {taken.decode >> 20} MiB"


def measured(
    model: DeepseekV4,
    drafter: Drafter | None,
    settings: Settings,
    sizes: CacheSizes,
    cache: Callable[[int, int, int], KVState],
    say: Say,
) -> StepBytes:
    """Runs both steps on a cache of a few pages, which is gone afterwards.

    cache   makes one of so many slots, full and window pages
    sizes   of a cache that has all the memory: what the real one holds at most
    raises  torch.OutOfMemoryError where the device has no room for a step even so
    """
    torch.cuda.empty_cache()
    few = pages_for(settings.chunked_prefill_size) + 3
    reach = pages_for(sizes.context_length)
    state = cache(sizes.slots, few, few)
    state.full_table = np.zeros((sizes.slots, reach), np.int32)
    state.window_table = np.zeros_like(state.full_table)
    speculation = None if drafter is None else Speculation(drafter, state, "static")
    steps = LargestSteps(
        StepRunner(model, state, (model.config.eos_token_id,), speculation),
        admitted(settings, sizes, 0 if drafter is None else drafter.block),
        say,
    )
    steps.bind()
    # In this order: the blocks of the first one are there for the second.
    decode = _taken(model.device, steps.decode)
    largest = max(decode, _taken(model.device, steps.mixed))
    del steps, state, speculation
    gc.collect()
    torch.cuda.empty_cache()
    return StepBytes(largest, decode)


def _taken(device: torch.device, step: Callable[[], None]) -> int:
    """Bytes that the allocator holds at most while the step runs, beyond what is in use before."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return torch.cuda.max_memory_reserved(device) - before


class LargestSteps:
    """Both steps on one runner, in every slot; each is bound anew by its next request.

    Every rank runs the same steps at once, so that their collectives meet.

    raises  PageAccounting, any step, where kernels meet bad indices
    """

    def __init__(self, runner: StepRunner, most: Admitted, say: Say) -> None:
        self.runner, self.most, self._say = runner, most, say
        self._epoch = 0
        self._slots = np.arange(1, most.requests + 1)
        self._ones = np.ones(most.requests, np.int64)

    def run(self) -> None:
        """All of it."""
        self.bind()
        self.decode()
        self.mixed()
        # Until its slot is bound anew, every step would look for scored tokens.
        self.runner.bindings.prompts.clear()

    def bind(self) -> None:
        """Gives every slot a request with one token behind it, and page tables of full length."""
        prompt = np.zeros(self.most.context, np.int32).tobytes()
        last = self._slots[-1]
        binds = tuple(
            SlotBind(
                slot, 0, slot, 0, SCORED if slot == last else SAMPLING, self.most.context, prompt,
                self.most.context,
            )
            for slot in self._slots.tolist()
        )  # fmt: skip
        state = self.runner.state
        logical = np.arange(min(pages_for(self.most.context), state.full_table.shape[1]))
        slot, page = (part.ravel() for part in np.meshgrid(self._slots, logical, indexing="ij"))
        full, window = (1 + page % (pages - 1) for pages in (state.full_pages, state.window_pages))
        pages = _int32(np.stack([slot, page, full, window], axis=1))
        self._run(self._ones * 0, self._ones, self._ones * 0, pages=pages, binds=binds)

    def decode(self) -> None:
        """Every request decodes, with as many drafts as it may have."""
        width = self.most.width
        starts = self._ends(width)
        self._say(f"largest step: {starts.size * width} rows that decode, up to token {starts.max() + width}")
        self._run(starts, self._ones, self._ones * width)

    def mixed(self) -> None:
        """The largest chunk of a prompt, every token of it scored, beside all others that decode."""
        starts, width, chunk = self._ends(self.most.width), self.most.width, self.most.chunk
        starts[-1] = self.most.context - chunk
        counts, verify = self._ones.copy(), self._ones * width
        counts[-1], verify[-1] = chunk, 0
        self._say(
            f"largest step: {chunk} rows of a prompt, up to token {self.most.context}, and "
            f"{(starts.size - 1) * width} that decode"
        )
        self._run(starts, counts, verify)

    def _ends(self, width: int) -> npt.NDArray[np.int64]:
        """Where each request's last `width` rows begin."""
        return np.maximum(self.most.lengths() - width - 1, 1)

    def _run(
        self,
        starts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        verify: npt.NDArray[np.int64],
        pages: bytes = b"",
        binds: tuple[SlotBind, ...] = (),
    ) -> None:
        self._epoch -= 1
        runner = self.runner
        speculates = runner.speculation is not None
        if runner.speculation is not None and not binds:
            # As if so many had come by, and none were injected: a draft then takes all that its ring holds.
            runner.speculation.round.lengths[self._slots] = starts
            runner.speculation.round.injected[self._slots] = 0
        rows = int((np.where(verify > 0, verify, counts) if speculates else counts).sum())
        runner.execute(
            RunStep(
                epoch=self._epoch,
                mode="extend" if binds else "mixed",
                slots=_int32(self._slots),
                generations=_int32(self._slots * 0),
                starts=_int32(starts),
                counts=_int32(counts),
                tokens=_int32(np.zeros(int(counts.sum()), np.int64)),
                samples=b"\1" * starts.size,
                # Scored rows need logits, too: no step wants more than one a row and one a request.
                ranks=((-1, rows, rows + starts.size),) * runner.model.groups.dp.size,
                pages=pages,
                binds=binds,
                verify=verify.astype(np.uint8).tobytes() if speculates else b"",
                budget=-1 if speculates and not binds else 0,
            )
        )
        # Here it has a name; a request's step would be blamed for it later.
        runner.model.ops.check()


def _int32(values: npt.NDArray[np.int64]) -> bytes:
    return values.astype(np.int32).tobytes()
