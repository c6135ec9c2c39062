"""What `hf-lossy fit` ends with: a warning where its figures are of few tokens, and what to do next where the head is any good."""

from typing import TYPE_CHECKING

from ..terminal import show


if TYPE_CHECKING:
    from ..training.evidence import Evidence


def show_verdict(evidence: "Evidence", command: str) -> None:
    """Two lines at most; `command` is how to try a head that is better than chance."""
    if evidence.warning is not None:
        show(f"warning: {evidence.warning}")
    show(f"try it: {command}" if evidence.verdict is None else evidence.verdict)
