"""Trials of a draft that are not tables: another decoding, another training, a draft without its parts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.attention import CHUNK
from training.draft_data import ANSWERED, BENCH_KINDS, PROSE
from training.draft_evaluate import Measured, accepted_runs, by_position, measure, walk
from training.draft_model import Blocks, Draft, observe
from training.draft_train import Batch, DraftTrainer
from training.model import Model, use_bf16

OVERFIT_TEXTS = 50
ROLLOUT_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Texts:
    """Rows that the target wrote: ids [R, S] on the device, marks, and the texts in them (see `packed`)."""

    ids: Tensor
    wanted: Tensor
    texts: np.ndarray

    def inside(self, whole: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """[R, S]: anchors with all labels, in the answers of the chosen texts."""
        mask = np.zeros(whole.shape, dtype=bool)
        for row, _, answer, stop, *_ in self.texts[chosen].tolist():
            mask[row, answer - 1 : stop] = True
        found: np.ndarray = mask & whole
        return found


def load_texts(file: Path, device: torch.device, most_rows: int = 10**9) -> Texts:
    """Packed texts, their answers wanted."""
    with np.load(file) as arrays:
        ids, marks, texts = (arrays[name] for name in ("ids", "marks", "texts"))
    wanted = torch.from_numpy(marks[:most_rows] == ANSWERED).float().to(device)
    texts = texts[texts[:, 0] < most_rows]
    return Texts(torch.from_numpy(ids[:most_rows]).long().to(device), wanted, texts)


def without_markov(draft: Draft) -> Draft:
    """The same draft whose Markov bias is zero."""
    other = Draft(draft.geometry, draft.shape).requires_grad_(False)
    other.load_state_dict(draft.state_dict(), strict=False)
    other = other.to(draft.main_proj.weight.device)
    if draft.main_proj.weight.dtype == torch.bfloat16:
        use_bf16(other)
    other.markov_head.weight.zero_()
    return other


def overfit(target: Model, texts: Texts, bos: int, steps: int) -> dict[str, float]:
    """A new draft that sees fifty conversations alone: tau on them."""
    chats = texts.texts[texts.texts[:, 5] != PROSE][:OVERFIT_TEXTS]
    rows = sorted(set(chats[:, 0].tolist()))
    keep = torch.zeros_like(texts.wanted)
    for row, start, _, stop, *_ in chats.tolist():
        keep[row, start:stop] = 1.0
    ids, wanted = texts.ids[rows], (texts.wanted * keep)[rows]
    trainer = DraftTrainer(target, ids.device, 16, bos)
    for step in range(steps):
        trainer.step(Batch(ids, wanted), 0.05 + 0.7 * step / steps)
    trainer.draft.requires_grad_(False)
    measured = measure(target, trainer.draft, ids, wanted, bos)
    return {"texts": len(chats), "steps": steps, "tau": float(by_position(measured, measured.whole)["tau"])}  # type: ignore[arg-type]


def write_drafts(target: Model, draft: Draft, ids: Tensor, taps: Tensor, at: int) -> None:
    """Drafts greedily after the anchor `at` of the one row `ids`, and writes the drafts behind it."""
    block, chunk = draft.shape.block, at // CHUNK
    last = (chunk + 1) * CHUNK
    anchors = torch.arange(chunk + 1, device=ids.device).view(1, -1, 1) * CHUNK
    anchors[0, chunk, 0] = at
    blocks = Blocks(anchors, torch.zeros_like(anchors))
    hidden, _ = draft(ids[:, :last], target.embed.weight, taps[:, :last], blocks)
    rows = hidden.view(-1, block, hidden.shape[-1])[chunk]
    previous = ids[0, at : at + 1]
    for k in range(block):
        previous = draft.logits(rows[k : k + 1], previous, target.head.weight).argmax(-1)
        ids[0, at + 1 + k] = previous[0]


@torch.no_grad()
def rollout(target: Model, draft: Draft, prompt: list[int], limit: int, eos: int) -> tuple[int, int]:
    """Greedy decoding in rounds of draft and verification, one text; rounds and emitted tokens."""
    block, device = draft.shape.block, target.embed.weight.device
    head = target.head.weight
    room = len(prompt) + limit + block + 1
    ids = torch.zeros(1, room + -room % CHUNK, dtype=torch.int64, device=device)
    ids[0, : len(prompt)] = torch.tensor(prompt, device=device)
    taps, final = observe(target, ids, draft.shape.taps)
    at, rounds, emitted = len(prompt), 0, 0
    ids[0, at] = torch.argmax(final[0, at - 1] @ head.T)
    while emitted < limit and int(ids[0, at]) != eos:
        write_drafts(target, draft, ids, taps, at)
        taps, final = observe(target, ids, draft.shape.taps)
        wanted = (final[0, at : at + block + 1] @ head.T).argmax(-1)
        same = (wanted[:block] == ids[0, at + 1 : at + 1 + block]).long().cumprod(0)
        run = int(same.sum())
        ends = torch.nonzero(wanted[: run + 1] == eos)[:, 0]
        step = int(ends[0]) + 1 if len(ends) else run + 1
        ids[0, at + step] = wanted[step - 1]
        step = min(step, limit - emitted)
        rounds, emitted, at = rounds + 1, emitted + step, at + step
    return rounds, emitted


def rollouts(
    target: Model, draft: Draft, bench: Texts, measured: Measured, count: int, eos: int
) -> dict[str, float]:
    """Serial greedy decoding of `count` texts of each kind, and the same texts walked."""
    rounds = emitted = 0
    kinds = [np.flatnonzero(bench.texts[:, 5] == kind)[:count] for kind in range(len(BENCH_KINDS))]
    texts = bench.texts[np.concatenate(kinds)]
    texts[:, 3] = np.minimum(texts[:, 3], texts[:, 2] + ROLLOUT_TOKENS)
    for row, start, answer, stop, *_ in texts.tolist():
        prompt = bench.ids[row, start:answer].tolist()
        more = rollout(target, draft, prompt, stop - answer - 1, eos)
        rounds, emitted = rounds + more[0], emitted + more[1]
    taught = walk(accepted_runs(measured, True, 1), texts, draft.shape.block)
    return {
        "texts": len(texts),
        "rounds": rounds,
        "length": round(emitted / max(rounds, 1), 4),
        "walked_rounds": taught.rounds,
        "walked_length": round(taught.length, 4),
    }
