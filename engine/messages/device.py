"""Between a rank and its device thread."""

from __future__ import annotations

from engine.messages.base import Message
from engine.messages.rank import Sampling


class SlotBind(Message, frozen=True):
    """Rank -> device, inside RunStep: a request slot is (re)bound; its committed length becomes 0.

    prompt_tokens  length of the request's own prompt; later positions are its output, also after a retraction
    prompt         int32[n], n >= prompt_tokens: the prompt and what was generated before a retraction;
                   empty where neither penalties nor prompt logprobs are asked for
    ends_at        tokens of the request at its longest, prompt and output; 0: not told (no speculation)
    constrained    the request has a matcher, known by its request_id
    """

    slot: int
    generation: int
    request_id: int
    child: int
    sampling: Sampling
    prompt_tokens: int
    prompt: bytes = b""
    ends_at: int = 0
    constrained: bool = False


class RunStep(Message, frozen=True):
    """Rank -> device: one step. B row groups (one a request), T tokens in all.

    slots, generations  int32[B]; slot 0 is the padding sink and never appears
    starts              int32[B] position of the first new token (without speculation exact)
    counts              int32[B] new tokens of each request, >= 1
    tokens              int32[T]; -1 takes the slot's relay token, the last one sampled on the device
    samples             uint8[B] 1 where the group's last row is sampled
    pages               int32[P,4] rows (slot, logical page, full page id, window page id): new table entries
    binds               slots that are (re)bound before this step

    bucket              captured size in tokens that the ranks agreed on; 0: the step runs eagerly
    verify              uint8[B] most rows of a decode group that may be verified, its anchor included; 0 for
                        a chunk of a prompt; empty: the step doesn't speculate. Where it is given, `starts` of
                        decode groups are upper bounds: the slot's committed length on the device counts
    budget              drafted rows that the step verifies over all groups; -1: as many as `verify` allows;
                        0: nothing is drafted
    ranks               (requests, tokens, most rows whose logits are wanted) of each rank, in order, equal
                        on all; requests -1 where the rank reads prompts; empty where there is one rank
    """

    epoch: int
    mode: str  # "extend", "decode", "mixed", "idle"
    slots: bytes
    generations: bytes
    starts: bytes
    counts: bytes
    tokens: bytes
    samples: bytes
    pages: bytes = b""
    binds: tuple[SlotBind, ...] = ()
    bucket: int = 0
    ranks: tuple[tuple[int, int, int], ...] = ()
    verify: bytes = b""
    budget: int = 0


class LogprobColumns(Message, frozen=True):
    """Logprobs of a step's emitted tokens (n = sum of counts), natural log, of the target's raw distribution.

    chosen       float32[n]
    top_counts   uint8[n]
    top_ids      int32[sum top_counts]
    top_values   float32[sum top_counts]
    prompt_rows  int32[m,2] (row group, position) of this step's prompt logprobs; the same four columns follow
    """

    chosen: bytes
    top_counts: bytes
    top_ids: bytes
    top_values: bytes
    prompt_rows: bytes = b""
    prompt_chosen: bytes = b""
    prompt_top_counts: bytes = b""
    prompt_top_ids: bytes = b""
    prompt_top_values: bytes = b""


class StepDone(Message, frozen=True):
    """Device thread -> rank: the step's results are on the host.

    epoch      of the RunStep that this answers
    counts     uint8[B] sampled tokens of each row group, 0 for a prefill chunk that isn't the last; with
               speculation a decode group has 1 for each accepted draft and 1 more, or 0 where it had ended
    token_ids  int32[sum counts]
    failed     (row, message) of rows whose sampling failed; their counts are 0 (I15)
    logprobs   None where no row asked
    ended      uint8[B] 1 where the group's last token ended its grammar; empty: none did

    Of a step that has `verify`, else empty:
    verified   uint8[B] rows verified of each group
    survival   float32[B, block] estimated chance of each draft to be accepted; empty where none was drafted
    lengths    int32[B] committed length of each group's slot after the step
    phases     seconds of: drafting, target forward, acceptance and commit
    """

    epoch: int
    counts: bytes
    token_ids: bytes
    failed: tuple[tuple[int, str], ...] = ()
    logprobs: LogprobColumns | None = None
    seconds: float = 0.0
    verified: bytes = b""
    survival: bytes = b""
    lengths: bytes = b""
    phases: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ended: bytes = b""
