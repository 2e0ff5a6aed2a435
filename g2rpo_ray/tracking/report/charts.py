"""Small charts as inline SVG: lines over iterations, and stacked bars."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

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


def line_chart(
    title: str, series: Sequence[Series], *, from_zero: bool = False, x_label: str = "iteration"
) -> str:
    """Lines over iterations; series without any number are left out.

    Args:
        title: heading of the chart, plain text.
        series: drawn in this order, the last on top.
        from_zero: the y axis starts at 0, for numbers that cannot be negative.
        x_label: what x is, where it is no iteration.

    Returns:
        HTML ``<figure>``; with no number at all it says so.
    """
    shown = [line for line in series if line.known()]
    if not shown:
        return _figure(title, '<p class="none">No numbers recorded.</p>')
    xs = [x for line in shown for x, _ in line.known()]
    ys = [y for line in shown for _, y in line.known()] + ([0.0] if from_zero else [])
    x_scale = Scale(*_widened(min(xs), max(xs), 0), LEFT, WIDTH - RIGHT)
    y_scale = _y_scale(min(ys), max(ys), from_zero)
    drawn = "".join(_line(line, x_scale, y_scale) for line in shown)
    return _figure(title, _legend(shown) + _svg(title, _axes(x_scale, y_scale, x_label) + drawn))


def stacked_bars(title: str, layers: Sequence[Series]) -> str:
    """Bars over iterations, one layer on the other; many iterations are averaged into fewer bars.

    Args:
        title: heading of the chart, plain text.
        layers: the same x values in each, y at least 0; the first lies at the bottom.
    """
    shown = [layer for layer in layers if any(y for _, y in layer.known())]
    if not shown:
        return _figure(title, '<p class="none">No numbers recorded.</p>')
    xs = [x for x, _ in shown[0].points]
    per_bar = math.ceil(len(xs) / MOST_BARS)
    bars = [range(start, min(start + per_bar, len(xs))) for start in range(0, len(xs), per_bar)]
    heights = [[_mean(layer, bar) for bar in bars] for layer in shown]
    totals = [sum(column) for column in zip(*heights, strict=True)]
    x_scale = Scale(min(xs) - 0.5, max(xs) + 0.5, LEFT, WIDTH - RIGHT)
    y_scale = _y_scale(0.0, max(totals), from_zero=True)
    drawn = []
    bases = [0.0] * len(bars)
    for layer, column in zip(shown, heights, strict=True):
        for index, (bar, height) in enumerate(zip(bars, column, strict=True)):
            left, right = x_scale(xs[bar[0]] - 0.42), x_scale(xs[bar[-1]] + 0.42)
            top, base = y_scale(bases[index] + height), y_scale(bases[index])
            bases[index] += height
            drawn.append(
                f'<rect x="{left}" y="{top}" width="{right - left:.2f}" '
                f'height="{base - top:.2f}" fill="{layer.colour}"/>'
            )
    note = f" (each bar is the mean of {per_bar} iterations)" if per_bar > 1 else ""
    chart = _svg(title, _axes(x_scale, y_scale) + "".join(drawn))
    return _figure(title + note, _legend(shown, last_value=False) + chart)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most ``most + 1`` round numbers in the range, 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _mean(layer: Series, bar: range) -> float:
    known = [y for index in bar if (y := layer.points[index][1]) is not None]
    return sum(known) / len(bar)


def _widened(low: float, high: float, margin: float) -> tuple[float, float]:
    """The range with a margin (a part of its length) on both sides, never empty."""
    if low == high:
        around = abs(low) * 0.1 or 1.0
        return low - around, high + around
    return low - margin * (high - low), high + margin * (high - low)


def _y_scale(low: float, high: float, from_zero: bool) -> Scale:
    if from_zero:
        low, high = 0.0, high * 1.06 or 1.0
    else:
        low, high = _widened(low, high, 0.08)
    return Scale(low, high, HEIGHT - BOTTOM, TOP)


def _line(line: Series, x_scale: Scale, y_scale: Scale) -> str:
    parts = []
    for stretch in _stretches(line.points):
        corners = [(x_scale(x), y_scale(y)) for x, y in stretch]
        if len(corners) > 1:
            path = " ".join(f"{x},{y}" for x, y in corners)
            parts.append(f'<polyline points="{path}" stroke="{line.colour}"/>')
        if line.dots or len(corners) == 1:
            parts += [
                f'<circle cx="{x}" cy="{y}" r="3" fill="{line.colour}">'
                f"<title>{escape(line.label)}, iteration {at:g}: {value:.6g}</title></circle>"
                for (x, y), (at, value) in zip(corners, stretch, strict=True)
            ]
    return "".join(parts)


def _stretches(points: Sequence[Point]) -> Iterator[list[tuple[float, float]]]:
    """The runs of points between gaps."""
    stretch: list[tuple[float, float]] = []
    for x, y in points:
        if y is not None:
            stretch.append((x, y))
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _axes(x_scale: Scale, y_scale: Scale, x_label: str = "iteration") -> str:
    parts = []
    for value in ticks(y_scale.low, y_scale.high):
        y = y_scale(value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="grid"/>'
            f'<text x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{_tick_text(value)}</text>'
        )
    for value in ticks(x_scale.low, x_scale.high, most=6):
        if value == int(value):
            parts.append(
                f'<text x="{x_scale(value)}" y="{HEIGHT - BOTTOM + 15}" '
                f'text-anchor="middle">{value:g}</text>'
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{x_label}</text>')
    return "".join(parts)


def _tick_text(value: float) -> str:
    # Not a multiple of the step but its rounding error: 0 must read 0.
    return f"{value:.6g}" if abs(value) > 1e-12 else "0"


def _legend(series: Sequence[Series], last_value: bool = True) -> str:
    items = []
    for line in series:
        value = f" <b>{line.known()[-1][1]:.4g}</b>" if last_value else ""
        swatch = f'<i style="background:{line.colour}"></i>'
        items.append(f"<span>{swatch}{escape(line.label)}{value}</span>")
    return f'<div class="legend">{"".join(items)}</div>'


def _svg(title: str, content: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{content}</svg>"
    )


def _figure(title: str, content: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{content}</figure>"
