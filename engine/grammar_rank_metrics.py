"""Series of the masks of steps, by rank, from snapshots; all of them from the start."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from engine.grammar.pipeline_counters import KINDS, PATHS, PHASES
from engine.messages import Snapshot

LABELS = ("model_name", "engine_type", "dp_rank", "tp_rank", "pp_rank", "moe_ep_rank")
COUNTED = {
    "dspark_grammar_batches": ("steps with masks", "outcome", ("complete", "partial")),
    "dspark_grammar_paths": ("steps with masks by the thread that made them", "path", PATHS),
    "dspark_grammar_rows": ("rows of steps by what their mask means", "outcome", tuple(KINDS.values())),
    "dspark_grammar_terminations": ("grammars that came to their end", "outcome", ("complete", "failed")),
}
"""Name -> (help, label, its values)."""

OWN = "dspark_grammar_"
SECONDS = OWN + "seconds"


class RankGrammarSeries(Collector):
    """Collector over the ranks' snapshots. A rank counts from 0; the totals here go on over its end."""

    def __init__(self, prefix: str, model_name: str, ranks: int) -> None:
        self._prefix = prefix
        self._labels = [(model_name, "unified", str(rank), "0", "0", "0") for rank in range(ranks)]
        self._totals: list[dict[str, float]] = [{} for _ in range(ranks)]
        self._counted: list[dict[str, float]] = [{} for _ in range(ranks)]

    def note(self, msg: Snapshot) -> None:
        """A rank's figures by name; one that is less than before is of another process."""
        totals, counted = self._totals[msg.rank], self._counted[msg.rank]
        for name, figure in msg.counters.items():
            if name.startswith(OWN):
                before = counted.get(name, 0.0)
                totals[name] = totals.get(name, 0.0) + (figure - before if figure >= before else figure)
                counted[name] = figure

    def collect(self) -> Iterator[Metric]:
        """The series as they are now."""
        for name, (say, label, values) in COUNTED.items():
            family = CounterMetricFamily(self._prefix + name, say, labels=[*LABELS, label])
            for labels, figures in zip(self._labels, self._totals, strict=True):
                for value in values:
                    total = figures.get(f'{name}_total{{{label}="{value}"}}', 0.0)
                    family.add_metric([*labels, value], total)
            yield family
        summary = SummaryMetricFamily(
            self._prefix + SECONDS, "parts of a step's masks", labels=[*LABELS, "phase"]
        )
        for labels, figures in zip(self._labels, self._totals, strict=True):
            for phase in PHASES:
                count = figures.get(f'{SECONDS}_count{{phase="{phase}"}}', 0.0)
                total = figures.get(f'{SECONDS}_sum{{phase="{phase}"}}', 0.0)
                summary.add_metric([*labels, phase], int(count), total)
        yield summary
