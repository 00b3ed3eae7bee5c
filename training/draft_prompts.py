"""Writes the prompts that drafting is measured on: equal parts of five kinds of text.

    python -m training.draft_prompts --out bench/prompts.jsonl

A line is `{"kind", "prompt"}`, running text to go on with, or `{"kind", "messages", "thinking"}`, a chat.
Prose opens documents of bench/heldout.jsonl.xz; the rest are tasks of the held-out split, from seeds that
neither training nor `bench nano` uses. No tools and no response format: what is shown is the whole prompt.
"""

import argparse
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.model.encoding import load_encoding
from engine.model.tokenizer import Tokenizer, load_tokenizer
from training.tasks import Example, generate, prompt_ids

FIRST_SEED = 7_500_000
COUNT = 16
SHORTEST_PROMPT, LONGEST_PROMPT = 12, 600
# A reply of a few tokens is one or two steps of decoding and says nothing about drafts.
SHORTEST_ANSWER, LONGEST_ANSWER = 16, 200
PROSE_CHARACTERS = 320
CHATS = {"json": "json", "extraction": "extraction", "copying": "sequences", "arithmetic": "arithmetic"}


def prose(file: Path, count: int) -> Iterator[dict[str, Any]]:
    """Openings of documents, the sources in turn, each cut after a whole word."""
    by_source: dict[str, list[str]] = {}
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            if len(document["text"]) > 2 * PROSE_CHARACTERS:
                by_source.setdefault(document["source"], []).append(document["text"])
    for number in range(count):
        texts = by_source[sorted(by_source)[number % len(by_source)]]
        text = texts[number // len(by_source)]
        yield {"kind": "prose", "prompt": text[: text.rindex(" ", 0, PROSE_CHARACTERS)]}


def chats(kind: str, count: int, tokenizer: Tokenizer, folder: Path) -> Iterator[dict[str, Any]]:
    """The first `count` fitting tasks of a kind."""
    encoding = load_encoding(folder)
    seed, found = FIRST_SEED, 0
    while found < count:
        example = generate(CHATS[kind], seed, "heldout")
        seed += 1
        if not FITS[kind](example):
            continue
        answer = str(example.answer.get("reasoning_content", "")) + str(example.answer["content"])
        prompt = len(prompt_ids(example, encoding, tokenizer))
        asked = SHORTEST_PROMPT <= prompt <= LONGEST_PROMPT
        if asked and SHORTEST_ANSWER <= len(tokenizer.encode_plain(answer)) <= LONGEST_ANSWER:
            found += 1
            yield {"kind": kind, "messages": list(example.messages), "thinking": example.thinking}


def _plain(example: Example) -> bool:
    return not (example.tools or example.response_format or example.thinking or example.effort)


def _copies(example: Example) -> bool:
    """Whether the answer stands in the prompt as it is."""
    return _plain(example) and str(example.answer["content"]) in str(example.messages[-1]["content"])


def _reasons(example: Example) -> bool:
    """Arithmetic with its steps: the result alone is too short."""
    return example.thinking and not example.effort


FITS: dict[str, Callable[[Example], bool]] = {
    "json": _plain,
    "extraction": _plain,
    "copying": _copies,
    "arithmetic": _reasons,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--heldout", type=Path, default=Path("bench/heldout.jsonl.xz"), help="held-out documents"
    )
    parser.add_argument("--model", type=Path, default=Path("engine/assets/nano"), help="model folder")
    parser.add_argument("--count", type=int, default=COUNT, help="prompts of each kind")
    parser.add_argument("--out", type=Path, default=Path("bench/prompts.jsonl"), help="file to write")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    lines = list(prose(args.heldout, args.count))
    for kind in CHATS:
        lines += chats(kind, args.count, tokenizer, args.model)
    args.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    print(f"{len(lines)} prompts in {args.out}")


if __name__ == "__main__":
    main()
