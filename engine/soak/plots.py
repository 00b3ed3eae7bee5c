"""Line plots as SVG text, for the HTML report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 200, 64, 24, 12, 8
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
TICKS = 4

Line = Sequence[tuple[float, float]]


def plot(title: str, unit: str, lines: Mapping[str, Line]) -> str:
    """One figure: (minutes, value) points by name, with axes from their own range."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return f"<figure><figcaption>{escape(title)}: no samples</figcaption></figure>"
    left, right = span([minute for minute, _ in points], from_zero=True)
    low, high = span([value for _, value in points], from_zero=False)

    def place(minute: float, value: float) -> tuple[float, float]:
        x = LEFT + (minute - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP)
        return round(x, 1), round(y, 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for number in range(TICKS + 1):
        value = low + (high - low) * number / TICKS
        _, y = place(left, value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.4g}</text>')
        minute = left + (right - left) * number / TICKS
        x, _ = place(minute, low)
        parts.append(f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="middle">{minute:.3g}</text>')
    for (name, line), colour in zip(lines.items(), COLOURS * (len(lines) // len(COLOURS) + 1), strict=False):
        way = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line))
        parts.append(
            f'<polyline points="{way}" fill="none" stroke="{colour}"><title>{escape(name)}</title></polyline>'
        )
    parts.append("</svg>")
    keys = " ".join(
        f'<span style="color:{colour}">&#9632; {escape(name)}</span>'
        for name, colour in zip(lines, COLOURS * (len(lines) // len(COLOURS) + 1), strict=False)
    )
    return (
        f"<figure><figcaption>{escape(title)} ({escape(unit)}) {keys}</figcaption>{''.join(parts)}</figure>"
    )


def span(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    """A range that holds all values and isn't empty."""
    low, high = (0.0 if from_zero else min(values)), max(values)
    return (low, high) if high > low else (low - 0.5, low + 0.5)
