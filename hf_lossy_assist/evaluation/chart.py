"""The front of speed and quality as an SVG: each point with its interval and its name, names moved apart where points meet."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 56, 240, 16, 40
APART = 15  # pixels between names


class Point(NamedTuple):
    """x: tokens per second; y: a share, with its interval where there is one."""

    name: str
    x: float
    y: float
    low: float | None
    high: float | None
    lossless: bool


def front(points: Sequence[Point], what: str) -> str:
    """The chart; `what`: the name of the y axis."""
    right_end = max(point.x for point in points) * 1.05
    lowest = min(point.y if point.low is None else point.low for point in points)
    bottom = max(0.0, lowest - 0.05)

    def across(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / right_end

    def down(y: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (y - bottom) / (1 - bottom))

    parts = [
        f'<line class="axis" x1="{LEFT}" y1="{HEIGHT - BOTTOM}" x2="{WIDTH - RIGHT}" y2="{HEIGHT - BOTTOM}"/>',
        f'<line class="axis" x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{HEIGHT - BOTTOM}"/>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">tokens/s</text>',
        f'<text x="{LEFT + 6}" y="{TOP + 4}">{escape(what)}</text>',
    ]
    for share in (bottom, (1 + bottom) / 2, 1.0):
        parts.append(f'<text x="{LEFT - 6}" y="{down(share) + 4:.0f}" text-anchor="end">{share:.0%}</text>')
    for speed in (0.5 * right_end, right_end):
        parts.append(
            f'<text x="{across(speed):.0f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{speed:.0f}</text>'
        )
    for point, y in zip(points, names_apart([down(point.y) for point in points]), strict=True):
        at, level = across(point.x), down(point.y)
        if point.low is not None and point.high is not None:
            parts.append(
                f'<line class="bar" x1="{at:.1f}" x2="{at:.1f}" y1="{down(point.low):.1f}" y2="{down(point.high):.1f}"/>'
            )
        kind = "point" if point.lossless else "lossy-point"
        parts.append(f'<circle class="{kind}" cx="{at:.1f}" cy="{level:.1f}" r="4"/>')
        edge = WIDTH - RIGHT + 16
        parts.append(f'<line class="lead" x1="{at + 5:.1f}" y1="{level:.1f}" x2="{edge - 4}" y2="{y:.1f}"/>')
        name = point.name if point.lossless else f"{point.name} (lossy)"
        parts.append(f'<text x="{edge}" y="{y + 4:.1f}">{escape(name)}</text>')
    inside = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(what)} against tokens per second">\n{inside}\n</svg>'


def names_apart(levels: Sequence[float]) -> list[float]:
    """Places of names, as near to `levels` as they can be with `APART` pixels between any two, inside the chart where they fit."""
    order = sorted(range(len(levels)), key=lambda i: levels[i])
    placed = [0.0] * len(levels)
    above = float(TOP - APART)
    for rank, i in enumerate(order):
        room = HEIGHT - BOTTOM - APART * (len(order) - 1 - rank)  # so that those below it fit as well
        above = placed[i] = max(above + APART, min(levels[i], room))
    return placed
