"""Small charts as inline SVG: lines over iterations, and stacked bars."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from g2rpo_ray.tracking.report.render import render

WIDTH, HEIGHT = 420, 210
"""Size of a chart in its own units; the page scales it."""
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 32
"""Margins for the axes."""
MOST_BARS = 60
"""More iterations than this are averaged into so many bars."""

Point = tuple[float, float | None]
"""x and y; y is None where there is no number, and the line has a gap there."""


@dataclass(frozen=True)
class Series:
    """One named line, its dots, or one layer of stacked bars."""

    label: str
    colour: str
    points: Sequence[Point]
    dots: bool = False
    """Mark every point, for series with few of them."""

    def known(self) -> list[tuple[float, float]]:
        """The points that have a number."""
        return [(x, y) for x, y in self.points if y is not None]

    def stretches(self) -> Iterator[list[Point]]:
        """The runs of points between gaps."""
        for known, points in groupby(self.points, key=lambda point: point[1] is not None):
            if known:
                yield list(points)


@dataclass(frozen=True)
class Bar:
    """One layer of one bar, in the numbers that the axes show."""

    colour: str
    left: float
    right: float
    base: float
    top: float


@dataclass(frozen=True)
class Scale:
    """Maps a range of numbers to a range of the drawing."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, most: int) -> list[float]:
        """At most ``most + 1`` round numbers in the range, 1, 2 or 5 times a power of ten apart."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def line_chart(
    title: str, series: Sequence[Series], *, from_zero: bool = False, over: str = "iteration"
) -> Markup:
    """Lines over iterations; series without any number are left out.

    Args:
        series: drawn in this order, the last on top.
        from_zero: the y axis starts at 0, for numbers that cannot be negative.
        over: what the x axis shows.

    Returns:
        HTML ``<figure>``; with no number at all it says so.
    """
    shown = [line for line in series if line.known()]
    if not shown:
        return _figure(title, [])
    xs, ys = zip(*(point for line in shown for point in line.known()), strict=True)
    x_scale = Scale(*_widened(min(xs), max(xs), 0), LEFT, WIDTH - RIGHT)
    y_range = _above_zero(max(ys)) if from_zero else _widened(min(ys), max(ys), 0.08)
    return _figure(title, shown, x_scale, y_range, over, lines=shown)


def stacked_bars(title: str, layers: Sequence[Series]) -> Markup:
    """Bars over iterations, one layer on the other; many iterations are averaged into fewer bars.

    Args:
        layers: the same x values in each, y at least 0; the first lies at the bottom.
    """
    shown = [layer for layer in layers if any(y for _, y in layer.known())]
    if not shown:
        return _figure(title, [])
    xs = [x for x, _ in shown[0].points]
    per_bar = math.ceil(len(xs) / MOST_BARS)
    bars = []
    highest = 0.0
    for start in range(0, len(xs), per_bar):
        end = min(start + per_bar, len(xs))
        top = 0.0
        for layer in shown:
            base, top = top, top + sum(y or 0.0 for _, y in layer.points[start:end]) / (end - start)
            bars.append(Bar(layer.colour, xs[start] - 0.42, xs[end - 1] + 0.42, base, top))
        highest = max(highest, top)
    x_scale = Scale(min(xs) - 0.5, max(xs) + 0.5, LEFT, WIDTH - RIGHT)
    note = f" (each bar is the mean of {per_bar} iterations)" if per_bar > 1 else ""
    return _figure(title + note, shown, x_scale, _above_zero(highest), bars=bars)


def _widened(low: float, high: float, margin: float) -> tuple[float, float]:
    """The range with a margin (a part of its length) on both sides, never empty."""
    if low == high:
        around = abs(low) * 0.1 or 1.0
        return low - around, high + around
    return low - margin * (high - low), high + margin * (high - low)


def _above_zero(high: float) -> tuple[float, float]:
    return 0.0, max(high, 0.0) * 1.06 or 1.0


def _figure(
    title: str,
    series: Sequence[Series],
    x_scale: Scale | None = None,
    y_range: tuple[float, float] = (0.0, 1.0),
    over: str = "iteration",
    *,
    lines: Sequence[Series] = (),
    bars: Sequence[Bar] = (),
) -> Markup:
    y_scale = Scale(*y_range, HEIGHT - BOTTOM, TOP)
    return render(
        "chart.html",
        title=title, series=series, width=WIDTH, height=HEIGHT, x=x_scale, y=y_scale,
        over=over, lines=lines, bars=bars,
    )  # fmt: skip
