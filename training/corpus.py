"""Tokenises the corpus: one stream of ids with BOS before and EOS after each document.

    python -m training.corpus --corpus DIR --tokenizer engine/assets/nano --out DIR

Writes `corpus.npy` (int16), `heldout.npz` (one stream a source) and `corpus.json` (counts). All cores are
used; a minute on one. A training row is any 2,049 neighbouring ids of the stream.
"""

import argparse
import json
import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training.documents import Document, heldout_file, read_documents, training_files
from training.tokenizer import BOS, EOS

BATCH = 2048


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def known_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token by its string; KeyError where the vocabulary lacks it."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def stream(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """All texts as one int16 vector; ids are below 8,192, so int16 holds them and torch can index it."""
    bos, eos = known_id(tokenizer, BOS), known_id(tokenizer, EOS)
    pieces: list[int] = []
    for batch in _batches(texts):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            pieces.append(bos)
            pieces.extend(encoding.ids)
            pieces.append(eos)
    return np.array(pieces, dtype=np.int16)


def _batches(texts: Iterable[str]) -> Iterable[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def heldout_streams(tokenizer: Tokenizer, corpus: Path) -> dict[str, np.ndarray]:
    """Held-out ids of each source."""

    def source(document: Document) -> str:
        return document.source

    documents = sorted(read_documents(heldout_file(corpus)), key=source)
    return {name: stream(tokenizer, (d.text for d in group)) for name, group in groupby(documents, source)}


def prepare(corpus: Path, tokenizer_folder: Path, out: Path) -> dict[str, object]:
    """Writes the three files and returns the counts."""
    began = time.monotonic()
    tokenizer = load_tokenizer(tokenizer_folder)
    out.mkdir(parents=True, exist_ok=True)
    parts = []
    for path in training_files(corpus):
        parts.append(stream(tokenizer, (document.text for document in read_documents(path))))
        print(f"{path.name}: {len(parts[-1]):,} tokens after {time.monotonic() - began:.0f} s", flush=True)
    tokens = np.concatenate(parts)
    np.save(out / "corpus.npy", tokens)
    heldout = heldout_streams(tokenizer, corpus)
    np.savez(out / "heldout.npz", allow_pickle=False, **heldout)
    counts: dict[str, object] = {
        "tokens": len(tokens),
        "heldout_tokens": {name: len(ids) for name, ids in heldout.items()},
    }
    (out / "corpus.json").write_text(json.dumps(counts, indent=1) + "\n")
    return counts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder with docs-*.jsonl.xz")
    parser.add_argument("--tokenizer", type=Path, default=Path("engine/assets/nano"), help="model folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    args = parser.parse_args()
    print(json.dumps(prepare(args.corpus, args.tokenizer, args.out)))


if __name__ == "__main__":
    main()
