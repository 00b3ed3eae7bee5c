"""Trains the tokenizer: byte-level BPE of exactly 8,192 ids with DeepSeek-V4's special-token strings.

    python -m training.tokenizer --corpus DIR --out engine/assets/nano

About a minute on one core. Ids are never written down elsewhere: everybody looks them up by string.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.documents import read_documents, training_files

VOCAB_SIZE = 8192
BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
NOISE = "<｜place▁holder▁no▁799｜>"
# Only the first three are skipped by decoding, as in the released tokenizer.
CONTROL = (BOS, EOS, PAD)
MARKERS = (
    NOISE,
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
)

# A capitalised word and a digit never take the space before them: a name or a number then has the same
# tokens in a sentence and inside JSON quotes, which a small model needs to copy it.
WORDS = (
    r"\p{N}"
    r"| ?[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|\p{Lu}+(?!\p{Ll})"
    r"|[\p{Lu}\p{Lt}][\p{Ll}\p{M}]*"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def sample_texts(corpus: Path, max_characters: int) -> Iterator[str]:
    """Texts until `max_characters` are reached; JSON twice, as it is what the model is for."""
    taken = 0
    for path in training_files(corpus):
        for document in read_documents(path):
            repeats = 2 if document.source.startswith("json-") else 1
            for _ in range(repeats):
                yield document.text
            taken += repeats * len(document.text)
            if taken >= max_characters:
                return


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A tokenizer of exactly VOCAB_SIZE ids: control tokens first, markers last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(CONTROL),
        max_token_length=24,
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKERS])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != VOCAB_SIZE:
        raise ValueError(f"the tokenizer has {size} ids, wanted {VOCAB_SIZE}; give it more text")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    generation = {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder with docs-*.jsonl.xz")
    parser.add_argument("--out", type=Path, default=Path("engine/assets/nano"), help="folder to write to")
    parser.add_argument("--characters", type=int, default=60_000_000, help="characters of text to learn from")
    args = parser.parse_args()
    tokenizer = train_tokenizer(sample_texts(args.corpus, args.characters))
    save(tokenizer, args.out)
    print(f"{tokenizer.get_vocab_size()} ids written to {args.out}")


if __name__ == "__main__":
    main()
