"""What a rank's exchange did, for the metrics; no decision reads it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from engine.errors import ExchangeError
from engine.exchange import STEP, TIER, Exchange
from engine.exchange.native import NativeExchange, library
from engine.metrics_buckets import figures_of, key_of, keys_of
from engine.metrics_tables import CHANNELS, EXCHANGE_TIMES

NS = 1e-9


class ExchangeMeter:
    """Figures of one rank's exchange.

    offered_s  when this rank last said what it wants, on the monotonic clock; 0: never
    errors     faults that ended it, by (channel, class in engine/errors.py)
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.offered_s = 0.0
        self.errors: dict[tuple[str, str], int] = {}
        self._now_s = now_s
        self._exchange: NativeExchange | None = None
        self._keys: list[list[list[str]]] = []
        self._figures: dict[str, float] = {}

    def opened(self, exchange: Exchange) -> None:
        """The native exchange times itself; of others only `offered_s` and the errors are known."""
        if isinstance(exchange, NativeExchange):
            self._exchange = exchange
            bounds = [bound / 1e9 for bound in library().BOUNDS_NS]
            self._keys = [
                [keys_of(name, bounds, {"channel": channel}) for name in EXCHANGE_TIMES]
                for channel in CHANNELS
            ]

    def offered(self) -> None:
        """This rank says what it wants of a step."""
        self.offered_s = self._now_s()

    def failed(self, error: Exception, channel: int = STEP) -> None:
        """The exchange has ended with this error."""
        at = (CHANNELS[channel], type(error).__name__)
        self.errors[at] = self.errors.get(at, 0) + 1

    def figures(self) -> dict[str, float]:
        """All figures by name, as in Ledger; the last ones where the exchange has closed."""
        if self._exchange is not None:
            for number in (STEP, TIER):
                try:
                    counts, sums = self._exchange.channel(number).times()
                except ExchangeError:
                    self._exchange = None
                    break
                self._note(number, np.frombuffer(counts, np.uint64).reshape(len(EXCHANGE_TIMES), -1), sums)
        for (channel, code), count in self.errors.items():
            self._figures[key_of("dp2_sync_errors_total", {"channel": channel, "code": code})] = count
        return self._figures

    def _note(self, number: int, counts: np.ndarray, sums: bytes) -> None:
        spent = np.frombuffer(sums, np.int64)
        for keys, row, ns in zip(self._keys[number], counts.tolist(), spent.tolist(), strict=True):
            self._figures |= figures_of(keys, row, ns * NS)
        exchanges = key_of("dp2_sync_exchanges_total", {"channel": CHANNELS[number]})
        self._figures[exchanges] = int(counts[0].sum())
