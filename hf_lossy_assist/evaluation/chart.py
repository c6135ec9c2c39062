"""The front of speed and quality as an SVG: each point with its interval and its name, names moved apart where points meet."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from ..terminal import digits


APART = 15  # pixels between names
LONGEST = 32  # characters of a name that the margin has room for


class Point(NamedTuple):
    """x: tokens per second; y: a share, with its interval where there is one."""

    name: str
    x: float
    y: float
    low: float | None
    high: float | None
    lossless: bool


class Frame(NamedTuple):
    """A chart's size and its margins, in pixels. The page shows the one that its width has room for."""

    width: int
    height: int
    right: int
    left: int = 48
    top: int = 28
    bottom: int = 40


# Narrow charts have a number at the end of each line, and the names below.
WIDE, NARROW = Frame(760, 360, right=240), Frame(360, 300, right=32)


def front(points: Sequence[Point], what: str) -> str:
    """The chart for wide screens, the one for narrow ones, and its names; `what`: the name of the y axis."""
    names = [point.name if point.lossless else f"{point.name} (lossy)" for point in points]
    numbers = [str(i) for i in range(1, len(points) + 1)]
    key = "".join(f"<li>{escape(name)}</li>" for name in names)
    charts = (
        f'<div class="{size}">{_chart(points, labels, what, frame)}</div>'
        for size, labels, frame in (("wide", [_short(name) for name in names], WIDE), ("narrow", numbers, NARROW))
    )
    return "\n".join([*charts, f'<ol class="narrow">{key}</ol>'])


def _chart(points: Sequence[Point], labels: Sequence[str], what: str, given: Frame) -> str:
    frame = given._replace(height=max(given.height, given.top + given.bottom + APART * len(points)))
    right_end = max(point.x for point in points) * 1.05
    lowest = min(point.y if point.low is None else point.low for point in points)
    bottom = max(0.0, lowest - 0.05)
    x_end, floor = frame.width - frame.right, frame.height - frame.bottom

    def across(x: float) -> float:
        return frame.left + (x_end - frame.left) * x / right_end

    def down(y: float) -> float:
        return frame.top + (floor - frame.top) * (1 - (y - bottom) / (1 - bottom))

    parts = [
        f'<line class="axis" x1="{frame.left}" y1="{floor}" x2="{x_end}" y2="{floor}"/>',
        f'<line class="axis" x1="{frame.left}" y1="{frame.top}" x2="{frame.left}" y2="{floor}"/>',
        f'<text x="{x_end}" y="{frame.height - 8}" text-anchor="end">tokens/s</text>',
        f'<text x="4" y="12">{escape(what)}</text>',
    ]
    for share in (bottom, (1 + bottom) / 2, 1.0):
        parts.append(f'<text x="{frame.left - 6}" y="{down(share) + 4:.0f}" text-anchor="end">{share:.0%}</text>')
    for speed in (0.5 * right_end, right_end):
        parts.append(
            f'<text x="{across(speed):.0f}" y="{floor + 16}" text-anchor="middle">{speed:.{digits(right_end)}f}</text>'
        )
    # Of points on one level the last gets the highest name, so that no line crosses another.
    order = sorted(range(len(points)), key=lambda i: (down(points[i].y), -points[i].x))
    places = names_apart([down(points[i].y) for i in order], frame)
    marks: list[str] = []
    for i, y in zip(order, places, strict=True):
        point, at, level = points[i], across(points[i].x), down(points[i].y)
        edge = x_end + 16
        parts.append(f'<line class="lead" x1="{at:.1f}" y1="{level:.1f}" x2="{edge - 4}" y2="{y:.1f}"/>')
        if point.low is not None and point.high is not None:
            ends = f'y1="{down(point.low):.1f}" y2="{down(point.high):.1f}"'
            parts.append(f'<line class="bar" x1="{at:.1f}" x2="{at:.1f}" {ends}/>')
        kind = "point" if point.lossless else "lossy-point"
        marks.append(f'<circle class="{kind}" cx="{at:.1f}" cy="{level:.1f}" r="4.5"/>')
        marks.append(f'<text x="{edge}" y="{y + 4:.1f}">{escape(labels[i])}</text>')
    inside = "\n".join([*parts, *marks])  # lines below points
    size = f"0 0 {frame.width} {frame.height}"
    return f'<svg viewBox="{size}" role="img" aria-label="{escape(what)} against tokens per second">\n{inside}\n</svg>'


def _short(name: str) -> str:
    """A name with its middle left out where it is long: what tells policies apart stands at both ends. The table has it whole."""
    half = LONGEST // 2
    return name if len(name) <= LONGEST else f"{name[: half - 1]}…{name[-half:]}"


def names_apart(levels: Sequence[float], frame: Frame = WIDE) -> list[float]:
    """Places of names, as near to `levels` as they can be with `APART` pixels between any two, inside the chart where they fit."""
    order = sorted(range(len(levels)), key=lambda i: levels[i])
    placed = [0.0] * len(levels)
    above = float(frame.top - APART)
    for rank, i in enumerate(order):
        room = frame.height - frame.bottom - APART * (len(order) - 1 - rank)  # so that those below it fit as well
        above = placed[i] = max(above + APART, min(levels[i], room))
    return placed
