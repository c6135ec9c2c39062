"""`hf-lossy mine`: the tokens whose replacement by the draft's changes the answer."""

import os
import shutil
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .. import drafters, methods, tasks
from ..artifacts.json_io import read_object
from ..terminal import show
from ..validation import MOST, MOST_ROWS, MOST_THREADS, is_model, require
from . import _models, _options
from ._runs import check_out, find_workers, hint_resume


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    workers: Annotated[int, (1, MOST_THREADS), "threads for a server and for running programs"] = 4,
    running: _options.RunOptions,
    ray: _options.Ray = None,
    naive: Annotated[bool, "--naive", "try each mismatch by itself, for comparison"] = False,
    max_mismatches: Annotated[int | None, "most mismatches of a problem; further ones are counted"] = None,
    max_seconds: Annotated[float | None, "most seconds for a problem; then it is cut short"] = None,
    sampling: _options.SamplingOptions,
    target_url: Annotated[str | None, "OpenAI-compatible server that runs the target"] = None,
    target_model: Annotated[str | None, "name of the target on that server"] = None,
    timeout: _options.Timeout = 120.0,
    loading: _options.LoadOptions,
    chat: _options.Chat = False,
) -> None:
    """Mine the tokens whose replacement by the draft's changes the answer (AutoJudge, Algorithm 1).

    Examples:

      hf-lossy mine --task demo --limit 64 --out mined

      hf-lossy mine --drafter demo --limit 64 --out mined

      hf-lossy mine --model M --assistant D --task gsm8k --data train.jsonl --chat --max-seconds 120 --out mined
    """
    require("this command", "accelerate", "datasets", "jinja2")
    check_out(out, running.resume)
    remote = target_url is not None or target_model is not None
    _check_models(models, task, remote)
    if remote and loading.overrides:  # it would have no effect
        raise ValueError("--set is for a target that is loaded here, and --target-url's is not: leave it out")
    if ray is not None and remote:
        raise ValueError("--ray is for models that its workers load, and --target-url names a server: leave one out")

    sampling.check()
    settings = methods.autojudge.mining_loop.MineSettings(
        max_new_tokens=NEW_TOKENS.get(task, 512) if max_new_tokens is None else max_new_tokens,
        **asdict(sampling),
        naive=naive,
        max_mismatches=max_mismatches,
        max_seconds=max_seconds,
        places=1 if models.drafter is None else drafters.trained.PLACES,
    )
    with ExitStack() as opened:
        chosen = tasks.load.load_task(
            task,
            data=data,
            split="calibration",
            seed=sampling.seed,
            shots=shots,
            chat=chat,
            allow_code_execution=allow_code_execution,
            sandbox=not no_sandbox,
        )
        problems = chosen.problems(MINED if limit is None and task == _options.DEMO else limit)
        processes = find_workers(ray, models, loading, _models.load_models)
        target, draft, tokenizer = _load(models, loading, remote)
        if remote:
            target = opened.enter_context(_models.open_endpoint(target_url, target_model, timeout))
        wrap = (lambda text: _models.with_template(tokenizer, [text])[0]) if chat else str
        source = _models.name_demo_source(sampling.seed) if task == _options.DEMO else (data or Path(task)).name
        with hint_resume(out):
            methods.autojudge.mine.mine(
                target, draft, tokenizer, chosen, problems, out, settings,
                batch_size=batch_size, workers=workers, resume=running.resume, wrap=wrap, source=source,
                processes=processes,
            )  # fmt: skip
    if int(os.environ.get("RANK", "0")) == 0:
        show(_summarize(out))


def _check_models(models: _options.ModelOptions, task: str, remote: bool) -> None:
    """Refuse models that do not match each other or the task. remote: a server runs the target."""
    if remote and (models.model is not None or models.drafter is not None):
        raise ValueError("--target-url is the target, whose states no server gives: leave --model and --drafter out")
    if not remote:
        models.check_learnable()
    elif models.assistant is None and task != _options.DEMO:
        raise ValueError(
            "--target-url needs --assistant, the draft, whose tokenizer is the target's (without it: --task demo)"
        )
    if task == _options.DEMO and models.assistant is not None and is_model(models.assistant):
        raise ValueError("--task demo is for the demo models: name another task with --assistant")


def _load(
    models: _options.ModelOptions, options: _options.LoadOptions, remote: bool
) -> "tuple[PreTrainedModel | None, _models.Draft, PreTrainedTokenizerBase]":
    """Load the target (None if a server runs it), the draft and the tokenizer."""
    if not remote or models.assistant is None:
        return _models.load_models(models, options)
    draft, tokenizer = _models.load_alone(models.assistant, options)
    return None, draft, tokenizer


def _summarize(out: Path) -> str:
    """Return a description of a dataset in a few lines; remove one without a mismatch, so that its name is free again.

    Raises: `ValueError`, one line, with the reason why there is none.
    """
    explain, facts = methods.autojudge.dataset, read_object(out / methods.autojudge.dataset.RECORD)
    found = facts["found"]
    if not found["mismatches"]:
        shutil.rmtree(out)
        raise ValueError(f"nothing to fit a judge to, and nothing is written: {explain.explain_nothing(facts)}")
    share = found["important"] / max(found["mismatches"], 1)
    lines = [
        f"{out}: {found['mismatches']} mismatches of {facts['problems']} problems, {found['important']} important ({share:.1%}), "
        "with a data card"
    ]
    lines += explain.explain_unsearched(facts)
    for count, what in (
        (found["cut_by_mismatches"], "problems were cut off at --max-mismatches"),
        (found["retokenised"], "continuations have another spelling in tokens than the server's text suggests"),
    ):
        if count:
            lines.append(f"{count} {what}")
    return "\n".join(lines)
