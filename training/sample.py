"""Writes the held-out text that `bench nano` reads: sources that are public domain, MIT or Apache-2.0.

python -m training.sample --corpus DIR --out bench/heldout.jsonl.xz
"""

import argparse
import json
import lzma
from pathlib import Path

from training.documents import heldout_file, read_documents

# sqlite-doc and bible-web are public domain, nodejs-doc is MIT, rust-books is MIT or Apache-2.0.
SOURCES = ("bible-web", "nodejs-doc", "rust-books", "sqlite-doc")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder with heldout.jsonl.xz")
    parser.add_argument("--out", type=Path, default=Path("bench/heldout.jsonl.xz"), help="file to write")
    args = parser.parse_args()
    kept = [d for d in read_documents(heldout_file(args.corpus)) if d.source in SOURCES]
    with lzma.open(args.out, "wt", encoding="utf-8", preset=9) as lines:
        for document in kept:
            record = {"source": document.source, "text": document.text}
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
    print(f"{len(kept)} documents in {args.out}")


if __name__ == "__main__":
    main()
