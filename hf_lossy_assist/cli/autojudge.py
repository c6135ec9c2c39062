"""`hf-lossy mine` and `hf-lossy fit autojudge`: from problems to the head that tells important tokens from unimportant ones."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal import console, show
from .commands import DEMO, Assistant, Chat, Device, DType, Model, chats, fit_app


if TYPE_CHECKING:
    from ..methods.autojudge.fit import JudgeReport

MINED = 64  # problems of `--task demo` without --limit
SHOWN = 8  # rows of the thresholds' table


def add_to(app: typer.Typer) -> None:
    """Add both to `app` and to its `fit`."""
    app.command()(mine)
    fit_app.command("autojudge")(fit_autojudge)


def mine(
    out: Annotated[Path, typer.Option(help="folder of the dataset; must not exist")],
    model: Model = None,
    assistant: Assistant = None,
    task: Annotated[str, typer.Option(help="demo, gsm8k, math, code, qa, or JSON lines (exact match)")] = DEMO,
    data: Annotated[Path | None, typer.Option(help="the problems of gsm8k, math, qa: JSON lines")] = None,
    shots: Annotated[int, typer.Option(help="worked examples before each problem of gsm8k (0 to 8)")] = 0,
    limit: Annotated[int | None, typer.Option(help="problems to mine; default all (of the demo 64)")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="of a whole response; default 512 (of the demo 96)")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="problems in flight")] = 16,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="of code: run what a model wrote, here (docs/security.md)")
    ] = False,
    workers: Annotated[int, typer.Option(help="threads for servers and for running programs")] = 4,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an unfinished run")] = False,
    naive: Annotated[bool, typer.Option("--naive", help="each mismatch alone (for comparison)")] = False,
    max_mismatches: Annotated[int | None, typer.Option(help="of a problem; the rest is cut off and counted")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="of a problem; the rest is cut off and counted")] = None,
    do_sample: Annotated[bool, typer.Option("--do-sample", help="Gumbel-max sampling; default greedy")] = False,
    temperature: Annotated[float, typer.Option(help="with --do-sample")] = 1.0,
    top_k: Annotated[int, typer.Option(help="with --do-sample")] = 0,
    top_p: Annotated[float, typer.Option(help="with --do-sample")] = 1.0,
    seed: Annotated[int, typer.Option(help="of sampling and of the demo problems")] = 0,
    target_url: Annotated[str | None, typer.Option(help="an OpenAI-compatible server that runs the target")] = None,
    target_model: Annotated[str | None, typer.Option(help="the target's name there")] = None,
    judge_url: Annotated[str | None, typer.Option(help="of qa: a server with a judge model")] = None,
    judge_model: Annotated[str | None, typer.Option(help="of qa: the judge's name there")] = None,
    per_minute: Annotated[float | None, typer.Option(help="most requests a minute to each server")] = None,
    timeout: Annotated[float, typer.Option(help="seconds to wait for a server's reply")] = 120.0,
    dtype: DType = "float32",
    device: Device = "auto",
    chat: Chat = False,
) -> None:
    """Mine the tokens whose replacement by the draft's changes the answer (AutoJudge, Algorithm 1)."""
    from ..validation import MOST_NEW_TOKENS, MOST_ROWS, MOST_THREADS, check_int, check_number
    from . import check_pair, load, needs

    needs("train", "accelerate", "datasets")
    if (target_url is None) != (target_model is None):
        raise ValueError("--target-url and --target-model belong together")
    if target_url is not None and model is not None:
        raise ValueError("--model and --target-url are two targets: pass one of them (--assistant is the draft)")
    if target_url is None:
        check_pair(model, assistant)
    elif assistant is None and task != DEMO:
        raise ValueError(
            "--target-url needs --assistant, the draft, whose tokenizer is the target's (without it: --task demo)"
        )
    if task != "qa" and (judge_url is not None or judge_model is not None):
        raise ValueError(f"--judge-url and --judge-model are for --task qa, not {task}: leave them out")
    if not do_sample and (temperature, top_k, top_p) != (1.0, 0, 1.0):
        raise ValueError("--temperature, --top-k and --top-p are for --do-sample: pass it, or leave them out")
    check_int("--limit", MINED if limit is None else limit, 1, MOST_NEW_TOKENS)
    check_int("--batch-size", batch_size, 1, MOST_ROWS)
    check_int("--workers", workers, 1, MOST_THREADS)
    check_number("--timeout", timeout, 0.001, 86400.0)
    check_number("--per-minute", 1.0 if per_minute is None else per_minute, 0.001, 1e9)
    if task == DEMO and assistant is not None:
        raise ValueError("--task demo is for the demo models: name another task with --assistant")
    from ..methods.autojudge.mine import MineSettings
    from ..methods.autojudge.mine import mine as run
    from ..tasks.tasks import task_named

    longest = (96 if task == DEMO else 512) if max_new_tokens is None else max_new_tokens
    settings = MineSettings(longest, do_sample, temperature, top_k, top_p, seed, naive, max_mismatches, max_seconds)
    source = f"the demo task, calibration problems of seed {seed}" if task == DEMO else (data or Path(task)).name
    with ExitStack() as servers:
        judge = None
        if task == "qa":
            judge = servers.enter_context(_server("--judge", judge_url, judge_model, per_minute, timeout))
        chosen = task_named(
            task, data=data, split="calibration", seed=seed, shots=shots, judge=judge, chat=chat,
            allow_code_execution=allow_code_execution,
        )  # fmt: skip
        problems = chosen.problems(MINED if limit is None and task == DEMO else limit)
        target: Any
        if target_url is None:
            target, draft, tokenizer = load(model, assistant, dtype, device)
        elif assistant is not None:
            draft, _, tokenizer = load(assistant, None, dtype, device)
        else:
            _, draft, tokenizer = load(None, None, dtype, device)
        if target_url is not None:
            target = servers.enter_context(_server("--target", target_url, target_model, per_minute, timeout))
        wrap = (lambda text: chats(tokenizer, [text])[0]) if chat else str
        with _going_on(out):
            run(
                target, draft, tokenizer, chosen, problems, out, settings,
                batch_size=batch_size, workers=workers, resume=resume, wrap=wrap, source=source,
            )  # fmt: skip
    if int(os.environ.get("RANK", "0")) == 0:
        show(_report(out))


def fit_autojudge(
    data: Annotated[Path, typer.Argument(help="folder that `hf-lossy mine` wrote")],
    out: Annotated[Path, typer.Option(help="folder of the head; must not exist")],
    model: Model = None,
    assistant: Assistant = None,
    head: Annotated[str, typer.Option(help="linear or mlp")] = "linear",
    features: Annotated[str, typer.Option(help="whose hidden states: draft, target or both")] = "both",
    position: Annotated[
        str, typer.Option(help="token: that of the drafted token; predicting: the one before")
    ] = "token",
    folds: Annotated[int, typer.Option(help="figures from so many folds by problem; 0: one split 90/10")] = 0,
    recall: Annotated[float, typer.Option(help="of important tokens, that the head's own threshold rejects")] = 0.9,
    compare: Annotated[bool, typer.Option("--compare", help="also other classifiers and inputs, with plots")] = False,
    seed: Annotated[int, typer.Option(help="of the split by problem and of training")] = 0,
    dtype: DType = "float32",
    device: Device = "auto",
) -> None:
    """Train AutoJudge's classifier on mined mismatches and say on held-out problems how good it is."""
    from . import check_pair, load, needs

    needs("train", "datasets", "sklearn", "matplotlib")
    untargeted = features == "draft" and assistant is not None and model is None  # the target may be behind a server
    if not untargeted:
        check_pair(model, assistant)
    if out.exists():  # before models are loaded
        raise ValueError(f"{out} exists: choose another --out, or delete it to fit again")
    from ..methods.autojudge.classifiers import JudgeSettings
    from ..methods.autojudge.fit import fit_autojudge as run

    settings = JudgeSettings(features, position, head, recall=recall, folds=folds, seed=seed)
    if untargeted:
        target, (draft, _, tokenizer) = None, load(assistant, None, dtype, device)
    else:
        target, draft, tokenizer = load(model, assistant, dtype, device)
    fitted, report = run(data, out, target, draft, tokenizer, settings, compare)
    screen = console()
    screen.print(_thresholds(report, folds))
    if report.comparison:
        screen.print(_comparison(report.comparison))
    chosen = "" if report.c is None else f", C = {report.c:g}"
    late = f"; {report.unconverged} fits ended before they converged" if report.unconverged else ""
    kept, accepted = report.at(report.threshold)
    show(
        f"{out}: a {head} head on the {fitted.config.features}{chosen}, AUROC {report.auroc:.3f}, Brier {report.brier:.4f}{late}; "
        f"its threshold {report.threshold:.10g} rejects {kept:.1%} of the important tokens and accepts {accepted:.1%} of the others"
    )


def _thresholds(report: "JudgeReport", folds: int) -> Any:
    """A few of the tabled thresholds, the head's own among them."""
    from rich.table import Table

    rows = report.thresholds
    step = max(1, len(rows) // SHOWN)
    table = Table("threshold", "important rejected", "unimportant accepted")
    for i, row in enumerate(rows):
        own = row["threshold"] == report.threshold
        if own or i % step == 0:
            mark = " (default)" if own else ""
            table.add_row(f"{row['threshold']:.10g}{mark}", f"{row['recall']:.3f}", f"{row['accepted']:.3f}")
    source = f"out of {folds} folds" if folds else "held out"
    table.caption = (
        f"{report.held_out} mismatches {source}, {report.held_out_important} important; in all {report.mismatches} of "
        f"{report.problems} problems, {report.important:.1%} important"
    )
    return table


def _comparison(rows: list[dict[str, Any]]) -> Any:
    """Every variant's AUROC."""
    from rich.table import Table

    table = Table("varied", "", "AUROC", "in training")
    for i, row in enumerate(rows):
        first = i == 0 or rows[i - 1]["group"] != row["group"]
        name = row["group"] if first else ""
        table.add_row(name, row["input"], f"{row['auroc']:.3f}", f"{row['auroc_train']:.3f}")
    return table


@contextmanager
def _going_on(out: Path) -> Iterator[None]:
    """Says where what is done lies, if mining ends early."""
    from torch import OutOfMemoryError

    try:
        yield
    except KeyboardInterrupt:
        show(f"interrupted; what is done is in {out}.partial: the same command with --resume goes on")
        raise
    except (OSError, ValueError) as error:
        if any(Path(f"{out}.partial").glob("*.jsonl")):
            # Others, of Python or of a library, are made of more than a line.
            plain = type(error) in (ValueError, OSError, PermissionError, TimeoutError, ConnectionError)
            kind = type(error) if plain else OSError if isinstance(error, OSError) else ValueError
            raise kind(f"{error}. What is done is in {out}.partial: --resume goes on from there") from None
        raise
    except OutOfMemoryError:
        raise ValueError(
            "the device has no room for so many problems at once: a smaller --batch-size and --resume go on"
        ) from None


def _server(option: str, url: str | None, model: str | None, per_minute: float | None, timeout: float) -> Any:
    """The endpoint that `{option}-url` and `{option}-model` name, once it has answered."""
    from ..tasks.endpoint import Endpoint

    if url is None or model is None:
        raise ValueError(
            f"this needs {option}-url and {option}-model: an OpenAI-compatible server and a model's name there"
        )
    endpoint = Endpoint(url, model, timeout=timeout, per_minute=per_minute)
    try:
        endpoint.check()
    except BaseException:
        endpoint.close()
        raise
    return endpoint


def _report(out: Path) -> str:
    """What a dataset holds, in a few lines."""
    from ..artifacts.reading import read_object
    from ..methods.autojudge.mined import RECORD

    facts = read_object(out / RECORD)
    found = facts["found"]
    share = found["important"] / max(found["mismatches"], 1)
    lines = [
        f"{out}: {found['mismatches']} mismatches of {facts['problems']} problems, {found['important']} important ({share:.1%}), "
        "with a data card"
    ]
    for count, what in (
        (found["problems_without_answer"], "problems were not searched: the target's response has no answer"),
        (found["cut_by_mismatches"], "problems were cut off at --max-mismatches"),
        (found["cut_by_seconds"], "problems were cut off at --max-seconds"),
        (found["retokenised"], "continuations have another spelling in tokens than the server's text suggests"),
    ):
        if count:
            lines.append(f"{count} {what}")
    return "\n".join(lines)
