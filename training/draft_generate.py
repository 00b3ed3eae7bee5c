"""Lets the shipped target answer prompts, and packs what it wrote into rows.

python -m training.draft_generate --prompts P.npz --out ROWS.npz --rows 4096 --seconds 120
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from engine.model.checkpoint import load_checkpoint
from engine.model.tokenizer import load_tokenizer
from training.batches import ROW
from training.draft_data import as_prompts, packed
from training.draft_decode import Written, generate, new_decoder
from training.geometry import Geometry
from training.model import Model, use_bf16
from training.naming import from_checkpoint
from training.tokenizer import EOS, PAD

REPORT_SECONDS = 10.0


def load_target(folder: Path, device: torch.device) -> Model:
    """The shipped model, frozen; bf16 matrices on a GPU, float32 on the CPU."""
    _, weights = load_checkpoint(folder, torch.float32, torch.device("cpu"), progress=lambda *_: None)
    model = Model(Geometry()).requires_grad_(False)
    from_checkpoint(model, weights)
    model = model.to(device)
    return use_bf16(model) if device.type == "cuda" else model


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True, help="what training.draft_data wrote")
    parser.add_argument("--model", type=Path, default=Path("engine/assets/nano"), help="model folder")
    parser.add_argument("--rows", type=int, default=4096, help="texts in flight")
    parser.add_argument("--count", type=int, default=0, help="prompts to answer (0: all)")
    parser.add_argument("--seconds", type=float, default=1e9, help="texts not finished by then are left out")
    parser.add_argument("--limit", type=int, default=512, help="tokens of a text, its prompt included")
    parser.add_argument("--alone", action="store_true", help="a row for each text, of LIMIT tokens")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    """Decodes until all prompts are answered or the time is up, and writes the rows."""
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(args.model)
    target = load_target(args.model, device)
    with np.load(args.prompts) as file:
        prompts = as_prompts(dict(file), args.count)
    decoder = new_decoder(target, args.rows, args.limit, tokenizer.token_id(EOS))
    began = reported = time.monotonic()
    parts: list[Written] = []
    texts = tokens = new = 0
    for part in generate(decoder, prompts):
        parts.append(part)
        texts += len(part.lengths)
        tokens += int(part.lengths.sum())
        new += int((part.lengths - part.prompts).sum())
        passed = time.monotonic() - began
        if time.monotonic() - reported > REPORT_SECONDS or passed > args.seconds:
            reported = time.monotonic()
            print(
                f"{passed:.0f} s: {texts:,} texts, {tokens:,} tokens ({tokens / passed:,.0f}/s), {new:,} new",
                flush=True,
            )
        if passed > args.seconds:
            break
    width = args.limit if args.alone else ROW
    rows = packed(parts, tokenizer.token_id(PAD), width, args.alone)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(args.out, allow_pickle=False, **rows)
    print(f"{texts:,} texts in {len(rows['ids']):,} rows, {new:,} new of {tokens:,} tokens", flush=True)


if __name__ == "__main__":
    main()
