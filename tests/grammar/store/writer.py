"""A process that reads and publishes at random in a store until it is killed, or that finds its disk full."""

from __future__ import annotations

import random
import resource
import sys
from pathlib import Path

from engine.grammar.key import GrammarKey
from engine.grammar.store import Store
from engine.messages import GrammarArtifact

KEYS = 24
SCOPE = "of the test"


def key_of(number: int) -> GrammarKey:
    """One of a few keys."""
    return GrammarKey("ebnf", f'root ::= "{number}"')


def artifact_of(key: GrammarKey, size: int) -> GrammarArtifact:
    """Whose payload says whose it is."""
    payload = (key.digest.encode() * (size // 64 + 1))[:size]
    return GrammarArtifact(key.wire(), payload, size, b"p" * 32, 10 * size, 0.25, 0.125)


def write_for_ever(root: Path, limit: int, seed: int) -> None:
    """Publishes, reads and checks; one line of output for each entry that was read."""
    store = Store(root, SCOPE, limit)
    chance = random.Random(seed)
    while True:
        key = key_of(chance.randrange(KEYS))
        with store.locked(key):
            found = store.read(key)
            if found is None or chance.random() < 0.5:
                store.publish(artifact_of(key, chance.randrange(1, 4000)), key)
            else:
                assert found == artifact_of(key, len(found.payload))
                print(".", flush=True)


def fill_the_disk(root: Path) -> None:
    """Prints what the store makes of a file system that takes no more than 1000 bytes a file."""
    store = Store(root, SCOPE, 1 << 20)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    small, large = key_of(1), key_of(2)
    with store.locked(small), store.locked(large):
        print(store.publish(artifact_of(small, 10), small), store.publish(artifact_of(large, 5000), large))
    print(store.read(large), dict(store.errors))


if __name__ == "__main__":
    if sys.argv[1] == "full":
        fill_the_disk(Path(sys.argv[2]))
    else:
        write_for_ever(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
