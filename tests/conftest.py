"""The suite on several workers (`make test`): long files begin first; who needs the machine alone gets it."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FOLDER = pytest.StashKey[str]()


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """A test's turn beside those of other workers; one that is to be alone waits until theirs are over.

    Who waits to be alone holds the door, or tests that others begin meanwhile would keep it waiting.
    """
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells each worker the folder of the run's locks."""
    config = node.config
    if FOLDER not in config.stash:
        folder = tempfile.TemporaryDirectory(prefix="turns-")
        config.add_cleanup(folder.cleanup)
        config.stash[FOLDER] = folder.name
    node.workerinput["turns"] = config.stash[FOLDER]


# The outermost wrapper: a test's time-out begins when its turn has come.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A worker waits for each test's turn; without workers there is nothing to wait for."""
    told = getattr(item.config, "workerinput", None)
    if told is None:
        return (yield)
    with turn(Path(told["turns"]), item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take whole files, in this order: a slow file that begins last would be waited for."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
