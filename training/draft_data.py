"""Training text of the draft: prompts, what the target wrote after them, and rows packed of both.

    python -m training.draft_data --corpus C --data D --out P.npz [--heldout]
    python -m training.draft_data --bench bench/prompts.jsonl --out P.npz

Prompts are tasks of the target's own generators and openings of its documents. The held-out set uses the
held-out split of the generators and held-out documents.
"""

import argparse
import json
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from engine.model.encoding import load_encoding
from engine.model.tokenizer import load_tokenizer
from training.documents import training_files
from training.draft_decode import Prompts, Written
from training.start import LEFT_OUT
from training.tasks import KINDS, Corpus, prompt_ids, stream
from training.tokenizer import BOS

# More even than the target's mixture: the draft is judged on each kind alike, and long answers teach more.
WEIGHTS = {
    "json": 0.22,
    "json_deep": 0.12,
    "extraction": 0.17,
    "tools": 0.09,
    "arithmetic": 0.13,
    "sequences": 0.18,
    "definitions": 0.03,
    "conversations": 0.04,
    "control": 0.02,
}
PROSE = len(KINDS)
BENCH_KINDS = ("prose", "json", "extraction", "copying", "arithmetic")
LONGEST_PROMPT = 352
PROSE_PROMPT = (12, 160)
HEAT = {0.0: 0.45, 0.7: 0.30, 1.0: 0.25}
HELDOUT_HEAT = {0.0: 0.5, 1.0: 0.5}
# Far from the seeds of the target's training shards and of every benchmark.
FIRST_SEED, HELDOUT_SEED = 900_000, 1_900_000
NOTHING, ASKED, ANSWERED = 0, 1, 2
"""What a token of a row is: padding, prompt, answer."""

_documents = Corpus()


def _tasks(seed: int, count: int, folder: Path, heldout: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids [count, LONGEST_PROMPT], and each one's kind and length [count, 2]."""
    encoding, tokenizer = load_encoding(folder), load_tokenizer(folder)
    kinds = {kind: number for number, kind in enumerate(KINDS)}
    found = np.zeros((count, LONGEST_PROMPT), dtype=np.int16)
    about = np.zeros((count, 2), dtype=np.int64)
    at = 0
    for example in stream(seed, _documents, WEIGHTS, "heldout" if heldout else "train"):
        ids = prompt_ids(example, encoding, tokenizer)
        if len(ids) > LONGEST_PROMPT:
            continue
        found[at, : len(ids)] = ids
        about[at] = kinds[example.kind], len(ids)
        at += 1
        if at == count:
            break
    return found, about


def prose_prompts(tokens: np.ndarray, count: int, bos: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Openings cut anywhere from a stream of documents, each after a BOS."""
    random = np.random.default_rng(seed)
    lengths = random.integers(*PROSE_PROMPT, size=count)
    opens = np.flatnonzero(tokens == bos)
    starts = np.where(
        random.random(count) < 0.5, random.choice(opens, count) + 1, random.integers(0, len(tokens), count)
    )
    found = np.zeros((count, LONGEST_PROMPT), dtype=np.int16)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        ids = tokens[start : start + length - 1]
        ends = np.flatnonzero(ids == bos)
        ids = ids[: max(ends[0] - 1, 0)] if len(ends) else ids
        lengths[row] = len(ids) + 1
        found[row, 0], found[row, 1 : len(ids) + 1] = bos, ids
    return found, np.stack((np.full(count, PROSE), lengths), 1)


def make_prompts(
    corpus: Path, data: Path, folder: Path, chats: int, prose: int, heldout: bool, workers: int
) -> dict[str, np.ndarray]:
    """ids [N, LONGEST_PROMPT], lengths, heat and kinds [N] in random order."""
    global _documents
    _documents = Corpus() if heldout else Corpus.load(training_files(corpus))
    first = HELDOUT_SEED if heldout else FIRST_SEED
    each = -(-chats // workers)
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        jobs = [pool.submit(_tasks, first + i, each, folder, heldout) for i in range(workers)]
        parts = [job.result() for job in jobs]
    bos = load_tokenizer(folder).token_id(BOS)
    if heldout:
        with np.load(data / "heldout.npz") as streams:
            tokens = np.concatenate([streams[name] for name in sorted(streams) if name not in LEFT_OUT])
    else:
        tokens = np.load(data / "corpus.npy", mmap_mode="r")
    parts.append(prose_prompts(tokens, prose, bos, first))
    random = np.random.default_rng(first)
    order = random.permutation(sum(len(ids) for ids, _ in parts))
    ids, about = (np.concatenate([part[i] for part in parts])[order] for i in (0, 1))
    heat = HELDOUT_HEAT if heldout else HEAT
    chosen = random.choice(np.array(list(heat), dtype=np.float32), len(ids), p=list(heat.values()))
    return {"ids": ids, "lengths": about[:, 1], "heat": chosen, "kinds": about[:, 0]}


def bench_prompts(file: Path, folder: Path) -> dict[str, np.ndarray]:
    """The prompts of a file of training.draft_prompts, to be answered greedily; kinds are BENCH_KINDS."""
    encoding, tokenizer = load_encoding(folder), load_tokenizer(folder)
    found: list[list[int]] = []
    kinds: list[int] = []
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        kinds.append(BENCH_KINDS.index(entry["kind"]))
        if "prompt" in entry:
            found.append([tokenizer.token_id(BOS), *tokenizer.encode_plain(entry["prompt"])])
        else:
            segments = encoding.segments(entry["messages"], thinking=entry["thinking"])
            found.append(tokenizer.encode_segments(segments))
    ids = np.zeros((len(found), max(map(len, found))), dtype=np.int16)
    for row, prompt in enumerate(found):
        ids[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in found])
    return {
        "ids": ids,
        "lengths": lengths,
        "heat": np.zeros(len(found), np.float32),
        "kinds": np.array(kinds),
    }


def as_prompts(arrays: dict[str, np.ndarray], count: int = 0) -> Prompts:
    """The first `count` prompts (0: all), as the decoder takes them."""
    stop = count or len(arrays["lengths"])
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values[:stop])) for name, values in arrays.items()}
    return Prompts(tensors["ids"], tensors["lengths"], tensors["heat"], tensors["kinds"])


def packed(parts: Iterable[Written], pad: int, width: int, alone: bool) -> dict[str, np.ndarray]:
    """Rows of whole texts: ids int16 and marks int8 [R, width]; and of each text its row, start, answer,
    stop, temperature in tenths and kind, [N, 6] int64.

    alone  a row for each text, as it is served; otherwise as many as fit
    """
    ids, marks, texts = [np.full(width, pad, np.int16)], [np.zeros(width, np.int8)], []
    at = 0
    for part in parts:
        written = part.ids.numpy()
        columns = (part.lengths, part.prompts, (part.heat * 10).round().long(), part.kinds)
        for row, (length, prompt, heat, kind) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            if at + length > width or (alone and at):
                ids.append(np.full(width, pad, np.int16))
                marks.append(np.zeros(width, np.int8))
                at = 0
            ids[-1][at : at + length] = written[row, :length]
            marks[-1][at : at + prompt] = ASKED
            marks[-1][at + prompt : at + length] = ANSWERED
            texts.append((len(ids) - 1, at, at + prompt, at + length, heat, kind))
            at += length
    return {"ids": np.stack(ids), "marks": np.stack(marks), "texts": np.array(texts)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, help="folder with docs-*.jsonl.xz")
    parser.add_argument("--data", type=Path, help="folder of corpus.npy and heldout.npz")
    parser.add_argument("--bench", type=Path, help="only the prompts of this file")
    parser.add_argument("--model", type=Path, default=Path("engine/assets/nano"), help="model folder")
    parser.add_argument("--chats", type=int, default=240_000, help="prompts of tasks")
    parser.add_argument("--prose", type=int, default=60_000, help="openings of documents")
    parser.add_argument("--heldout", action="store_true", help="from the held-out split")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    began = time.monotonic()
    if args.bench:
        arrays = bench_prompts(args.bench, args.model)
    else:
        arrays = make_prompts(
            args.corpus, args.data, args.model, args.chats, args.prose, args.heldout, args.workers
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(args.out, allow_pickle=False, **arrays)
    print(
        f"{len(arrays['lengths']):,} prompts of {arrays['lengths'].mean():.0f} tokens on average, "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
