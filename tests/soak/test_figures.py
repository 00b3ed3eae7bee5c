"""Slopes, quantiles, samples, plots and the page."""

from __future__ import annotations

import os
import threading
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from engine.soak import processes
from engine.soak.figures import quantile, slope_per_hour
from engine.soak.ledger import Ledger
from engine.soak.page import page
from engine.soak.plots import plot
from engine.soak.samples import Samples
from engine.soak.server import Server
from engine.soak.watch import THREADS_SPARE, Watch


def test_the_slope_is_that_of_numpys_least_squares() -> None:
    draw = np.random.default_rng(3)
    times = np.sort(draw.uniform(0, 7200, 40))
    values = 100 + 2.5 * times / 3600 + draw.normal(0, 0.3, 40)
    expected = np.polyfit(times / 3600, values, 1)[0]
    assert slope_per_hour(list(times), list(values)) == pytest.approx(expected, rel=1e-9)
    assert slope_per_hour([1, 2], [1, 2]) is None
    assert slope_per_hour([1, 1, 1], [1, 2, 3]) is None


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_nearest_rank(share: float) -> None:
    values = list(np.random.default_rng(1).normal(size=137))
    assert quantile(values, share) == np.quantile(values, share, method="inverted_cdf")
    assert quantile([], share) == 0.0


def server_here() -> Server:
    """This process as if it were the server."""
    server = Server("http://127.0.0.1:1")
    server.pid = os.getpid()
    return server


def rows(minutes: int, mib_h: float) -> list[dict[str, Any]]:
    """Samples of every minute; memory jumps by 50 MiB in the first ten, then grows as told."""
    return [
        {
            "at_s": 60.0 * minute,
            "processes": {"api": {"own_mib": 100 + min(minute, 9) * 5 + mib_h * minute / 60}},
        }
        for minute in range(minutes + 1)
    ]


@pytest.mark.parametrize("mib_h", [0.0, 0.9, 4.0])
def test_memory_counts_after_the_first_ten_minutes(mib_h: float) -> None:
    ledger = Ledger()
    samples = Samples(ledger, Watch(server_here(), ledger, ""))
    samples.rows = rows(70, mib_h)
    assert samples.slopes()["api"] == pytest.approx(mib_h, abs=0.01)
    samples.rows = rows(9, mib_h)
    assert samples.settled()[0]["at_s"] == 180.0


def test_samples_are_of_what_came_since_the_last() -> None:
    ledger = Ledger()
    watch = Watch(server_here(), ledger, "")
    watch._known = processes.tree(os.getpid())
    watch.name_all()
    samples = Samples(ledger, watch)
    samples.begin()
    ledger.latencies_s += [1.0, 3.0]
    watch.newest.values = {"spec_accepted_tokens_total": {"": 6.0}, "spec_verified_tokens_total": {"": 10.0}}
    samples.take()
    ledger.latencies_s += [0.5]
    watch.newest.values = {"spec_accepted_tokens_total": {"": 7.0}, "spec_verified_tokens_total": {"": 14.0}}
    samples.take()
    assert [row["latency_ms_p99"] for row in samples.rows] == [3000.0, 500.0]
    assert [row["acceptance"] for row in samples.rows] == [0.6, 0.25]
    (mine,) = [one for one in watch.usages() if one.pid == os.getpid()]
    assert samples.rows[0]["processes"][mine.name]["own_mib"] > 10


def test_leaked_descriptors_and_threads_are_told_once() -> None:
    ledger = Ledger()
    watch = Watch(server_here(), ledger, "")
    watch._known = processes.tree(os.getpid())
    watch.name_all()
    watch.accept_growth()
    assert watch.grown() == []
    leaked, over = os.open("/dev/zero", os.O_RDONLY), threading.Event()
    threads = [threading.Thread(target=over.wait) for _ in range(THREADS_SPARE + 1)]
    for thread in threads:
        thread.start()
    try:
        faults = watch.grown()
        assert len(faults) == 2
        assert "'/dev/zero'" in faults[0]
        assert "threads" in faults[1]
        watch.accept_growth()
        assert watch.grown() == []
    finally:
        over.set()
        os.close(leaked)
        for thread in threads:
            thread.join()


def test_plots_are_well_formed_and_show_every_point() -> None:
    text = plot("a < b", "MiB", {"x & y": [(0.0, 1.0), (1.0, 3.0)], "z": [(0.5, 2.0)]})
    lines = ElementTree.fromstring(text).findall(".//polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 1]
    first, last = (tuple(map(float, point.split(","))) for point in lines[0].attrib["points"].split())
    assert first[0] < last[0]
    assert first[1] > last[1], "more is higher up"
    ElementTree.fromstring(plot("flat", "s", {"x": [(0.0, 5.0), (1.0, 5.0)]}))
    assert "no samples" in plot("none", "s", {})


def test_the_page_lists_violations_with_time_and_evidence() -> None:
    ledger = Ledger()
    ledger.violate("rest", "<b> is held")
    samples = Samples(ledger, Watch(server_here(), ledger, ""))
    samples.take()
    told = {"minutes": 1.0, **ledger.counts(), "samples": samples.rows}
    text = page({"name": "soak", "command": "c", "machine": {"cores": 2}, "commit": "x", "figures": told})
    assert "&lt;b&gt; is held" in text
    assert "1 violations" in text
    assert "<b> is" not in text
