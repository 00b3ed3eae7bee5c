"""What a trained draft achieves, and the checks that it must pass before it ships.

    python -m training.draft_gates --draft R/draft.pt --heldout HELD.npz --bench BENCH.npz --texts ROWS.npz \\
        --out R/draft-evaluation.json

HELD and BENCH are what the target wrote for held-out prompts (half greedy, half at temperature 1) and,
greedily, for bench/prompts.jsonl, a row for each text. Sequential temperatures are fitted on every other
held-out text, and judged on the rest.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.tokenizer import load_tokenizer
from training.attention import CHUNK
from training.draft_data import ANSWERED, BENCH_KINDS, PROSE
from training.draft_evaluate import (
    Measured,
    accepted_runs,
    area_under_curve,
    by_position,
    calibration_error,
    fit_temperatures,
    measure,
    sigmoid,
    survival,
    walk,
)
from training.draft_generate import load_target
from training.draft_model import Blocks, Draft, DraftShape, observe
from training.draft_train import Batch, DraftTrainer
from training.geometry import Geometry
from training.model import Model, use_bf16
from training.tasks import KINDS
from training.tokenizer import BOS, EOS

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
        return mask & whole


def load_texts(file: Path, device: torch.device, most_rows: int = 10**9) -> Texts:
    """Packed texts, their answers wanted."""
    with np.load(file) as arrays:
        ids, marks, texts = (arrays[name] for name in ("ids", "marks", "texts"))
    wanted = torch.from_numpy(marks[:most_rows] == ANSWERED).float().to(device)
    texts = texts[texts[:, 0] < most_rows]
    return Texts(torch.from_numpy(ids[:most_rows]).long().to(device), wanted, texts)


def load_draft(file: Path, device: torch.device) -> Draft:
    """A trained draft, frozen."""
    draft = Draft(Geometry(), DraftShape()).requires_grad_(False)
    draft.load_state_dict(torch.load(file, map_location="cpu"), strict=False)
    draft = draft.to(device)
    return use_bf16(draft) if device.type == "cuda" else draft


def acceptance(measured: Measured, own: Texts, names: dict[int, str], heat: int) -> dict[str, Any]:
    """Tables of each kind and of all, for texts of one temperature (in tenths)."""
    result: dict[str, Any] = {}
    greedy = heat == 0
    runs = accepted_runs(measured, greedy, 1)
    block = measured.chance.shape[-1]
    for number, name in [*names.items(), (-1, "all")]:
        chosen = (own.texts[:, 4] == heat) & ((own.texts[:, 5] == number) | (number < 0))
        if not chosen.any():
            continue
        walked = walk(runs, own.texts[chosen], block)
        result[name] = by_position(measured, own.inside(measured.whole, chosen))
        result[name] |= {
            "length": round(walked.length, 4),
            "rounds": walked.rounds,
            "runs": walked.counts.tolist(),
        }
    kinds = [entry["length"] for name, entry in result.items() if name != "all"]
    return result | {"mean_of_kinds": round(float(np.mean(kinds)), 4)}


def confidence(measured: Measured, own: Texts) -> dict[str, Any]:
    """Sequential temperatures, and how well estimates fit before and after, on texts not fitted."""
    doubts: dict[str, list[np.ndarray]] = {"fit": [], "judge": []}
    accepted: dict[str, list[np.ndarray]] = {"fit": [], "judge": []}
    number = np.arange(len(own.texts))
    bias = 0.0
    for heat in (0, 10):
        runs = accepted_runs(measured, heat == 0, 2)
        for part, odd in (("fit", 0), ("judge", 1)):
            inside = own.inside(measured.whole, (own.texts[:, 4] == heat) & (number % 2 == odd))
            doubts[part].append(measured.doubt[inside])
            steps = np.arange(measured.doubt.shape[-1])
            accepted[part].append(runs[inside][:, None] > steps)
            if heat == 10:
                bias = float((sigmoid(measured.doubt[inside]) - measured.chance[inside]).mean())
    doubt, outcome = ({part: np.concatenate(rows) for part, rows in d.items()} for d in (doubts, accepted))
    chosen = fit_temperatures(doubt["fit"], outcome["fit"])
    plain = [1.0] * len(chosen)
    judged = {"before": survival(doubt["judge"], plain), "after": survival(doubt["judge"], chosen)}
    errors = {
        name: [round(calibration_error(s[:, k], outcome["judge"][:, k]), 4) for k in range(len(chosen))]
        for name, s in judged.items()
    }
    before = np.concatenate([np.ones((len(outcome["judge"]), 1), bool), outcome["judge"][:, :-1]], 1)
    areas = [
        round(area_under_curve(doubt["judge"][before[:, k], k], outcome["judge"][before[:, k], k]), 4)
        for k in range(len(chosen))
    ]
    raw = (judged["before"] - outcome["judge"]).mean(0)
    return {
        "temperatures": chosen,
        "ece_before": errors["before"],
        "ece_after": errors["after"],
        "auc": areas,
        "auc_all": round(area_under_curve(doubt["judge"][before], outcome["judge"][before]), 4),
        "bias_at_temperature_1": round(bias, 4),
        "cumulative_bias_before": raw.round(4).tolist(),
        "cumulative_bias_after": (judged["after"] - outcome["judge"]).mean(0).round(4).tolist(),
        "anchors": {part: len(rows) for part, rows in doubt.items()},
    }


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
    start = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
    while emitted < limit and int(ids[0, at]) != eos:
        chunk = at // CHUNK
        last = (chunk + 1) * CHUNK
        anchors = torch.arange(last // CHUNK, device=device).view(1, -1, 1) * CHUNK
        anchors[0, chunk, 0] = at
        blocks = Blocks(anchors, start.expand_as(anchors))
        hidden, _ = draft(ids[:, :last], target.embed.weight, taps[:, :last], blocks)
        rows = hidden.view(-1, block, hidden.shape[-1])[chunk]
        previous = ids[0, at : at + 1]
        for k in range(block):
            previous = draft.logits(rows[k : k + 1], previous, head).argmax(-1)
            ids[0, at + 1 + k] = previous[0]
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", type=Path, required=True, help="draft.pt of training.draft_train")
    parser.add_argument("--heldout", type=Path, required=True, help="rows of held-out prompts")
    parser.add_argument("--bench", type=Path, required=True, help="rows of bench/prompts.jsonl")
    parser.add_argument("--texts", type=Path, required=True, help="training rows, for the overfit check")
    parser.add_argument("--model", type=Path, default=Path("engine/assets/nano"), help="target's folder")
    parser.add_argument("--overfit-steps", type=int, default=250, help="steps of the overfit check")
    parser.add_argument("--rollouts", type=int, default=2, help="serial rollouts of each kind")
    parser.add_argument("--rows", type=int, default=10**9, help="held-out rows to use at most")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(args.model)
    bos, eos = tokenizer.token_id(BOS), tokenizer.token_id(EOS)
    target, draft = load_target(args.model, device), load_draft(args.draft, device)
    held, bench = load_texts(args.heldout, device, args.rows), load_texts(args.bench, device)
    found: dict[str, Any] = {}

    def note(name: str, value: Any) -> None:
        found[name] = value
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{time.monotonic() - began:.0f} s {name}: {json.dumps(value)}", flush=True)

    measured = measure(target, draft, bench.ids, bench.wanted, bos)
    note("bench_greedy", acceptance(measured, bench, dict(enumerate(BENCH_KINDS)), 0))
    note("rollout", rollouts(target, draft, bench, measured, args.rollouts, eos))
    measured = measure(target, draft, held.ids, held.wanted, bos)
    names = {**dict(enumerate(KINDS)), PROSE: "prose"}
    for heat, name in ((0, "heldout_greedy"), (10, "heldout_sampled")):
        note(name, acceptance(measured, held, names, heat))
    note("confidence", confidence(measured, held))
    part = slice(0, 160)
    trials = (
        ("plain", draft, False),
        ("no_markov", without_markov(draft), False),
        ("shuffled", draft, True),
    )
    for name, other, shuffled in trials:
        tried = measure(target, other, held.ids[part], held.wanted[part], bos, shuffled)
        note(name, by_position(tried, tried.whole))
    note("overfit", overfit(target, load_texts(args.texts, device, 12), bos, args.overfit_steps))


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


if __name__ == "__main__":
    main()
