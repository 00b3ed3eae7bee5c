"""Which sizes of steps a rank records at start-up, by its settings."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.config import Settings
from engine.memory.pages import ASIDE, pages_for
from engine.model.draft_dspark import DSparkDrafter
from engine.runner.draft_graphs import RecordedDrafter
from engine.runner.graphs import Graphs, graph_keys, reserved, token_sizes
from engine.runner.speculative import Speculation
from engine.runner.step import StepRunner

Say = Callable[[str], None]


def record_graphs(runner: StepRunner, settings: Settings, context_tokens: int, say: Say) -> Graphs | None:
    """Records the decode, draft and verify steps of a runner on a device, which takes them from then on.

    Every rank records the same sizes at once, so that their collectives meet.

    context_tokens  longest prompt plus output
    returns         None where the settings ask for eager steps, as they always do on the CPU
    """
    if settings.device == "cpu" or settings.disable_cuda_graph:
        return None
    runner.path.graphs = graphs = recorded(runner, settings, context_tokens, say)
    say(f"graphs: {graphs.bytes >> 20} MiB, {graphs.took_s:.1f} s")
    return graphs


def recorded(runner: StepRunner, settings: Settings, context_tokens: int, say: Say) -> Graphs:
    """The steps of as many requests as the settings ask for, each of up to context_tokens."""
    speculation, model = runner.speculation, runner.model
    width = 1 if speculation is None else speculation.block + 1
    requests = settings.cuda_graph_max_bs_decode or settings.max_running_requests + ASIDE
    # No row is behind a request's end, and no request has more pages than there are.
    longest = min(pages_for(context_tokens), runner.state.full_pages - 1)
    keys = graph_keys(requests * width, runner.state.slots - 1, width, longest, model.row_tile)
    taps = () if speculation is None else speculation.drafter.taps
    graphs = Graphs(model, runner.state, keys, taps, say)
    if speculation is not None:
        record_draft(graphs, speculation, token_sizes(requests, 1), say)
    return graphs


def record_draft(graphs: Graphs, speculation: Speculation, sizes: tuple[int, ...], say: Say) -> None:
    """Records a DSpark draft's passes for so many requests; another draft, token by token, stays eager."""
    drafter = speculation.drafter
    if not isinstance(drafter, DSparkDrafter):
        return
    device = drafter.model.device
    begin, before = time.perf_counter(), reserved(device)
    made = RecordedDrafter(drafter, speculation.state, sizes, graphs.pool, say)
    graphs.draft = speculation.drafter = made
    graphs.bytes += max(made.bytes, reserved(device) - before)
    graphs.took_s += time.perf_counter() - begin
