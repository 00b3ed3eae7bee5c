"""A rank process for tests: reads one plan a line, exchanges as it says, answers with one line.

A plan has `way` (native, or collective), `rank`, `session` (or the store's `file`, and `ranks`), `timeout_s`,
`attach_s` and `steps`; a step has `channel`, `epoch`, `values`, `how` (spin, sleep, or asked: hears the peers
before it publishes), `pause_us` and `fault`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.errors import ExchangeError, ExchangeForked
from engine.exchange import Exchange
from engine.exchange.native import NativeExchange


def make(plan: dict[str, Any]) -> Exchange:
    """The exchange that the plan names."""
    if plan["way"] == "native":
        return NativeExchange(plan["session"], plan["rank"], plan["timeout_s"], plan["attach_s"])
    from engine.exchange.collective import CollectiveExchange
    from engine.exchange.gloo import open_group

    return CollectiveExchange(open_group(plan["rank"], plan["ranks"], plan["file"]), plan["timeout_s"])


class Rank:
    """One plan at work. `heard`: what each step heard, by peer."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.heard: list[list[Any]] = []
        self.early: dict[int, list[list[Any]]] = {}
        self.forked = ""
        self.begun_s = time.monotonic()

    def run(self) -> dict[str, Any]:
        """What came of it; an error of the exchange is a result."""
        exchange: Exchange | None = None
        error: ExchangeError | None = None
        try:
            exchange = make(self.plan)
            for step in self.plan["steps"]:
                self.begun_s = time.monotonic()
                self.step(exchange, step)
        except ExchangeError as failed:
            error = failed
        took_s = time.monotonic() - self.begun_s
        if exchange is not None:
            exchange.close()
        return {
            "error": type(error).__name__ if error else None,
            "by": error.rank if error else None,
            "text": str(error),
            "heard": self.heard,
            "took_s": took_s,
            "forked": self.forked,
        }

    def step(self, exchange: Exchange, step: dict[str, Any]) -> None:
        """One exchange, with its fault."""
        fault, channel, how = step["fault"], exchange.channel(step["channel"]), step["how"]
        values, epoch = tuple(step["values"]), step["epoch"]
        time.sleep(step["pause_us"] / 1e6)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "slow":
            time.sleep(2 * self.plan["timeout_s"])
        elif fault == "leave":
            exchange.close()
        elif fault == "fork":
            self.fork(exchange, channel, epoch, values)
        if how != "asked":
            channel.publish(epoch + (fault == "skip"), values)
        if fault == "kill after":
            os.kill(os.getpid(), signal.SIGKILL)
        self.heard += sorted(self.hear(exchange, step["channel"], how, epoch))
        if how == "asked":
            channel.publish(epoch, values)

    def hear(self, exchange: Exchange, number: int, how: str, epoch: int) -> list[list[Any]]:
        """One arrival of each peer. Of three ranks one may begin the next epoch before the third is heard."""
        channel, peers = exchange.channel(number), len(exchange.peers)
        heard = self.early.pop(number, [])
        while len(heard) < peers:
            found = channel.poll(50_000 if how == "spin" else 0)
            if found is not None:
                early = peers > 1 and found[0] > epoch
                (self.early.setdefault(number, []) if early else heard).append(list(found))
            elif how != "spin" and not channel.arm():
                exchange.wait()
        return heard

    def fork(self, exchange: Exchange, channel: Any, epoch: int, values: tuple[int, ...]) -> None:
        """A child tries every call, and closes what it has, which must not close its parent's."""
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (lambda: channel.publish(epoch, values), lambda: channel.poll(1000), channel.arm):
                try:
                    call()
                except ExchangeForked:
                    refused += 1
            exchange.close()
            os._exit(refused)
        self.forked = f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])} of 3 refused"


def main() -> None:
    """Plans until standard input ends. Threads of a failed group would keep a plain exit."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(Rank(json.loads(line)).run()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
