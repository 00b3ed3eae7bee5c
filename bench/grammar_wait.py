"""`python -m engine bench grammar-wait`: what other streams notice of grammars that take long to compile.

`--concurrency` free texts stream while small constrained requests come one behind the other, each with a
grammar that nobody has compiled: as long as a pass lasts, something compiles or loads. The pass after it has
the same requests at the same moments, with one grammar that was compiled before, so that what differs is
compiling and loading. The gaps between the tokens of the free streams are compared by their 99th percentiles;
the ratio is the median of nine such pairs. The benchmark fails where a compile was shared or remembered.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np

from api.gate import START, Gate, Wish, gate_of
from api.grammars import constrained
from api.handle import Engine
from api.served import load_served
from bench.grammar_figures import NotCompiledOnce
from engine.config import Settings
from engine.errors import EngineError
from engine.grammar.gate import GatePolicy
from engine.local import engine_of, prepare_environment
from engine.messages import ABORTED, FAILED, Entry, Sampling
from engine.rank_parts import ModelParts

PAIRS = 9
FREE_TOKENS = 768
PATIENT_S = 60.0
FIELDS = 256
"""Of a schema, each with a pattern of its own letters: none shares a rule, so a compile takes two seconds."""


@dataclass
class Pass:
    """What was seen while the free streams lasted.

    gaps    seconds between two chunks of a stream, of all streams
    starts  when each constrained request came, from the pass's begin
    waits   seconds in which its grammar was had, compiled or not
    """

    gaps: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def gap_ms(self, share: float) -> float:
        """A quantile of the gaps, in milliseconds."""
        return 1e3 * float(np.quantile(self.gaps, share))


@dataclass
class Stage:
    """An engine and what its streams say."""

    engine: Engine
    prompt: bytes
    concurrency: int

    async def busy(self, wishes: Iterator[Wish]) -> Pass:
        """Each constrained request comes when the one before has its answer, as long as the streams last."""
        done, ended = Pass(), anyio.Event()

        async def free() -> None:
            await self._free(done)
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(free)
            began_s = time.perf_counter()
            while not ended.is_set():
                done.starts.append(time.perf_counter() - began_s)
                await self.small(next(wishes), done)
        return done

    async def calm(self, wish: Wish, starts: Sequence[float]) -> Pass:
        """The same with a grammar that is known, at the given moments."""
        done = Pass()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._free, done)
            began_s = anyio.current_time()
            for start in starts:
                await anyio.sleep_until(began_s + start)
                tasks.start_soon(self.small, wish, done)
        return done

    async def small(self, wish: Wish, done: Pass) -> None:
        """A constrained request of one token."""
        entry = Entry(sink=0, prompt=self.prompt, sampling=Sampling(max_new_tokens=1, temperature=0.0))
        began_s = time.perf_counter()
        async with constrained(self.engine.grammars, [entry], [wish]) as entries:
            done.waits.append(time.perf_counter() - began_s)
            await self._answer(entries, [])

    async def _free(self, done: Pass) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(self.concurrency):
                tasks.start_soon(self._stream, done)

    async def _stream(self, done: Pass) -> None:
        sampling = Sampling(max_new_tokens=FREE_TOKENS, temperature=0.0, ignore_eos=True)
        times: list[float] = []
        await self._answer([Entry(sink=0, prompt=self.prompt, sampling=sampling)], times)
        done.gaps += np.diff(times).tolist()

    async def _answer(self, entries: Sequence[Entry], times: list[float]) -> None:
        group = await self.engine.submit(entries)
        while deltas := await group.take():
            times.append(time.perf_counter())
            for delta in deltas:
                if delta.finish in (ABORTED, FAILED):
                    raise EngineError(f"a request ended with {delta.finish}: {delta.message}")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Figures; raises NotCompiledOnce."""
    with TemporaryDirectory(prefix="grammar-bench-") as folder:
        settings = Settings(
            model_path=args.model_path,
            threads=1,
            speculative_algorithm="DSPARK" if args.speculative else "",
            speculative_verify_mode=args.verify_mode,
            grammar_cache_dir=folder,
            grammar_timeout_s=PATIENT_S,
        )
        prepare_environment(settings)
        return anyio.run(_measure, settings, args.concurrency, 3 if args.quick else PAIRS)


async def _measure(settings: Settings, concurrency: int, pairs: int) -> dict[str, Any]:
    served = load_served(settings, 0)
    gate = gate_of(GatePolicy(), served.encoding, served.tokenizer)
    prompt = np.array(served.tokenizer.encode("Once upon a time"), np.int32).tobytes()
    told: list[tuple[Pass, Pass]] = []
    async with engine_of(settings, served, ModelParts(), grammars=True) as engine:
        assert engine.grammars is not None
        stage, counts = Stage(engine, prompt, concurrency), engine.grammars.cores[-1].counts
        known = await slow(gate)
        fresh = others(known)
        await stage.small(known, Pass())
        for number in range(pairs):
            before = counts["compile"]
            busy = await stage.busy(fresh)
            made = counts["compile"] - before
            if made != len(busy.waits):
                raise NotCompiledOnce(f"{len(busy.waits)} new grammars took {made} compiles")
            told.append((busy, await stage.calm(known, busy.starts)))
            print(f"pair {number + 1} of {pairs}: {ratio(told[-1]):.3f}", flush=True)
    return figures(told) | {"concurrency": concurrency, "speculative": bool(settings.speculative_algorithm)}


async def slow(gate: Gate) -> Wish:
    """An object of many strings, each with a pattern of its own."""
    names = {f"field_{i}": {"type": "string", "pattern": _pattern(i)} for i in range(FIELDS)}
    schema = {"type": "object", "properties": names, "required": [*names]}
    wanted = {"type": "json_schema", "json_schema": {"name": "value", "schema": schema}}
    wish = await gate.wish({"response_format": wanted}, root=START)
    assert wish is not None
    return wish


def _pattern(number: int) -> str:
    first, last = chr(ord("a") + number % 13), chr(ord("n") + number // 13 % 13)
    return f"^[{first}-{last}]{{1,{38 + number % 8}}}(-[0-9]{{2,{10 + number % 20}}})?$"


def others(wish: Wish) -> Iterator[Wish]:
    """The same grammar with another name of its first field each time: to every cache it is a new one."""
    for number in count():
        text = wish.key.text.replace("field_0", f"other_{number}")
        yield replace(wish, key=replace(wish.key, text=text))


def ratio(told: tuple[Pass, Pass]) -> float:
    """Of the 99th percentiles, with compiles over without."""
    busy, calm = told
    return busy.gap_ms(0.99) / calm.gap_ms(0.99)


def figures(told: Sequence[tuple[Pass, Pass]]) -> dict[str, Any]:
    """Milliseconds between tokens with and without compiles, and how long the compiles were."""
    low, middle, high = statistics.quantiles([ratio(one) for one in told], n=4)
    waits = [wait for busy, _ in told for wait in busy.waits]
    found = {"ratio": middle, "ratio_low": low, "ratio_high": high}
    for name, passes in (("compiling", [busy for busy, _ in told]), ("calm", [calm for _, calm in told])):
        found |= {f"{name}_p50_ms": statistics.median(one.gap_ms(0.5) for one in passes)}
        found |= {f"{name}_p99_ms": statistics.median(one.gap_ms(0.99) for one in passes)}
        found |= {f"{name}_max_ms": max(one.gap_ms(1.0) for one in passes)}
    found |= {"compiles": len(waits), "compile_p50_s": statistics.median(waits), "compile_max_s": max(waits)}
    return {name: round(value, 4) for name, value in found.items()}
