"""What a rank counts for its metrics; no decision reads it.

Names are those that are scraped, without prefix, with labels in braces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.actors.batches import Batch
from engine.actors.holdings import Holdings
from engine.actors.planning import Planner
from engine.actors.requests import Requests
from engine.actors.schedule import MODES, RATIO_ONE, URGENT, Decision
from engine.actors.spec_ledger import SpecLedger
from engine.actors.speculation import Speculation
from engine.config import PAGE_TOKENS
from engine.memory.pages import PagePool
from engine.messages import Snapshot, StepDone, Submit

PATHS = ("decode_graph", "decode_none", "prefill_graph", "prefill_none")


class Ledger:
    """Totals since the start; every label combination exists from the start with 0.

    drafts  what drafts bring; None: the rank doesn't speculate
    """

    def __init__(self, speculation: Speculation | None = None, captured: Sequence[int] = ()) -> None:
        self.drafts = None if speculation is None else SpecLedger(speculation.block, captured)
        self.tokens = {"prefill_compute": 0, "decode": 0}
        self.passes = dict.fromkeys(PATHS, 0)
        self.seconds = dict.fromkeys(MODES[:-1], 0.0)
        self._before: tuple[float, int] | None = None
        self._throughput = 0.0
        self._received = 0

    def note_received(self, items: Sequence[Submit]) -> None:
        """Requests came; the server's own are nothing that loads are balanced by."""
        self._received += sum(len(item.prompt) // 4 for item in items if item.priority < URGENT)

    def load(self, requests: Requests) -> tuple[int, int]:
        """(tokens that are computed or wait to be, prompt tokens that ever came), of clients."""
        rows = np.concatenate([requests.clients("active"), requests.clients("waiting")])
        return int(requests.known[rows].sum()), self._received

    def note_launch(self, batch: Batch, decision: Decision) -> None:
        """A step went to the device."""
        path = "prefill" if decision.extend else "decode"
        self.passes[f"{path}_{'graph' if decision.bucket else 'none'}"] += 1
        self.tokens["prefill_compute"] += int(batch.counts[batch.decodes :].sum())

    def note_done(self, batch: Batch, done: StepDone) -> None:
        """A step's results are on the host."""
        self.tokens["decode"] += len(done.token_ids) // 4
        self.seconds[batch.step.mode] += done.seconds
        if self.drafts is not None and batch.drafting is not None:
            self.drafts.note(batch, done)

    def note_tick(self, now_s: float) -> None:
        """Throughput between two ticks, in output tokens a second."""
        output = self.tokens["decode"]
        if self._before is not None and now_s > self._before[0]:
            self._throughput = (output - self._before[1]) / (now_s - self._before[0])
        self._before = (now_s, output)
        if self.drafts is not None:
            self.drafts.note_tick(now_s)

    def counters(self, requests: Requests, planner: Planner, cut: dict[str, int]) -> dict[str, float]:
        """All figures by name. `cut`: as in SpecLedger."""
        full, window = requests.held.full, requests.held.window
        retracted = planner.retracted
        active = requests.clients("active")
        slots = requests.held.aside - 1
        figures: dict[str, float] = {
            "num_running_reqs": active.size,
            "num_queue_reqs": requests.clients("waiting").size,
            "num_matcher_queue_reqs": requests.rows("pending").size,
            "num_retracted_reqs": requests.machine.within("retracted").size,
            "num_retracted_requests_total": retracted[0],
            "num_retracted_input_tokens_total": retracted[1],
            "num_retracted_output_tokens_total": retracted[2],
            "token_usage": max(_usage(full), _usage(window)),
            "utilization": max(active.size / slots, _usage(full), _usage(window)),
            "decode_sum_seq_lens": int(requests.known[active].sum()),
            "full_token_usage": _usage(full),
            "swa_token_usage": _usage(window),
            "num_used_tokens": (full.usable - full.free) * PAGE_TOKENS,
            "kv_available_tokens": full.free * PAGE_TOKENS,
            "max_total_num_tokens": full.usable * PAGE_TOKENS,
            "page_size": PAGE_TOKENS,
            "num_pages": full.total,
            "new_token_ratio": planner.ratio / RATIO_ONE,
            "gen_throughput": self._throughput,
        }
        labelled = (
            ("realtime_tokens_total", "mode", self.tokens),
            ("cuda_graph_passes_total", "mode", self.passes),
            ("forward_execution_seconds_total", "category", self.seconds),
        )
        for name, label, values in labelled:
            figures.update((f'{name}{{{label}="{value}"}}', amount) for value, amount in values.items())
        return figures if self.drafts is None else figures | self.drafts.figures(cut)


def snapshot_of(rank: int, wall_s: float, state: str, counters: dict[str, float], held: Holdings) -> Snapshot:
    """What a rank publishes of itself."""
    return Snapshot(
        rank=rank,
        wall_s=wall_s,
        state=state,
        running=int(counters["num_running_reqs"]),
        waiting=int(counters["num_queue_reqs"]),
        full_pages_free=held.full.free,
        full_pages_total=held.full.usable,
        window_pages_free=held.window.free,
        window_pages_total=held.window.usable,
        counters=counters,
    )


def _usage(pool: PagePool) -> float:
    return 1.0 - pool.free / pool.usable
