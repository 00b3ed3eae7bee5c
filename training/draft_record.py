"""Collects what the draft's run and its checks recorded into `draft.json`, which ships with the model.

    python -m training.draft_record --run R --evaluation R/draft-evaluation.json --bench BENCH.npz \\
        --out engine/assets/nano/draft.json

Fails where a check isn't passed. Some short texts of BENCH go along, so that a test can measure the shipped
draft on what the target wrote.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from training.draft_data import BENCH_KINDS
from training.draft_model import DraftShape

POINTS = 40
SAMPLES = 3
LONGEST_SAMPLE = 120


class GateFailed(Exception):
    """The draft doesn't do what a sound draft does."""


def gates(found: dict[str, Any], block: int) -> dict[str, dict[str, Any]]:
    """Each check: the figures that it looks at, and whether it is passed."""
    plain, bare, mixed = (found[name]["chance_given_before"] for name in ("plain", "no_markov", "shuffled"))
    kept = [round(without / whole, 4) for without, whole in zip(bare, plain, strict=True)]
    rollout, greedy = found["rollout"], found["bench_greedy"]["all"]
    areas, bias = found["confidence"]["auc_all"], found["confidence"]["bias_at_temperature_1"]
    return {
        "overfits_50_conversations": {**found["overfit"], "passed": found["overfit"]["tau"] > 0.8 * block},
        "markov_head_helps_later_positions_more": {
            "share_of_acceptance_left_without_it": kept,
            "passed": all(share < kept[0] for share in kept[1:]),
        },
        "needs_its_context": {
            "first_position": plain[0],
            "with_shuffled_context": mixed[0],
            "passed": mixed[0] < 0.25 * plain[0],
        },
        "serial_decoding_as_walked": {
            **rollout,
            "passed": abs(rollout["length"] / rollout["walked_length"] - 1) < 0.02,
        },
        "decoding_within_a_tenth_of_tau": {
            "length": greedy["length"],
            "tau": greedy["tau_greedy"],
            "passed": greedy["length"] > 0.9 * greedy["tau_greedy"],
        },
        "confidence": {"auc": areas, "bias": bias, "passed": areas > 0.75 and abs(bias) < 0.05},
    }


def samples(bench: Path) -> list[dict[str, Any]]:
    """The first short texts of each kind: prompt and greedy answer."""
    chosen: list[dict[str, Any]] = []
    with np.load(bench) as arrays:
        ids, texts = arrays["ids"], arrays["texts"]
    for number, kind in enumerate(BENCH_KINDS):
        short = [t for t in texts.tolist() if t[5] == number and t[3] - t[1] <= LONGEST_SAMPLE][:SAMPLES]
        for row, start, answer, stop, *_ in short:
            prompt, reply = ids[row, start:answer].tolist(), ids[row, answer:stop].tolist()
            chosen.append({"kind": kind, "prompt": prompt, "reply": reply})
    return chosen


def collect(run: Path, evaluation: Path, bench: Path) -> dict[str, Any]:
    """The whole record. raises GateFailed"""
    trained = json.loads((run / "draft.json").read_text())
    found = json.loads(evaluation.read_text())
    shape = DraftShape()
    checks = gates(found, shape.block)
    if failed := [name for name, check in checks.items() if not check["passed"]]:
        raise GateFailed(", ".join(failed))
    every = max(1, len(trained["curves"]) // POINTS)
    tables = {name: found[name] for name in ("bench_greedy", "heldout_greedy", "heldout_sampled")}
    return {
        "shape": asdict(shape),
        **{name: trained[name] for name in ("steps", "rows", "blocks")},
        "seconds": round(trained["seconds"], 1),
        "gates": checks,
        "acceptance": tables,
        "confidence": found["confidence"],
        "watched": trained["watched"],
        "curves": trained["curves"][::every],
        "samples": samples(bench),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of training.draft_train's draft.json")
    parser.add_argument("--evaluation", type=Path, required=True, help="what training.draft_gates wrote")
    parser.add_argument("--bench", type=Path, required=True, help="rows of bench/prompts.jsonl")
    parser.add_argument("--out", type=Path, default=Path("engine/assets/nano/draft.json"), help="file")
    args = parser.parse_args()
    args.out.write_text(
        json.dumps(collect(args.run, args.evaluation, args.bench), separators=(",", ":")) + "\n"
    )


if __name__ == "__main__":
    main()
