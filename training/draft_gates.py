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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.model.tokenizer import load_tokenizer
from training.draft_data import BENCH_KINDS, PROSE
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
from training.draft_model import Draft, DraftShape
from training.draft_trials import Texts, load_texts, overfit, rollouts, without_markov
from training.geometry import Geometry
from training.model import use_bf16
from training.tasks import KINDS
from training.tokenizer import BOS, EOS


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


def outcomes(measured: Measured, own: Texts, odd: int) -> tuple[np.ndarray, np.ndarray]:
    """Confidence logits of every other text's anchors [N, block], and whether the drafts up to there were
    accepted: greedily in greedy texts, by lot in those of temperature 1.
    """
    doubts, accepted = [], []
    number = np.arange(len(own.texts))
    for heat in (0, 10):
        runs = accepted_runs(measured, heat == 0, 2)
        inside = own.inside(measured.whole, (own.texts[:, 4] == heat) & (number % 2 == odd))
        doubts.append(measured.doubt[inside])
        accepted.append(runs[inside][:, None] > np.arange(measured.doubt.shape[-1]))
    return np.concatenate(doubts), np.concatenate(accepted)


def confidence(measured: Measured, own: Texts) -> dict[str, Any]:
    """Sequential temperatures, and how well estimates fit before and after, on texts not fitted."""
    chosen = fit_temperatures(*outcomes(measured, own, 0))
    doubt, accepted = outcomes(measured, own, 1)
    block = len(chosen)
    result: dict[str, Any] = {"temperatures": chosen, "anchors": len(doubt)}
    for name, temperatures in (("before", [1.0] * block), ("after", chosen)):
        estimate = survival(doubt, temperatures)
        errors = [calibration_error(estimate[:, k], accepted[:, k]) for k in range(block)]
        result[f"ece_{name}"] = np.round(errors, 4).tolist()
        result[f"cumulative_bias_{name}"] = (estimate - accepted).mean(0).round(4).tolist()
    before = np.concatenate([np.ones((len(accepted), 1), bool), accepted[:, :-1]], 1)
    areas = [area_under_curve(doubt[b, k], accepted[b, k]) for k, b in enumerate(before.T)]
    sampled = own.inside(measured.whole, own.texts[:, 4] == 10)
    bias = float((sigmoid(measured.doubt[sampled]) - measured.chance[sampled]).mean())
    return result | {
        "auc": np.round(areas, 4).tolist(),
        "auc_all": round(area_under_curve(doubt[before], accepted[before]), 4),
        "bias_at_temperature_1": round(bias, 4),
    }


def arguments() -> argparse.Namespace:
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
    return parser.parse_args()


def main() -> None:
    """Measures, and writes what is known after each part."""
    args = arguments()
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


if __name__ == "__main__":
    main()
