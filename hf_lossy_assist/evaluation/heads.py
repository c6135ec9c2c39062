"""The folder of a fitted head, as a part of the report: AUROC, ROC and reliability on held-out tokens, each with its interval and its number."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..artifacts.cards import escaped
from ..artifacts.head_config import HeadConfig
from ..artifacts.heads import CONFIG, Head
from ..stats.intervals import Estimate
from ..training.curves import CURVES, Curves
from ..validation import check_number
from .page import paragraph, table


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 330, 40, 16, 28, 56
NONE = f"no ROC and no reliability: this head's config has no {CURVES}; heads that this version's fit sprinter or fit autojudge writes have them"
AS_IF = "Wilson's intervals, as if the tokens of one text were independent"


@dataclass(frozen=True)
class FoundHead:
    """What a head's folder says of it; `auroc` and `curves` are None where it does not."""

    name: str
    config: HeadConfig
    auroc: Estimate | None
    curves: Curves | None

    @property
    def labels(self) -> tuple[str, str]:
        """What tokens of a high probability are, and what the others are."""
        return self.config.polarity, f"un{self.config.polarity}"

    def about(self) -> str:
        """What it is a head of."""
        its = self.config
        pair = " with ".join(model.id for model in (its.target, its.draft) if model is not None) or "models not named"
        label = f": {its.label}" if its.label else ""
        return f"a {its.kind} head for {its.method} on the {its.features}; it says P({its.polarity}){label}; {pair}"

    def separates(self) -> str:
        """The AUROC with its interval, and of how many tokens."""
        if self.auroc is None:
            return "no AUROC in its config"
        value, low, high = self.auroc
        between = "no interval" if low is None or high is None else f"95 %: {low:.3f}–{high:.3f}"
        return f"AUROC {value:.3f} ({between}{'' if self.curves is None else '; ' + self.tokens()})"

    def tokens(self) -> str:
        """How many held-out tokens there are of each label."""
        assert self.curves is not None
        counts = zip((self.curves.positives, self.curves.negatives), self.labels, strict=True)
        return " and ".join(f"{count} {label}" for count, label in counts) + " held-out tokens"

    def said(self) -> list[str]:
        """What fitting said of the figures."""
        lines = (self.config.metrics.get(name) for name in ("verdict", "warning"))
        return [line for line in lines if isinstance(line, str)]


def is_head(folder: Path) -> bool:
    """Whether a folder looks like a head's."""
    return (folder / CONFIG).is_file()


def read_head(folder: Path) -> FoundHead:
    """Read a head's folder, anybody's. Raises: `ValueError`, one line."""
    config = Head.from_pretrained(str(folder)).config
    try:
        given = config.metrics.get(CURVES)
        curves = None if given is None else Curves.from_dict(given)
        return FoundHead(folder.name, config, _auroc(config.metrics), curves)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: metrics: {error}: fit the head again, or get its files again") from None


def html_of(found: FoundHead) -> list[str]:
    """The parts of the page."""
    parts = [f"<h2>{escape(found.name)}</h2>", paragraph(found.about(), "small")]
    parts += [paragraph(line, "advice") for line in found.said()]
    if found.curves is None:
        return [*parts, paragraph(found.separates(), "small"), paragraph(NONE, "small")]
    label, other = found.labels
    reliability = f"Reliability: of tokens of about one probability, the share that is {label}; {AS_IF}; below, how many tokens they are"
    parts.append(
        '<div class="pair">'
        + _figure(_roc(found.curves, label, other), f"ROC: {found.separates()}")
        + _figure(_reliability(found.curves, label), reliability)
        + "</div>"
    )
    parts.append(table(*cells(found.curves, label)))
    return parts


def markdown_of(found: FoundHead) -> list[str]:
    """The same without charts, a part for each paragraph."""
    parts = [
        f"## {escaped(found.name)}",
        escaped(found.about()),
        *(f"**{escaped(line)}**" for line in found.said()),
        escaped(found.separates()),
    ]
    if found.curves is None:
        return [*parts, NONE]
    heads, rows = cells(found.curves, found.labels[0])
    lines = ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]
    return [*parts, f"Reliability; {AS_IF}:", "\n".join(lines)]


def cells(curves: Curves, label: str) -> tuple[list[str], list[list[str]]]:
    """The table of reliability."""
    rows = []
    for its in curves.reliability:
        share = its.share
        rows.append([f"{its.mean:.3f}", str(its.tokens), f"{share.value:.3f}", f"{share.low:.3f}–{share.high:.3f}"])
    return [f"mean P({label})", "tokens", label, "95 %"], rows


def _auroc(metrics: Any) -> Estimate | None:
    """The AUROC with its interval, as far as they are there."""
    value, low, high = (metrics.get(name) for name in ("auroc", "auroc_low", "auroc_high"))
    if value is None:
        return None
    check_number("auroc", value, 0.0, 1.0)
    if low is None or high is None:
        return Estimate(value, None, None)
    check_number("auroc_low", low, 0.0, value)
    check_number("auroc_high", high, value, 1.0)
    return Estimate(value, low, high)


def _figure(chart: str, caption: str) -> str:
    return f"<figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def _across(x: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * x


def _down(y: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - y)


def _roc(curves: Curves, label: str, other: str) -> str:
    line = " ".join(f"{_across(x):.1f},{_down(y):.1f}" for x, y in curves.roc)
    return _square(
        [f'<polyline class="curve" points="{line}"/>'],
        f"share of {other} tokens above a threshold",
        f"share of {label} tokens above it",
    )


def _reliability(curves: Curves, label: str) -> str:
    parts = []
    for its in curves.reliability:
        at, share = _across(its.mean), its.share
        assert share.low is not None and share.high is not None, "Wilson's interval has both ends for any count"
        ends = f'y1="{_down(share.low):.1f}" y2="{_down(share.high):.1f}"'
        parts.append(f'<line class="bar" x1="{at:.1f}" x2="{at:.1f}" {ends}/>')
        parts.append(f'<circle class="point" cx="{at:.1f}" cy="{_down(share.value):.1f}" r="4"/>')
        # Numbers stand in the middles of tenths, since means of neighbours may meet.
        middle = _across((min(int(its.mean * 10), 9) + 0.5) / 10)
        parts.append(
            f'<text class="count" x="{middle:.1f}" y="{HEIGHT - 24}" text-anchor="middle">{_short(its.tokens)}</text>'
        )
    return _square(parts, f"mean P({label}), and the number of tokens", f"share that is {label}")


def _square(parts: Sequence[str], x: str, y: str) -> str:
    """A chart whose axes go from 0 to 1, with its diagonal."""
    left, right, top, floor = _across(0), _across(1), _down(1), _down(0)
    around = [
        f'<line class="axis" x1="{left}" y1="{floor}" x2="{right}" y2="{floor}"/>',
        f'<line class="axis" x1="{left}" y1="{top}" x2="{left}" y2="{floor}"/>',
        f'<line class="even" x1="{left}" y1="{floor}" x2="{right}" y2="{top}"/>',
        f'<text x="4" y="12">{escape(y)}</text>',
        f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{escape(x)}</text>',
    ]
    for share in (0.0, 0.5, 1.0):
        around.append(f'<text x="{_across(share):.0f}" y="{floor + 15}" text-anchor="middle">{share:g}</text>')
        around.append(f'<text x="{left - 6}" y="{_down(share) + 4:.0f}" text-anchor="end">{share:g}</text>')
    inside = "\n".join([*around, *parts])
    about = escape(f"{y} against {x}")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">\n{inside}\n</svg>'


def _short(count: int) -> str:
    """A number in four characters; the table has it whole."""
    return str(count) if count < 10_000 else f"{count / 1000:.0f}k" if count < 1_000_000 else f"{count / 1e6:.0f}M"
