"""What `hf-lossy fit` ends with: a warning where its figures are of few tokens, and what to do next where the head is any good."""

from typing import TYPE_CHECKING

from ..terminal import show


if TYPE_CHECKING:
    from ..training.head_quality import Evidence


def show_verdict(evidence: "Evidence", command: str, what: str = "how fast it is") -> None:
    """Two lines at most; `command` says of a head that is better than chance `what` nothing here has measured."""
    if evidence.warning is not None:
        show(f"warning: {evidence.warning}")
    show(f"see {what}: {command}" if evidence.verdict is None else evidence.verdict)
