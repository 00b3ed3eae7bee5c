"""The actors between HTTP and the ranks, in the api process and in a process that has it all."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from api.handle import Edge, Engine
from api.served import Served
from engine.actors.detok import Detok
from engine.actors.grammar_keys import GrammarLimits
from engine.actors.ingress import Ingress
from engine.actors.process import Process
from engine.config import Settings
from engine.errors import StoreUnusable
from engine.grammar.model_vocabulary import model_vocabulary
from engine.grammar.service import GrammarService, start_service, worker_count
from engine.grammar.worker import WorkerSettings
from engine.messages import RankLoad, Snapshot
from engine.model.config import ModelConfig, eos_of
from engine.model.stand_in import text_folder

FEW = 64
"""Messages to ingress that no request causes: ranks that come and go, orders of the shutdown coordinator."""


def start_front(
    process: Process,
    settings: Settings,
    served: Served,
    on_snapshot: Callable[[Snapshot], None],
    loads: Callable[[], tuple[RankLoad, ...]] = tuple,
    grammars: GrammarService | None = None,
) -> Engine:
    """Starts ingress and detokenizer, and returns what HTTP handlers hold of the engine.

    loads     what the ranks have published of themselves
    grammars  of `start_grammars`; None: constrained requests are refused
    """
    ingress, detok = process.mailbox("ingress"), process.mailbox("detok")
    edge = process.refs["api"] = Edge(ingress, on_snapshot)
    limit = settings.max_running_requests + settings.max_queued_requests
    # All accepted requests may end at once, each with an `Ended`, while ingress is full of what edges want.
    ingress.reserve = max(ingress.reserve, settings.dp_size * limit + FEW)
    process.start("ingress", lambda: Ingress(settings.dp_size, limit, settings.load_balance_method))
    process.start("detok", lambda: Detok(served.tokenizer, settings.stream_buffer))
    return Engine(process.asks, ingress, detok, edge, loads, grammars)


def start_grammars(process: Process, settings: Settings, served: Served) -> GrammarService:
    """Starts what compiles grammars. Its workers come up in the background, within a second as a rule.

    raises  ConfigError, StoreUnusable; later, in the process, GrammarFailed where no worker comes up
    """
    folder = Path(settings.model_path)
    stops = eos_of(ModelConfig.from_json(folder), folder)
    limits = GrammarLimits(
        workers=settings.grammar_workers or worker_count(),
        cache_bytes=settings.grammar_cache_bytes,
        cache_entries=settings.grammar_cache_entries,
        timeout_s=settings.grammar_timeout_s,
    )
    vocab_size = served.bounds.vocab_size
    text = text_folder(settings, vocab_size)
    vocabulary = model_vocabulary(text, served.tokenizer, vocab_size, stops)
    store = store_of(settings)
    if store:
        make_folder(store)
    told = WorkerSettings(vocabulary, store, settings.grammar_cache_disk_bytes)
    return start_service(process, limits, told)


async def say_when_compiling(process: Process, grammars: GrammarService) -> None:
    """For the person who reads the log."""
    await grammars.pool.started.wait()
    process.report(
        f"api: {grammars.limits.workers} processes compile grammars with xgrammar {version('xgrammar')}, "
        f"for at most {grammars.limits.timeout_s:g} s each"
    )


def make_folder(store: str) -> None:
    """Workers fail at a folder that isn't there, and what they say is lost. raises StoreUnusable"""
    try:
        Path(store).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnusable(f"--grammar-cache-dir {store} can't be made: {error.strerror}") from error


def store_of(settings: Settings) -> str:
    """The folder of compiled grammars; empty for none."""
    if settings.grammar_cache_dir:
        return "" if settings.grammar_cache_dir == "none" else settings.grammar_cache_dir
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(cache / "deepseek-actor-engine" / "grammars")
