"""Batched generation with the target, to make a draft's training text: static caches, every row on its own.

One step takes one token of each row, prompt tokens and new ones alike, so that a step is always the same work
and is captured once as a CUDA graph. A row that has finished is handed out and starts anew at position 0.
Queries see every compressed entry: at these lengths the indexer would leave out few or none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from training.attention import CHUNK, HIDDEN, Attention, Compressor, rms, rotate
from training.model import Model, spread


@dataclass(slots=True)
class LayerState:
    """Caches of one layer for R rows; the last entry is where rows write that have none to write.

    window   [R, 128, D]; entries [R, limit / ratio + 1, D]
    kv       c4: the last eight tokens' [R, 2, 4, 2 D]; c128: running sums [R, D]
    score    c4: as kv, float32; c128: running maximum and normaliser [R, 2, D]
    """

    window: Tensor
    entries: Tensor
    kv: Tensor
    score: Tensor


def layer_state(attn: Attention, rows: int, limit: int, like: Tensor) -> LayerState:
    """Empty caches."""
    width, ratio = attn.geometry.head_dim, attn.ratio
    entries = limit // ratio + 1 if ratio else 1
    shape = (rows, 2, 4, 2 * width) if ratio == 4 else (rows, width)
    marks = shape if ratio == 4 else (rows, 2, width)
    return LayerState(
        like.new_zeros(rows, CHUNK, width),
        like.new_zeros(rows, entries, width),
        like.new_zeros(shape, dtype=like.dtype if ratio == 4 else torch.float32),
        like.new_zeros(marks, dtype=torch.float32),
    )


@dataclass(slots=True)
class Rows:
    """What every row is doing.

    ids       [R, limit]; position [R], of the token that the next step takes; prompt [R], its length
    heat      [R] temperature, 0 greedy; done [R] bool
    """

    ids: Tensor
    position: Tensor
    prompt: Tensor
    heat: Tensor
    done: Tensor


@dataclass(slots=True)
class Decoder:
    """R rows of at most `limit` tokens over a model; `step` advances every row that is not done."""

    model: Model
    rows: Rows
    states: list[LayerState]
    eos: int
    _every: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._every = torch.arange(len(self.rows.position), device=self.rows.position.device)

    @torch.no_grad()
    def step(self) -> None:
        """One token of each row; a new one is written where the prompt has ended."""
        rows = self.rows
        logits = self.logits()
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        heat = rows.heat[:, None]
        scores = torch.where(heat > 0, logits / heat.clamp(min=1e-3) + noise, logits)
        chosen = scores.argmax(-1)
        # A row that is done stays where it is, and may be at its very end.
        following = (rows.position + 1).clamp(max=rows.ids.shape[1] - 1)
        writes = (following >= rows.prompt) & ~rows.done
        old = rows.ids[self._every, following]
        rows.ids[self._every, following] = torch.where(writes, chosen, old)
        ended = writes & ((chosen == self.eos) | (following + 1 >= rows.ids.shape[1]))
        rows.position.copy_(torch.where(rows.done, rows.position, following))
        rows.done |= ended

    def logits(self) -> Tensor:
        """Scores [R, V] float32 after each row's token at its position."""
        ids = self.rows.ids[self._every, self.rows.position]
        x = self.model.embed(ids)
        streams = x[:, None].expand(-1, self.model.geometry.hc_mult, -1).contiguous()
        for layer, state in zip(self.model.blocks(), self.states, strict=True):
            u, post, comb = layer.hc_attn.collapse(streams)
            out = self._attention(layer.attn, layer.attn_norm(u), state)
            streams = spread(out, streams, post, comb)
            u, post, comb = layer.hc_ffn.collapse(streams)
            streams = spread(layer.ffn(layer.ffn_norm(u), ids)[0], streams, post, comb)
        return self.model.head.logits(streams).float()

    def _attention(self, attn: Attention, x: Tensor, state: LayerState) -> Tensor:
        """One row's attention [R, H] over its window and its entries."""
        g, at, tables = attn.geometry, self.rows.position, self.model.tables()
        kind = "compress" if attn.ratio else "plain"
        cos, sin = tables[f"{kind}_cos"], tables[f"{kind}_sin"]
        q = attn.wq_b(attn.q_norm(attn.wq_a(x))).view(-1, g.num_heads, g.head_dim)
        q = rotate(rms(q, g.rms_norm_eps), cos[at][:, None], sin[at][:, None]).to(x.dtype)
        kv = rotate(attn.kv_norm.weight * rms(attn.wkv(x), g.rms_norm_eps), cos[at], sin[at]).to(x.dtype)
        state.window[self._every, at % CHUNK] = kv
        slots = torch.arange(CHUNK, device=at.device)
        keys, seen = [state.window], [slots <= at[:, None]]
        if attn.ratio:
            self._compress(attn.compressor, x, state, cos, sin)
            entries = torch.arange(state.entries.shape[1], device=at.device)
            keys.append(state.entries)
            seen.append(entries < ((at + 1) // attn.ratio)[:, None])
        return attn._project(_attend(q, keys, seen, attn.attn_sink)[None], cos[at], sin[at])[0]

    def _compress(self, own: Compressor, x: Tensor, state: LayerState, cos: Tensor, sin: Tensor) -> None:
        """Takes the token into its window's sums, and writes the entry of a window that it completes."""
        at, ratio = self.rows.position, own.ratio
        kv, score = own.wkv(x), own.wgate(x).float() + own.ape[at % ratio]
        pooled = self._pool_four(own, kv, score, state) if ratio == 4 else self._pool_long(kv, score, state)
        first = (at - ratio + 1).clamp(min=0)
        entry = rotate(own.norm.weight * rms(pooled.to(x.dtype), own.norm.eps), cos[first], sin[first])
        place = torch.where(at % ratio == ratio - 1, at // ratio, state.entries.shape[1] - 1)
        state.entries[self._every, place] = entry.to(x.dtype)

    def _pool_four(self, own: Compressor, kv: Tensor, score: Tensor, state: LayerState) -> Tensor:
        """Eight tokens [R, D]: the window before by its first half of channels, the own one by the second."""
        at, every, wide = self.rows.position, self._every, own.width
        half = at // 4 % 2
        state.kv[every, half, at % 4] = kv
        state.score[every, half, at % 4] = score
        before = state.score[every, 1 - half][..., :wide].masked_fill((at < 4)[:, None, None], float("-inf"))
        scores = torch.cat((before, state.score[every, half][..., wide:]), 1)
        values = torch.cat((state.kv[every, 1 - half][..., :wide], state.kv[every, half][..., wide:]), 1)
        return (torch.softmax(scores, 1) * values.float()).sum(1)

    def _pool_long(self, kv: Tensor, score: Tensor, state: LayerState) -> Tensor:
        """A running softmax over the window's tokens so far, [R, D]."""
        fresh = (self.rows.position % CHUNK == 0)[:, None]
        top = torch.where(fresh, score, torch.maximum(state.score[:, 0], score))
        kept = torch.where(fresh, 0.0, torch.exp(state.score[:, 0] - top))
        raised = torch.exp(score - top)
        state.kv.copy_(state.kv * kept + raised * kv.float())
        state.score.copy_(torch.stack((top, state.score[:, 1] * kept + raised), 1))
        return state.kv / state.score[:, 1]


def _attend(q: Tensor, keys: list[Tensor], seen: list[Tensor], sink: Tensor) -> Tensor:
    """q [R, h, D] over several caches [R, n, D] with masks [R, n], one softmax with a sink; [R, h, D]."""
    logits = torch.cat([torch.bmm(q, part.transpose(1, 2)) for part in keys], -1).float()
    logits = (logits * q.shape[-1] ** -0.5).masked_fill(~torch.cat(seen, -1)[:, None], HIDDEN)
    sinks = sink.view(1, -1, 1)
    top = torch.maximum(logits.amax(-1, keepdim=True), sinks)
    raised = torch.exp(logits - top)
    weights = (raised / (raised.sum(-1, keepdim=True) + torch.exp(sinks - top))).to(q.dtype)
    parts = torch.split(weights, [part.shape[1] for part in keys], -1)
    return torch.stack([torch.bmm(w, part) for w, part in zip(parts, keys, strict=True)]).sum(0)


def new_decoder(model: Model, rows: int, limit: int, eos: int) -> Decoder:
    """A decoder whose rows are all done, so that `refill` gives each its first prompt."""
    weight = model.embed.weight
    device = weight.device
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    states = [layer_state(layer.attn, rows, limit, weight) for layer in model.blocks()]
    done = torch.ones(rows, dtype=torch.bool, device=device)
    ids = torch.zeros(rows, limit, dtype=torch.int64, device=device)
    return Decoder(model, Rows(ids, zeros, zeros + 1, zeros.float(), done), states, eos)


@dataclass(frozen=True, slots=True)
class Prompts:
    """ids [N, P] int16, zero beyond `lengths` [N]; temperatures [N]; kinds [N] int64, for the caller."""

    ids: Tensor
    lengths: Tensor
    heat: Tensor
    kinds: Tensor


@dataclass(frozen=True, slots=True)
class Written:
    """Finished rows: ids [n, limit] int16, lengths, prompt lengths, temperatures, kinds; on the CPU."""

    ids: Tensor
    lengths: Tensor
    prompts: Tensor
    heat: Tensor
    kinds: Tensor


def capture(decoder: Decoder) -> torch.cuda.CUDAGraph:
    """The step as a graph. Rows must be done while it is made: the warm-up steps then change nothing."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            decoder.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step()
    return graph


def generate(decoder: Decoder, prompts: Prompts, steps_per_look: int = 16) -> Iterator[Written]:
    """Finished rows as they come, until every prompt has been answered."""
    rows, at, count = decoder.rows, 0, len(prompts.lengths)
    device = rows.ids.device
    run = capture(decoder).replay if device.type == "cuda" else decoder.step
    owner = torch.full_like(rows.position, -1)
    while True:
        free = torch.nonzero(rows.done)[:, 0]
        held = free[owner[free] >= 0]
        if len(held):
            which = owner[held]
            ids, ends = rows.ids[held].to(torch.int16).cpu(), (rows.position[held] + 1).cpu()
            own = which.cpu()
            yield Written(ids, ends, prompts.lengths[own], prompts.heat[own], prompts.kinds[own])
            owner[held] = -1
        take = free[: count - at]
        if len(take):
            chosen = torch.arange(at, at + len(take))
            rows.ids[take, : prompts.ids.shape[1]] = prompts.ids[chosen].to(device).long()
            rows.prompt[take] = prompts.lengths[chosen].to(device)
            rows.heat[take] = prompts.heat[chosen].to(device)
            rows.position[take] = 0
            rows.done[take] = False
            owner[take] = chosen.to(device)
            at += len(take)
        if at >= count and not bool((owner >= 0).any()):
            return
        for _ in range(steps_per_look):
            run()
