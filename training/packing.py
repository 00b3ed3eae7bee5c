"""Generates chat examples and packs them into rows of 2,048 ids, in parallel.

    python -m training.packing --corpus DIR --out DIR/tasks --shards 28

A shard is `tasks-SEED.npz`: `ids` int16 [rows, 2048] and `answers`, bits [rows, 256 bytes] that mark the ids
to be predicted. Rows start with an example, hold whole examples only, and end in padding; some are recall
rows. Shards of different seeds share no example, and appear under their name only when complete: training may
start while they are being made.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from engine.model.encoding import load_encoding
from engine.model.tokenizer import load_tokenizer
from training.batches import ROW
from training.documents import training_files
from training.recall import ONE_ROW_IN, recall_row
from training.tasks import Corpus, Rendered, render, stream
from training.tasks.draw import Draw
from training.tokenizer import PAD

OPEN_ROWS = 24


@dataclass(slots=True)
class Row:
    """A row that is being filled."""

    ids: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)

    def add(self, example: Rendered) -> None:
        """Appends an example that fits."""
        self.ids.extend(example.ids)
        self.marks.extend(example.mask)

    def closed(self, pad_id: int) -> tuple[list[int], list[int]]:
        """Ids and marks, padded to ROW."""
        missing = ROW - len(self.ids)
        return self.ids + [pad_id] * missing, self.marks + [0] * missing


def packed(examples: Iterable[Rendered], pad_id: int) -> Iterator[tuple[list[int], list[int]]]:
    """Rows of whole examples; each example goes to the fullest open row that it fits in."""
    rows: list[Row] = []
    for example in examples:
        size = len(example.ids)
        if size > ROW:
            continue
        fitting = [row for row in rows if len(row.ids) + size <= ROW]
        if fitting:
            max(fitting, key=lambda row: len(row.ids)).add(example)
            continue
        if len(rows) == OPEN_ROWS:
            fullest = max(rows, key=lambda row: len(row.ids))
            rows.remove(fullest)
            yield fullest.closed(pad_id)
        rows.append(Row())
        rows[-1].add(example)


def write_shard(seed: int, rows: int, model_folder: Path, corpus: Corpus, out: Path) -> int:
    """Makes one shard and returns the number of marked ids."""
    encoding, tokenizer = load_encoding(model_folder), load_tokenizer(model_folder)
    examples = (render(example, encoding, tokenizer) for example in stream(seed, corpus))
    ids = np.empty((rows, ROW), dtype=np.int16)
    marks = np.empty((rows, ROW), dtype=bool)
    chat = packed(examples, tokenizer.token_id(PAD))
    draw = Draw("recall", seed, heldout=False)
    for index in range(rows):
        if index % ONE_ROW_IN:
            ids[index], marks[index] = next(chat)
        else:
            ids[index], marks[index] = recall_row(draw, tokenizer, corpus.paragraphs, ROW)
    part = out / f"part-{seed}.npz"
    np.savez(part, ids=ids, answers=np.packbits(marks, axis=1))
    part.rename(out / f"tasks-{seed:05d}.npz")
    return int(marks.sum())


# Set once before the workers are forked: they share the documents without a copy.
_documents = Corpus()


def _work(seed: int, rows: int, model_folder: Path, out: Path) -> int:
    return write_shard(seed, rows, model_folder, _documents, out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder with docs-*.jsonl.xz")
    parser.add_argument(
        "--model", type=Path, default=Path("engine/assets/nano"), help="tokenizer and encoding.json"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--shards", type=int, default=28, help="how many shards")
    parser.add_argument("--rows", type=int, default=2000, help="rows a shard")
    parser.add_argument("--first-seed", type=int, default=1, help="seed of the first shard")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    global _documents
    _documents = Corpus.load(training_files(args.corpus))
    with ProcessPoolExecutor(args.workers, mp_context=get_context("fork")) as pool:
        seeds = range(args.first_seed, args.first_seed + args.shards)
        jobs = [pool.submit(_work, seed, args.rows, args.model, args.out) for seed in seeds]
        for number, job in enumerate(as_completed(jobs), 1):
            tokens = args.rows * ROW
            print(
                f"{number} of {args.shards} shards, {time.monotonic() - began:.0f} s: {tokens:,} ids, "
                f"{job.result() / tokens:.1%} marked",
                flush=True,
            )


if __name__ == "__main__":
    main()
