"""`hf-lossy mine`: the tokens whose replacement by the draft's changes the answer."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..artifacts.json_io import read_object
from ..terminal import show
from ..validation import MOST_NEW_TOKENS, MOST_ROWS, MOST_THREADS, check_int, check_number
from .drafters import Drafter, check_draft, load_made
from .exits import end_after, going_on
from .made_with import MadeWith, remember
from .measured import check_out
from .options import (
    DEMO,
    Assistant,
    Chat,
    Device,
    DoSample,
    DType,
    MaxHours,
    Model,
    Out,
    Overrides,
    Resume,
    Seed,
    Shots,
    Temperature,
    TopK,
    TopP,
    chats,
    check_sampling,
    demo_source,
    load,
    needs,
    open_endpoint,
)


MINED = 64  # problems of `--task demo` without --limit
NEW_TOKENS = {DEMO: 96}  # of a whole response, by task; 512 elsewhere


def mine(
    out: Out,
    model: Model = None,
    assistant: Assistant = None,
    drafter: Drafter = None,
    task: Annotated[
        str,
        typer.Option(help="demo, gsm8k, math, code, qa, mt_bench, spec_bench, or a file of JSON lines (exact match)"),
    ] = DEMO,
    data: Annotated[
        Path | None, typer.Option(help="the problems of --task (default: an installed package's, or the Hub's)")
    ] = None,
    shots: Shots = 0,
    limit: Annotated[int | None, typer.Option(help="most problems to mine (default: all; 64 of the demo)")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="most tokens of a whole response (default: 512; 96 for the demo)")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="problems in flight")] = 16,
    allow_code_execution: Annotated[
        bool,
        typer.Option(
            "--allow-code-execution",
            help="run the programs that a model writes for --task code (docs/security.md)",
        ),
    ] = False,
    no_sandbox: Annotated[
        bool, typer.Option("--no-sandbox", help="run them with your rights where there is no bubblewrap")
    ] = False,
    workers: Annotated[int, typer.Option(help="threads for servers and for running programs")] = 4,
    resume: Resume = False,
    max_hours: MaxHours = None,
    naive: Annotated[bool, typer.Option("--naive", help="try each mismatch by itself, for comparison")] = False,
    max_mismatches: Annotated[
        int | None, typer.Option(help="most mismatches of a problem; further ones are counted")
    ] = None,
    max_seconds: Annotated[float | None, typer.Option(help="most seconds for a problem; then it is cut short")] = None,
    do_sample: DoSample = False,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    target_url: Annotated[str | None, typer.Option(help="OpenAI-compatible server that runs the target")] = None,
    target_model: Annotated[str | None, typer.Option(help="name of the target on that server")] = None,
    judge_url: Annotated[str | None, typer.Option(help="server with a judge model, for qa and the benches")] = None,
    judge_model: Annotated[str | None, typer.Option(help="name of the judge on that server")] = None,
    timeout: Annotated[float, typer.Option(help="seconds to wait for a server's reply")] = 120.0,
    dtype: DType = "float32",
    device: Device = "auto",
    overrides: Overrides = None,
    chat: Chat = False,
) -> None:
    """Mine the tokens whose replacement by the draft's changes the answer (AutoJudge, Algorithm 1).

    Examples:

      hf-lossy mine --task demo --limit 64 --out mined

      hf-lossy mine --drafter demo --limit 64 --out mined

      hf-lossy mine --model M --assistant D --task gsm8k --data train.jsonl --chat --max-seconds 120 --out mined

      hf-lossy mine --model M --assistant D --task qa --data q.jsonl --judge-url URL --judge-model J --out mined
    """
    end_after(max_hours)
    needs("train", "accelerate", "datasets")
    check_out(out, resume)
    if (target_url is None) != (target_model is None):
        raise ValueError("--target-url and --target-model belong together")
    check_number("--timeout", timeout, 0.001, 86400.0)
    _check_models(model, assistant, drafter, task, remote=target_url is not None)
    from ..tasks.conversations import NO_ANSWERS, ShareGPT
    from ..tasks.load import JUDGED
    from ..tasks.load import load_task as task_named

    if task == ShareGPT.name:
        raise ValueError(NO_ANSWERS)
    if task not in JUDGED and (judge_url is not None or judge_model is not None):
        raise ValueError(
            f"--judge-url and --judge-model are for --task {', '.join(JUDGED)}, not {task}: leave them out"
        )
    check_sampling(do_sample, temperature, top_k, top_p)
    check_int("--limit", MINED if limit is None else limit, 1, MOST_NEW_TOKENS)
    check_int("--batch-size", batch_size, 1, MOST_ROWS)
    check_int("--workers", workers, 1, MOST_THREADS)
    from ..drafters.eagle3 import PLACES
    from ..methods.autojudge.mine import mine as run
    from ..methods.autojudge.mine_settings import MineSettings

    settings = MineSettings(
        max_new_tokens=NEW_TOKENS.get(task, 512) if max_new_tokens is None else max_new_tokens, do_sample=do_sample,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, naive=naive, max_mismatches=max_mismatches,
        max_seconds=max_seconds, places=1 if drafter is None else PLACES,
    )  # fmt: skip
    with ExitStack() as opened:
        judge = (
            opened.enter_context(open_endpoint("judge", judge_url, judge_model, timeout)) if task in JUDGED else None
        )
        chosen = task_named(
            task, data=data, split="calibration", seed=seed, shots=shots, judge=judge, chat=chat,
            allow_code_execution=allow_code_execution, sandbox=not no_sandbox,
        )  # fmt: skip
        problems = chosen.problems(MINED if limit is None and task == DEMO else limit)
        made = MadeWith(model, assistant, dtype=dtype, chat=chat, drafter=drafter)
        target, draft, tokenizer = _models(made, device, target_url is not None, overrides)
        if target_url is not None:
            target = opened.enter_context(open_endpoint("target", target_url, target_model, timeout))
        wrap = (lambda text: chats(tokenizer, [text])[0]) if chat else str
        source = demo_source(seed) if task == DEMO else (data or Path(task)).name
        with going_on(out), _in_memory():
            run(
                target, draft, tokenizer, chosen, problems, out, settings,
                batch_size=batch_size, workers=workers, resume=resume, wrap=wrap, source=source,
            )  # fmt: skip
    if int(os.environ.get("RANK", "0")) == 0:
        _refuse_nothing(out)
        remember(out, made)
        show(_report(out))


def _check_models(model: str | None, assistant: str | None, drafter: str | None, task: str, remote: bool) -> None:
    """Refuse models that do not go together, or not with the task. `remote`: a server runs the target."""
    if remote and model is not None:
        raise ValueError("--model and --target-url are two targets: pass one of them (--assistant is the draft)")
    if remote and drafter is not None:
        raise ValueError(
            "--drafter reads the target's hidden states, which no server gives: pass --model, or --assistant"
        )
    if not remote:
        check_draft(model, assistant, drafter)
    elif assistant is None and task != DEMO:
        raise ValueError(
            "--target-url needs --assistant, the draft, whose tokenizer is the target's (without it: --task demo)"
        )
    if task == DEMO and assistant is not None:
        raise ValueError("--task demo is for the demo models: name another task with --assistant")


def _models(made: MadeWith, device: str, remote: bool, overrides: list[str] | None) -> tuple[Any, Any, Any]:
    """Target (None where a server runs it), draft and tokenizer."""
    if not remote or made.assistant is None:
        return load_made(made, made.dtype, device, overrides)
    if overrides:
        raise ValueError("--set is for a target that is loaded here, and --target-url's is not: leave it out")
    draft, _, tokenizer = load(made.assistant, None, made.dtype, device)
    return None, draft, tokenizer


@contextmanager
def _in_memory() -> Iterator[None]:
    """Names the way out where the device has no room."""
    from torch import OutOfMemoryError

    try:
        yield
    except OutOfMemoryError:
        raise ValueError(
            "the device has no room for so many problems at once: a smaller --batch-size and --resume go on"
        ) from None


def _refuse_nothing(out: Path) -> None:
    """Take a dataset without a mismatch away, so that its name is free again. Raises: `ValueError`, one line, with the reason."""
    from ..methods.autojudge.mined import RECORD, why_nothing

    facts = read_object(out / RECORD)
    if not facts["found"]["mismatches"]:
        shutil.rmtree(out)
        raise ValueError(f"nothing to fit a judge to was found, and nothing is written: {why_nothing(facts)}")


def _report(out: Path) -> str:
    """What a dataset holds, in a few lines."""
    from ..methods.autojudge.mined import RECORD, unanswered

    facts = read_object(out / RECORD)
    found, why = facts["found"], unanswered(facts)
    share = found["important"] / max(found["mismatches"], 1)
    lines = [
        f"{out}: {found['mismatches']} mismatches of {facts['problems']} problems, {found['important']} important ({share:.1%}), "
        "with a data card"
    ]
    lines += [] if why is None else [why]
    for count, what in (
        (found["cut_by_mismatches"], "problems were cut off at --max-mismatches"),
        (found["cut_by_seconds"], "problems were cut off at --max-seconds"),
        (found["retokenised"], "continuations have another spelling in tokens than the server's text suggests"),
    ):
        if count:
            lines.append(f"{count} {what}")
    return "\n".join(lines)
