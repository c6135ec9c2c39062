"""Mine the tokens that matter: Algorithm 1 of AutoJudge on many problems at once, as a dataset on disk.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...models.identity import ModelIdentity, tokenizer_hash, versions, weights_hash
from ...tasks.pool import served
from ...tasks.tasks import AnswerTask, Problem
from ...terminal import Bar
from ...training.jobs import folders, key_of, prepare
from ...training.processes import Processes
from ...validation import MOST_ROWS, MOST_THREADS, check_int
from .in_flight import mine_problems
from .mine_inputs import prepared
from .mine_settings import DEFAULTS, MineSettings
from .mined import RECORD, assemble, line_of, read_lines


def mine(
    target: Any, draft: Any, tokenizer: Any, task: AnswerTask, problems: Sequence[Problem], out: str | Path,
    settings: MineSettings = DEFAULTS, *, batch_size: int = 16, workers: int = 4, resume: bool = False,
    wrap: Callable[[str], str] = str, source: str = "",
) -> Path:  # fmt: skip
    """Mine a dataset into the folder `out`; see `mine_problems` for the search itself.

    Every finished problem is a line on disk at once, so a run that was killed at any moment and resumed gives the same dataset
    as one that was not (but for a time limit, and for near-ties that half precision decides by what shares a batch). Under `accelerate launch` the processes share the problems among them.

    Args:
        target: a loaded model, or an `Endpoint` or a `Pool` that serves it.
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
    processes.on_first(lambda: prepare(out, part, facts, resume, RECORD))
    if not (part / RECORD).is_file():  # all was there already
        return out

    key = key_of(part / RECORD)
    done = {mined.problem for mined in read_lines(part)}
    processes.wait()  # reading takes torn lines away; nobody writes before all have read
    mine_own = processes.share([n for n in range(len(problems)) if n not in done])
    bar, shares = Bar(len(mine_own), "mining", "problems", quiet=not processes.first), dict[int, float]()

    def tell(number: int, share: float) -> None:
        shares[number] = share
        bar.to(sum(shares.values()))

    found = mine_problems(
        target, draft, tokenizer, task, [problems[n] for n in mine_own], settings,
        batch_size=batch_size, workers=workers, wrap=wrap, numbers=mine_own, tell=tell,
    )  # fmt: skip
    with bar, open(part / f"{processes.rank:05d}.jsonl", "a", encoding="utf-8") as file:
        for mined in found:
            file.write(line_of(mined, key))
            file.flush()
            tell(mined.problem, 1.0)

    processes.wait()
    if processes.first:
        assemble(out, part, facts, tokenizer)
    processes.wait()
    return out


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
