"""Mine the tokens that matter: Algorithm 1 of AutoJudge on many problems at once, as a dataset on disk.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039).
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...artifacts.files import name_full_disk
from ...models.identity import ModelIdentity, tokenizer_hash, versions, weights_hash
from ...tasks.endpoint import served
from ...tasks.load import AnswerTask, Problem
from ...terminal import Bar
from ...training.processes import Processes
from ...training.resumable import compute_key, folders, start_run
from ...validation import MOST_ROWS, MOST_THREADS, check_int
from .in_flight import mine_problems
from .mine_inputs import prepared
from .mine_settings import DEFAULTS, MineSettings
from .mined import RECORD, assemble, line_of, read_lines, summary, why_nothing
from .search import Mined


FIRST = 8  # problems after which a run that has found nothing yet says so: long runs are not to end in it


def mine(
    target: Any, draft: Any, tokenizer: Any, task: AnswerTask, problems: Sequence[Problem], out: str | Path,
    settings: MineSettings = DEFAULTS, *, batch_size: int = 16, workers: int = 4, resume: bool = False,
    wrap: Callable[[str], str] = str, source: str = "",
) -> Path:  # fmt: skip
    """Mine a dataset into the folder `out`; see `mine_problems` for the search itself.

    Every finished problem is a line on disk at once, so a run that was killed at any moment and resumed gives the same dataset
    as one that was not (but for a time limit, and for near-ties that half precision decides by what shares a batch). Under `accelerate launch` the processes share the problems among them.

    Args:
        target: a loaded model, or an `Endpoint` that serves it.
        problems: what `task` gave, or some of it.
        batch_size: problems in flight; decides the speed alone (in half precision also near-ties).
        workers: threads for requests to servers, and for tasks that run programs.
        wrap: makes the text that a model is given of a problem's prompt, a chat template for example.

    Returns: `out`, a folder that `datasets.load_from_disk` reads, with a data card and mine.json.

    Raises: `ValueError`, one line, for models that cannot be used or settings that differ from those of the unfinished run;
    `OSError` for a server that fails. What was finished before stays, and `resume` goes on from there.
    """
    check_int("batch_size", batch_size, 1, MOST_ROWS)
    check_int("workers", workers, 1, MOST_THREADS)
    if not problems:
        raise ValueError("nothing to mine: there are no problems")
    out, part = folders(out)
    texts = [wrap(p.prompt) for p in problems]
    contents = [[text, p.gold, dict(p.extra)] for text, p in zip(texts, problems, strict=True)]
    prepared(target, draft, tokenizer, texts, settings)  # before anything is written
    facts = _facts(target, draft, tokenizer, task, contents, settings, source)
    processes = Processes.started()
    with start_run(out, part, facts, RECORD, resume=resume, processes=processes) as unfinished:
        if unfinished:
            options = {"batch_size": batch_size, "workers": workers, "wrap": wrap}
            _mine(target, draft, tokenizer, task, problems, part, settings, processes, options)
            processes.on_first(lambda: assemble(out, part, facts, tokenizer))
    return out


def _mine(
    target: Any, draft: Any, tokenizer: Any, task: AnswerTask, problems: Sequence[Problem], part: Path,
    settings: MineSettings, processes: Processes, options: dict[str, Any],
) -> None:  # fmt: skip
    """Mine this process's share of the problems that no line in `part` is of; `options`: of `mine_problems`."""
    key = compute_key(part / RECORD)
    done = {mined.problem for mined in read_lines(part)}
    processes.wait()  # reading takes torn lines away; nobody writes before all have read
    todo = processes.share([n for n in range(len(problems)) if n not in done])
    bar, shares = Bar(len(todo), "mining", "problems", quiet=not processes.first), dict[int, float]()

    def tell(number: int, share: float) -> None:
        shares[number] = share
        bar.to(sum(shares.values()))

    found = mine_problems(
        target, draft, tokenizer, task, [problems[n] for n in todo], settings,
        numbers=todo, tell=tell, **options,
    )  # fmt: skip
    path, first = part / f"{processes.rank:05d}.jsonl", list[Mined]()
    with _resumable(part), bar, name_full_disk(path), open(path, "a", encoding="utf-8") as file:
        for mined in found:
            file.write(line_of(mined, key))
            file.flush()
            tell(mined.problem, 1.0)
            first += [mined] * (len(first) < FIRST)
            if mined is first[-1] and len(first) == FIRST < len(todo):
                _warn_of_nothing(first, settings)
    processes.wait()


def _warn_of_nothing(first: Sequence[Mined], settings: MineSettings) -> None:
    """Say why the first problems of a run gave nothing, if they did not."""
    found = summary(first, settings.max_new_tokens)
    if not found["mismatches"]:
        why = why_nothing({"problems": len(first), "found": found})
        warnings.warn(f"the first {len(first)} problems gave no mismatch: {why}", stacklevel=4)


@contextmanager
def _resumable(part: Path) -> Iterator[None]:
    """An error that ends the work says where what is done lies. What is wrong with the folder itself is found before."""
    try:
        yield
    except (OSError, ValueError) as error:
        # Others, of Python or of a library, are made of more than a line.
        plain = type(error) in (ValueError, OSError, PermissionError, TimeoutError, ConnectionError)
        kind = type(error) if plain else OSError if isinstance(error, OSError) else ValueError
        end = "" if str(error).endswith((".", "?", "!", "…")) else "."
        raise kind(f"{error}{end} What is done is in {part}: --resume goes on from there") from None


def _facts(
    target: Any,
    draft: Any,
    tokenizer: Any,
    task: AnswerTask,
    contents: Sequence[list],
    settings: MineSettings,
    source: str,
) -> dict[str, Any]:
    remote = served(target)
    return {
        "settings": asdict(settings),
        "task": task.name,
        "ends": [*task.ends, *([] if task.closing is None else [task.closing.pattern])],
        "target": None if remote else ModelIdentity.of(target).to_dict(),
        "judge": getattr(getattr(task, "judge", None), "model", None),
        "served": target.model if remote else None,
        "served_at": target.url if remote else None,
        "draft": ModelIdentity.of(draft).to_dict(),
        "target_weights": None if remote else weights_hash(target),
        "draft_weights": weights_hash(draft),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "dtypes": [None if remote else str(target.dtype), str(draft.dtype)],
        "problems": len(contents),
        "problems_sha256": hashlib.sha256(json.dumps(contents, default=str).encode()).hexdigest(),
        "source": source,
        "versions": versions(),
    }
