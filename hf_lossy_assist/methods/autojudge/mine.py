"""Mine important tokens: Algorithm 1 of AutoJudge on many problems at once, as a dataset on disk.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039).
"""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...artifacts.files import write_text
from ...drafters.hidden_state import DraftModel
from ...tasks.endpoint import Endpoint, served
from ...tasks.load import AnswerTask, Problem
from ...training.jobs import describe_run
from ...training.processes import Models, Processes, TellUnit
from ...training.run_folder import RunFolder, name_units
from ...validation import MOST_ROWS, MOST_THREADS, check_int
from .dataset import RECORD, assemble, explain_nothing, summarise
from .mining_loop import DEFAULTS, MineSettings, mine_problems, prepare_inputs
from .search import Mined


FIRST = 8  # problems after which a run without any finding warns, so that long runs do not end without one


def mine(
    target: PreTrainedModel | Endpoint, draft: DraftModel, tokenizer: PreTrainedTokenizerBase, task: AnswerTask, problems: Sequence[Problem], out: str | Path,
    settings: MineSettings = DEFAULTS, *, batch_size: int = 16, workers: int = 4, resume: bool = False,
    wrap: Callable[[str], str] = str, source: str = "", processes: Processes | None = None,
) -> Path:  # fmt: skip
    """Mine a dataset into the folder `out`; for the search see `mine_problems`.

    Every finished problem is written to disk at once, so a run that was killed at any moment and resumed gives the same dataset as an uninterrupted
    one (except for a time limit, and for near-ties in half precision, which depend on the batch). Processes started by
    `accelerate launch` share the problems.

    Args:
        target: a loaded model, or an `Endpoint` that serves it.
        problems: all or some of the problems of `task`.
        batch_size: problems in flight; affects only the speed (in half precision also near-ties).
        workers: threads for requests to servers, and for tasks that run programs.
        wrap: turns a problem's prompt into the text given to the model, for example with a chat template.
        processes: what shares the problems; None: the processes that `accelerate launch` started.

    Returns: `out`, a folder for `datasets.load_from_disk`, with a data card and mine.json.

    Raises: `ValueError`, one line, for models that cannot be used or settings that differ from those of the unfinished run;
    `OSError` for a failing server. Finished problems are kept, and `resume` continues from there.
    """
    check_int("batch_size", batch_size, 1, MOST_ROWS)
    check_int("workers", workers, 1, MOST_THREADS)
    if not problems:
        raise ValueError("nothing to mine: there are no problems")
    texts = [wrap(p.prompt) for p in problems]
    prepare_inputs(target, draft, tokenizer, texts, settings)  # before anything is written
    remote = served(target)
    contents = [[text, p.gold, dict(p.extra)] for text, p in zip(texts, problems, strict=True)]
    models = {"target": None if remote else target, "draft": draft}
    facts = describe_run(asdict(settings), models, tokenizer, contents, source, "problems") | {
        "task": task.name,
        "ends": [*task.ends, *([] if task.closing is None else [task.closing.pattern])],
        "judge": getattr(getattr(task, "judge", None), "model", None),
        "served": target.model if remote else None,
        "served_at": target.url if remote else None,
    }
    processes = Processes.started() if processes is None else processes

    def work(models: Models, indices: Sequence[int], tell: TellUnit) -> Iterator[tuple[int, Mined]]:
        mined_problems = mine_problems(
            *models, task, [problems[n] for n in indices], settings,
            batch_size=batch_size, workers=workers, wrap=wrap, indices=indices, tell=tell,
        )  # fmt: skip
        for mined in mined_problems:
            yield mined.problem, mined

    names = name_units(len(problems), "json")
    with RunFolder.opened(out, RECORD, facts, resume=resume, processes=processes) as run, name_way_on(run.part):
        todo = run.list_missing(names)
        count, first = len(processes.share(todo)), list[Mined]()

        def write(index: int, mined: Mined) -> None:
            write_text(run.part / names[index], json.dumps(asdict(mined)))
            if len(first) < FIRST < count:
                first.append(mined)
                if len(first) == FIRST:
                    _warn_of_nothing(first, settings)

        processes.run(work, (target, draft, tokenizer), todo, write, ("mining", "problems"), batch_size)
        processes.on_first(lambda: assemble(run, tokenizer))
    return run.out


def _warn_of_nothing(first: Sequence[Mined], settings: MineSettings) -> None:
    """Warn, with the reason, if the first problems of a longer run had no mismatch."""
    counts = summarise(first, settings.max_new_tokens)
    if not counts["mismatches"]:
        why = explain_nothing({"problems": FIRST, "found": counts})
        warnings.warn(f"the first {FIRST} problems gave no mismatch: {why}", stacklevel=5)


@contextmanager
def name_way_on(folder: Path) -> Iterator[None]:
    """Add to an error that ends the work where the finished part is. Errors of the folder are raised before."""
    try:
        yield
    except (OSError, ValueError) as error:
        # Constructors of other error classes may take more than a message.
        plain = type(error) in (ValueError, OSError, PermissionError, TimeoutError, ConnectionError)
        kind = type(error) if plain else OSError if isinstance(error, OSError) else ValueError
        end = "" if str(error).endswith((".", "?", "!", "…")) else "."
        raise kind(f"{error}{end} What is done is in {folder}: --resume goes on from there") from None
