"""Collects what a run recorded into `training.json`, which ships with the model.

    python -m training.record --run R --data D --out engine/assets/nano/training.json

Reads curves.json and evaluation.json in R, and corpus.json in D.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from training.batches import ROW

POINTS = 100


def collect(run: Path, data: Path) -> dict[str, Any]:
    """Tokens, curves thinned to about POINTS, held-out loss by source, success by kind."""
    curves = json.loads((run / "curves.json").read_text())
    evaluation = json.loads((run / "evaluation.json").read_text())
    counts = json.loads((data / "corpus.json").read_text())
    every = max(1, len(curves["curves"]) // POINTS)
    return {
        "steps": curves["steps"],
        "seconds": round(curves["seconds"], 1),
        "unique_corpus_tokens": counts["tokens"],
        "corpus_tokens": curves["corpus_tokens"],
        "chat_tokens": curves["chat_tokens"],
        "row": ROW,
        "heldout_tokens": counts["heldout_tokens"],
        "heldout_before": evaluation["before"],
        "heldout_after": evaluation["after"],
        "success": evaluation["success"],
        "examples": evaluation["count"],
        "heldout": curves["heldout"],
        "curves": curves["curves"][::every],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of curves.json and evaluation.json")
    parser.add_argument("--data", type=Path, required=True, help="folder of corpus.json")
    parser.add_argument("--out", type=Path, default=Path("engine/assets/nano/training.json"), help="file")
    args = parser.parse_args()
    args.out.write_text(json.dumps(collect(args.run, args.data), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
