"""What Transformers finds wrong while it prepares a call, or in a setting of one of its processors, as one line of this package."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers.generation import logits_process

from ..batch.object_states import LIBRARIES
from ..validation import one_line


PACKAGE = Path(__file__).resolve().parent.parent
PROCESSORS = Path(logits_process.__file__).resolve()


@contextmanager
def refusals_in_one_line(begun: Callable[[], bool], streamer: Any = None) -> Iterator[None]:
    """Within this context, what Transformers raises before `begun()`, and its processors at any time, is a refusal of one line.

    What this package raises, what the caller's code raises (its `streamer` at any time), and what says that memory is out stay as they are.
    """
    try:
        yield
    except (Warning, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        innermost = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        if innermost.is_relative_to(PACKAGE) or (begun() and innermost != PROCESSORS):
            raise
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if streamer is not None and any(
            frame.f_locals.get("self") is streamer or _is_callers(frame) for frame in frames
        ):
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        said = "" if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: "
        raise kind(f"generate cannot run with these arguments: {said}{one_line(error, 300)}") from error


def _is_callers(frame: FrameType) -> bool:
    """Return whether a frame runs neither a library's code nor this package's."""
    file = frame.f_code.co_filename
    return not (file.startswith((*LIBRARIES, "<frozen")) or Path(file).resolve().is_relative_to(PACKAGE))
