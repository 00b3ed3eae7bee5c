"""Measures a trained state: held-out nats before and after rounding, success on held-out tasks of each kind.

    python -m training.evaluate --state RUN/state.pt --data DIR --out evaluation.json

Replies are decoded greedily without a grammar; the whole row is recomputed for each token, which on a GPU is
quick enough for some hundred short prompts a kind.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.model.encoding import load_encoding
from engine.model.tokenizer import Tokenizer, load_tokenizer
from training.attention import CHUNK
from training.batches import ROW
from training.export import load_model
from training.model import Model
from training.tasks import KINDS, Example, check, generate, prompt_ids
from training.tokenizer import EOS, PAD

PROMPT_LIMIT = {"json": 110}
LONGEST_PROMPT = 640
REPLY_LIMIT = 160


@torch.no_grad()
def heldout_nats(model: Model, data: Path, rows_per_batch: int = 16) -> dict[str, float]:
    """Mean nats a token of each held-out source, of all, and of all with dense attention ("all, dense")."""
    device = model.embed.weight.device
    result: dict[str, float] = {}
    sums = {"select": 0.0, "dense": 0.0}
    count = 0
    with np.load(data / "heldout.npz") as streams:
        for name in sorted(streams):
            rows, labels = _rows(streams[name])
            for stage in sums:
                total = 0.0
                for at in range(0, len(rows), rows_per_batch):
                    part = slice(at, at + rows_per_batch)
                    nats, _, _ = model(rows[part].to(device), labels[part].to(device), stage)
                    total += float(nats.sum())
                sums[stage] += total
                if stage == "select":
                    result[name] = total / int((labels >= 0).sum())
            count += int((labels >= 0).sum())
    result["all"] = sums["select"] / count
    result["all, dense"] = sums["dense"] / count
    return result


def _rows(stream: np.ndarray) -> tuple[Tensor, Tensor]:
    """Ids and labels [rows, ROW] of a stream; the last row is padded, without labels."""
    ids = torch.from_numpy(stream).long()
    missing = -(len(ids) - 1) % ROW
    inputs = torch.cat((ids[:-1], ids.new_zeros(missing))).view(-1, ROW)
    labels = torch.cat((ids[1:], ids.new_full((missing,), -1))).view(-1, ROW)
    return inputs, labels


@torch.no_grad()
def greedy(model: Model, prompts: Sequence[list[int]], limit: int, eos: int, pad: int) -> list[list[int]]:
    """Greedy replies, each up to and without EOS or `limit` tokens."""
    device = model.embed.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = max(map(len, prompts)) + limit
    width += -width % CHUNK
    ids = torch.full((len(prompts), width), pad, device=device)
    for index, prompt in enumerate(prompts):
        ids[index, : len(prompt)] = torch.tensor(prompt, device=device)
    rows = torch.arange(len(prompts), device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for _ in range(limit):
        needed = int(lengths.max())
        needed += -needed % CHUNK
        streams, _, _ = model.streams(ids[:, :needed], "select")
        last = streams.view(len(prompts), needed, *streams.shape[1:])[rows, lengths - 1]
        token = model.head.logits(last).argmax(-1)
        done |= token == eos
        ids[rows, lengths] = torch.where(done, ids[rows, lengths], token)
        lengths += (~done).long()
        if bool(done.all()):
            break
    texts = ids.tolist()
    return [texts[i][len(p) : int(lengths[i])] for i, p in enumerate(prompts)]


def heldout_examples(kind: str, count: int, model_folder: Path, tokenizer: Tokenizer) -> list[Example]:
    """The first `count` held-out examples of a kind whose prompt is short enough."""
    encoding = load_encoding(model_folder)
    limit = PROMPT_LIMIT.get(kind, LONGEST_PROMPT)
    found: list[Example] = []
    seed = 0
    while len(found) < count:
        example = generate(kind, seed, "heldout")
        seed += 1
        if len(prompt_ids(example, encoding, tokenizer)) <= limit:
            found.append(example)
    return found


def success(model: Model, kind: str, count: int, folder: Path) -> tuple[float, list[dict[str, object]]]:
    """Share of held-out examples answered rightly, and some of the replies."""
    encoding, tokenizer = load_encoding(folder), load_tokenizer(folder)
    examples = heldout_examples(kind, count, folder, tokenizer)
    prompts = [prompt_ids(example, encoding, tokenizer) for example in examples]
    replies = greedy(model, prompts, REPLY_LIMIT, tokenizer.token_id(EOS), tokenizer.token_id(PAD))
    right = 0
    shown: list[dict[str, object]] = []
    for example, prompt, reply in zip(examples, prompts, replies, strict=True):
        text = tokenizer.decode(reply, skip_special=False)
        good = check(example, text)
        right += good
        if len(shown) < 12:
            asked = tokenizer.decode(prompt, skip_special=False)
            shown.append({"prompt": asked, "reply": text, "wanted": example.answer, "right": good})
    return right / count, shown


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, required=True, help="state.pt of training.train")
    parser.add_argument("--data", type=Path, required=True, help="folder of heldout.npz")
    parser.add_argument(
        "--model", type=Path, default=Path("engine/assets/nano"), help="tokenizer and encoding.json"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--count", type=int, default=128, help="examples a kind")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="stop starting further kinds after this time"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    before = heldout_nats(load_model(args.state, device, quantise=False), args.data)
    model = load_model(args.state, device, quantise=True)
    after = heldout_nats(model, args.data)
    print(
        f"held-out nats before {before['all']:.4f}, after {after['all']:.4f}, "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )
    rates: dict[str, float] = {}
    samples: dict[str, list[dict[str, object]]] = {}
    for kind in KINDS:
        if time.monotonic() - began > args.seconds:
            break
        rates[kind], samples[kind] = success(model, kind, args.count, args.model)
        print(f"{kind}: {rates[kind]:.1%} of {args.count} ({time.monotonic() - began:.0f} s)", flush=True)
    content = {"before": before, "after": after, "success": rates, "count": args.count, "samples": samples}
    args.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
