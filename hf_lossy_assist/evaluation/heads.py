"""The folder of a fitted head, as a part of the report: AUROC, ROC and reliability on held-out tokens, each with its interval and its number."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts.head import CONFIG, Head
from ..artifacts.head_config import HeadConfig
from ..stats.intervals import Estimate
from ..training.head_quality import CURVES, Curves
from ..validation import check_number
from .page import Section, Table


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


def section_of(found: FoundHead) -> Section:
    """Make its part of the report."""
    from ..training.charts import draw_reliability, draw_roc, encode_as_uri

    notes = list(found.said())
    if found.curves is None:
        return Section(found.name, [found.about(), found.separates(), NONE], notes)
    label, other = found.labels
    false, true = zip(*found.curves.roc, strict=True)
    auroc = float("nan") if found.auroc is None else found.auroc.value
    roc = draw_roc(
        {"the head": (false, true, auroc)}, "ROC", f"share of {other} tokens above a threshold",
        f"share of {label} tokens above it",
    )  # fmt: skip
    bins = found.curves.reliability
    reliability = draw_reliability(
        [(its.mean, its.share.value, its.tokens) for its in bins], f"share that is {label}", "Reliability",
        [(its.share.low or 0.0, its.share.high or 1.0) for its in bins],
    )  # fmt: skip
    charts = [(encode_as_uri(roc), f"ROC: {found.separates()}"), (encode_as_uri(reliability), f"Reliability; {AS_IF}")]
    heads, rows = cells(found.curves, label)
    return Section(
        found.name, [found.about(), found.separates()], notes, [Table(f"Reliability; {AS_IF}", heads, rows, charts)]
    )


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
