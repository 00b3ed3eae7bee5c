"""Draws the training curves of a model folder: `curves.png` from `training.json`.

    python -m training.curves engine/assets/nano

`training.json` is what training.train and training.evaluate recorded; matplotlib comes with the [test] extra.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

from training.schedule import CHAT_LATE, DECAY_FROM, INDEX_FROM, QUANTISE_FROM, SELECT_FROM

matplotlib.use("Agg")
# Where each stage begins, as a share of the run.
STAGES = {
    "indexer learns": INDEX_FROM,
    "decay": DECAY_FROM,
    "mostly chat": CHAT_LATE[0],
    "selection": SELECT_FROM,
    "rounding": QUANTISE_FROM,
}


def draw_losses(axes: Axes, record: dict[str, Any]) -> None:
    """Nats a token of corpus rows, chat answers and the held-out batch."""
    curves = record["curves"]
    progress = [point["progress"] for point in curves]
    axes.plot(progress, [point["corpus_nats"] for point in curves], lw=0.8, label="corpus rows")
    answered = [point for point in curves if point["chat_nats"] > 0]
    axes.plot(
        [point["progress"] for point in answered],
        [point["chat_nats"] for point in answered],
        lw=0.8,
        label="chat answers",
    )
    held = record["heldout"]
    axes.plot([p["progress"] for p in held], [p["nats"] for p in held], "k.-", lw=1, ms=4, label="held-out")
    axes.set(ylabel="nats a token", ylim=(0, 4))
    axes.legend(loc="upper right", fontsize=8)


def draw_indexer(axes: Axes, record: dict[str, Any]) -> None:
    """Cross-entropy of the three indexers against the attention that they predict, summed."""
    learning = [point for point in record["curves"] if point["index_loss"] > 0]
    axes.plot(
        [p["progress"] for p in learning], [p["index_loss"] for p in learning], lw=0.8, color="tab:green"
    )
    axes.set(ylabel="indexers, nats", xlabel="share of the run", xlim=(0, 1))


def draw(record: dict[str, Any], file: Path) -> None:
    """Both panels, with a line where each stage begins."""
    figure, (losses, indexer) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5.4), height_ratios=(3, 1))
    draw_losses(losses, record)
    draw_indexer(indexer, record)
    for height, (name, start) in enumerate(STAGES.items()):
        for axes in (losses, indexer):
            axes.axvline(start, color="0.7", lw=0.8)
        losses.text(start + 0.004, 3.8 - 0.22 * height, name, fontsize=8, va="top", color="0.3")
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Software": None})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="model folder with training.json")
    folder = parser.parse_args().folder
    draw(json.loads((folder / "training.json").read_text()), folder / "curves.png")


if __name__ == "__main__":
    main()
