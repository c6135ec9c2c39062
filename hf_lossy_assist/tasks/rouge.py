"""ROUGE (Lin 2004): how much of a reference's words a text has, by the library `rouge-score`."""

from functools import cache
from typing import Any, NamedTuple

from .answers import require


class Rouge(NamedTuple):
    """F1 of single words, of pairs of words, and of the longest common subsequence, from 0 to 1."""

    rouge1: float
    rouge2: float
    rougeL: float


def rouge(reference: str, text: str) -> Rouge:
    """ROUGE of `text` against `reference`, words stemmed. `ImportError`, one line, where rouge-score is not installed."""
    found = _scorer().score(reference, text)
    return Rouge(*(float(found[name].fmeasure) for name in Rouge._fields))


@cache
def _scorer() -> Any:
    require("ROUGE", {"rouge_score": "rouge-score"})
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(Rouge._fields), use_stemmer=True)
