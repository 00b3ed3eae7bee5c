"""How good a draft is: acceptance at every position of texts, decoding walked along them, and calibration.

Everything is measured on texts that the target wrote. Decoding with drafts gives the target's own texts, so
it can be walked along a finished one: a greedy draft is accepted as far as it equals the text; at temperature
1, given the token x that decoding gave, its draft had been accepted with probability min(1, q(x) / p(x)).
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.attention import CHUNK
from training.draft_loss import block_targets, choose_blocks, text_starts
from training.draft_model import Draft, observe
from training.model import Model

BINS = 15
TEMPERATURES = np.logspace(-1, 1, 41)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of every position of every row, [R, S, block]; positions are anchors.

    chance    1 - TV at temperature 1
    same      whether the draft's likeliest token is the text's, given the text before it
    ratio     min(1, q / p) of the text's own token at temperature 1
    doubt     logit of the confidence head
    whole     [R, S] whether all the labels are answers of the anchor's text
    """

    chance: np.ndarray
    same: np.ndarray
    ratio: np.ndarray
    doubt: np.ndarray
    whole: np.ndarray


@torch.no_grad()
def measure(
    target: Model, draft: Draft, ids: Tensor, wanted: Tensor, bos: int, shuffle: bool = False, rows: int = 8
) -> Measured:
    """Blocks at all positions of rows [R, S]; `shuffle` gives every position the taps of another one."""
    block, parts = draft.shape.block, []
    head, length = target.head.weight, ids.shape[1]
    generator = torch.Generator().manual_seed(0)
    for at in range(0, len(ids), rows):
        own, worth = ids[at : at + rows], wanted[at : at + rows]
        starts = text_starts(own, bos)
        blocks = choose_blocks(worth, starts, CHUNK, None)
        targets = block_targets(own, worth, starts, blocks, block)
        taps, final = observe(target, own, draft.shape.taps)
        if shuffle:
            taps = taps[:, torch.randperm(length, generator=generator).to(taps.device)]
        hidden, _ = draft(own, target.embed.weight, taps, blocks)
        p = F.linear(final.flatten(0, 1), head).float().log_softmax(-1)[targets.seen]
        q = draft.logits(hidden, targets.previous, head).float().log_softmax(-1)
        label = targets.labels[:, None]
        chance = 1 - 0.5 * (p.exp() - q.exp()).abs().sum(-1)
        ratio = (q.gather(-1, label) - p.gather(-1, label))[:, 0].exp().clamp(max=1)
        same = q.argmax(-1) == targets.labels
        doubt = draft.confidence(hidden, targets.previous)
        shape = (len(own), length, block)
        whole = (targets.weights.view(shape) > 0).all(-1)
        parts.append(
            [x.view(shape).cpu().numpy() for x in (chance, same, ratio, doubt)] + [whole.cpu().numpy()]
        )
    return Measured(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def by_position(measured: Measured, inside: np.ndarray) -> dict[str, list[float] | float]:
    """Mean chance and equality at each position, each given that those before it were accepted, and tau.

    inside  [R, S] anchors that count
    """
    chance, same = measured.chance[inside].astype(np.float64), measured.same[inside]
    before = np.concatenate([np.ones((len(chance), 1)), chance.cumprod(1)[:, :-1]], 1)
    alive = np.concatenate([np.ones((len(same), 1)), same.cumprod(1)[:, :-1]], 1)
    return {
        "anchors": len(chance),
        "chance": (chance.mean(0)).round(4).tolist(),
        "chance_given_before": ((chance * before).sum(0) / before.sum(0).clip(1e-9)).round(4).tolist(),
        "same_given_before": ((same * alive).sum(0) / alive.sum(0).clip(1)).round(4).tolist(),
        "tau": round(1 + float(chance.cumprod(1).sum(1).mean()), 4),
        "tau_greedy": round(1 + float(same.cumprod(1).sum(1).mean()), 4),
    }


def accepted_runs(measured: Measured, greedy: bool, seed: int) -> np.ndarray:
    """How many drafts of each anchor are accepted, [R, S]."""
    random = np.random.default_rng(seed)
    accepted = measured.same if greedy else random.random(measured.ratio.shape) < measured.ratio
    runs: np.ndarray = accepted.cumprod(-1).sum(-1)
    return runs


@dataclass(slots=True)
class Walk:
    """Rounds of decoding, the tokens that they gave, and how many rounds accepted 0 .. block drafts."""

    rounds: int
    emitted: int
    counts: np.ndarray

    @property
    def length(self) -> float:
        """Tokens a round, the bonus included."""
        return self.emitted / max(self.rounds, 1)


def walk(runs: np.ndarray, texts: np.ndarray, block: int) -> Walk:
    """Decodes each text [row, start, prompt's stop, stop, ...] by its anchors' runs.

    The first answer token comes from the prompt's own forward pass and is the first anchor.
    """
    result = Walk(0, 0, np.zeros(block + 1, dtype=np.int64))
    for row, _, answer, stop, *_ in texts.tolist():
        at = answer
        while at < stop - 1:
            run = min(int(runs[row, at]), stop - 1 - at)
            result.counts[run] += 1
            result.rounds += 1
            step = min(run + 1, stop - 1 - at)
            result.emitted += step
            at += step
    return result


def fit_temperatures(doubt: np.ndarray, accepted: np.ndarray) -> list[float]:
    """Sequential temperatures: position by position, the one with the least error of the cumulative product.

    doubt     [N, block] logits; accepted [N, block] 0 or 1, whether the draft is accepted up to there
    """
    product, chosen = np.ones(len(doubt)), []
    for k in range(doubt.shape[1]):
        trials = [product * sigmoid(doubt[:, k] / t) for t in TEMPERATURES]
        errors = [calibration_error(trial, accepted[:, k]) for trial in trials]
        best = int(np.argmin(errors))
        chosen.append(round(float(TEMPERATURES[best]), 4))
        product = trials[best]
    return chosen


def survival(doubt: np.ndarray, temperatures: list[float]) -> np.ndarray:
    """Estimated survival [N, block] by logits [N, block]."""
    return sigmoid(doubt / np.array(temperatures)).cumprod(1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    result: np.ndarray = 0.5 * (1 + np.tanh(0.5 * x))
    return result


def calibration_error(estimate: np.ndarray, outcome: np.ndarray) -> float:
    """Mean distance of estimate and outcome over 15 bins of equal width, weighted by what is in them."""
    bins = np.clip((estimate * BINS).astype(np.int64), 0, BINS - 1)
    counts = np.bincount(bins, minlength=BINS)
    estimates, outcomes = (np.bincount(bins, x, BINS) for x in (estimate, outcome.astype(np.float64)))
    return float(np.abs(estimates - outcomes)[counts > 0].sum() / len(estimate))


def area_under_curve(score: np.ndarray, outcome: np.ndarray) -> float:
    """Chance that an accepted draft scores above a rejected one, ties counted half."""
    _, ranks, counts = np.unique(score, return_inverse=True, return_counts=True)
    middle = counts.cumsum() - (counts - 1) / 2
    good = outcome.astype(bool)
    positives, negatives = int(good.sum()), int((~good).sum())
    if not positives or not negatives:
        return float("nan")
    return float((middle[ranks][good].sum() - positives * (positives + 1) / 2) / (positives * negatives))
