"""The folder of a checkpoint without weights, as the trivial rank's tests have it."""

from tests.actors.conftest import model

__all__ = ["model"]
