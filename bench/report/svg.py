"""Line plots as SVG text, for reports.

Colours are CSS classes of the page's style sheet, so that a plot works in light and dark mode. Plot
libraries would add their own colours, fonts or external scripts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 44
_ASIDE = 3.0  # pixels between the spreads of two lines, which would hide each other
_ROOM = 2.0  # how far a spread may stretch an axis, as a multiple of the extremes of all points
_OF_ZERO = 0.08  # share of a logarithmic axis between zero and the smallest positive value
_NUM_COLOURS = 8  # classes c0 to c7


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot. `low` and `high` are the ends of each point's spread, if given."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    colour: int = 0
    marks: bool = True


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    level: float | None = None  # position of a horizontal line
    mark: float | None = None  # position of a vertical line
    note: str = ""  # a sentence below the plot


class _Axis:
    """Converts values to pixels.

    A logarithmic axis has a place for zero, below all others and not to scale, if a value is zero.
    """

    def __init__(
        self, values: Sequence[float], pixels: tuple[float, float], *, log: bool, zero: bool
    ) -> None:
        finite = [value for value in values if math.isfinite(value)]
        usable = [value for value in finite if value > 0 or not log]
        self._has_zero = log and len(usable) < len(finite)
        low, high = (min(usable), max(usable)) if usable else (1.0, 10.0)
        self.log = log
        if log:
            if low == high:
                low, high = low / 2, high * 2
            self.ticks = _log_ticks(low, high)
        else:
            low = min(0.0, low) if zero else low
            if low == high:  # a single value is in the middle
                around = abs(low) / 2 or 0.5
                low, high = (0.0, 1.0) if zero else (low - around, high + around)
            self.ticks = _ticks(low, high)
        self._low = min(low, *self.ticks)
        self._high = max(high, *self.ticks)
        start, end = pixels
        self._zero = start
        self._pixels = (start + _OF_ZERO * (end - start) if self._has_zero else start, end)
        if self._has_zero:
            self.ticks = [0.0, *self.ticks]

    def __call__(self, value: float) -> float:
        if self.log and value <= 0:
            return self._zero
        scale: Callable[[float], float] = math.log if self.log else float
        low, high = scale(self._low), scale(self._high)
        share = (scale(value) - low) / (high - low)
        start, end = self._pixels
        return start + share * (end - start)

    def within(self, value: float) -> float:
        """Return the pixel of the nearest value on the axis."""
        if self._has_zero and value <= 0:
            return self._zero
        return self(min(max(value, self._low), self._high))

    def has(self, value: float | None) -> bool:
        return (
            value is not None
            and math.isfinite(value)
            and (value > 0 or not self.log or self._has_zero)
        )


def render(plot: Plot) -> str:
    """Return the whole <svg> element."""
    xs = [x for one in plot.series for x in one.xs]
    ys = [y for one in plot.series for y in one.ys if math.isfinite(y)]
    if plot.level is not None:
        ys.append(plot.level)
    # A spread far beyond all points would squeeze them, so it is cut off at the edge.
    most = _ROOM * max(ys, default=1.0)
    least = min(ys, default=0.0) / _ROOM
    spread = [v for one in plot.series for v in (*one.low, *one.high) if v is not None]
    ys += [min(max(v, least), most) for v in spread]
    across = _Axis(xs, (_LEFT, WIDTH - _RIGHT), log=plot.log_x, zero=False)
    up = _Axis(ys, (HEIGHT - _BOTTOM, _TOP), log=plot.log_y, zero=True)
    parts = [*_grid(across, up), *_labels(plot)]
    if plot.level is not None and up.has(plot.level):
        y = up(plot.level)
        parts.append(f'<path class="level" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
    if plot.mark is not None and across.has(plot.mark):
        x = across(plot.mark)
        parts.append(f'<path class="mark" d="M{x:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
    for index, series in enumerate(plot.series):
        aside = _ASIDE * (index - (len(plot.series) - 1) / 2)
        parts += _line(series, across, up, aside)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">'
        + "".join(parts)
        + "</svg>"
    )


def _grid(across: _Axis, up: _Axis) -> list[str]:
    parts = []
    bottom = HEIGHT - _BOTTOM
    for tick in up.ticks:
        y = up(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" class="end">{number(tick)}</text>')
    for tick in across.ticks:
        x = across(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" class="mid">{number(tick)}</text>')
    return parts


def _labels(plot: Plot) -> list[str]:
    middle_x, middle_y = (_LEFT + WIDTH - _RIGHT) / 2, (_TOP + HEIGHT - _BOTTOM) / 2
    return [
        f'<text x="{middle_x:.0f}" y="{HEIGHT - 8}" class="mid axis">{escape(plot.x_label)}</text>',
        f'<text transform="translate(14 {middle_y:.0f}) rotate(-90)" class="mid axis">'
        f"{escape(plot.y_label)}</text>",
    ]


def _line(series: Series, across: _Axis, up: _Axis, aside: float) -> list[str]:
    colour = f"c{series.colour % _NUM_COLOURS}"
    points = [
        (across(x), up(y), x, y)
        for x, y in zip(series.xs, series.ys, strict=True)
        if across.has(x) and up.has(y)
    ]
    if not points:
        return []
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in points)
    parts = [f'<path class="line {colour}" d="M{path}"/>']
    for x, low, high in zip(series.xs, series.low, series.high, strict=False):
        if across.has(x) and low is not None and high is not None and up.has(high):
            place = across(x) + aside
            ends = f"M{place:.1f} {up.within(low):.1f}V{up.within(high):.1f}"
            parts.append(f'<path class="spread {colour}" d="{ends}"/>')
    if series.marks:
        parts += [
            f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
            f"<title>{escape(series.name)}: {number(value_x)}, {number(value_y)}</title></circle>"
            for x, y, value_x, value_y in points
        ]
    return parts


def number(value: float) -> str:
    """Format a number briefly: 0.025, 1.5, 12, 3.2k."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that cover [low, high]."""
    raw = (high - low) / 5
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 of each decade, or powers of ten if that is too many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [m * 10.0**power for power in range(first, last + 1) for m in steps]
    inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    return inside if len(inside) >= 3 else [tick for tick in _ticks(low, high) if tick > 0]
