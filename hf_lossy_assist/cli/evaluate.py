"""`hf-lossy evaluate`: what a trained head does to right answers, and to the speed."""

from pathlib import Path
from typing import Annotated

import typer

import hf_lossy_assist as hla

from ..validation import check_number
from .compare import compare
from .drafters import Drafter
from .made_with import models_from, sources_in
from .measured import check_answers, prompts_of
from .options import AsJson, Assistant, Chat, Device, DType, Model, Resume, Seed, Shots


def evaluate(
    head: Annotated[
        str | None, typer.Argument(help="a head's folder or Hub id (default: the demo's judge)", show_default=False)
    ] = None,
    model: Model = None,
    assistant: Assistant = None,
    drafter: Drafter = None,
    task: Annotated[
        str | None, typer.Option(help="a task whose right answers are known: demo, gsm8k, math or a JSON-lines file")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="the problems of --task (default: a package's, or the Hub's)")
    ] = None,
    threshold: Annotated[
        list[float] | None,
        typer.Option(help="decision threshold; repeatable (default: the head's own, or the method's)"),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="most problems (default: all; 12 of the demo)")] = None,
    shots: Shots = 0,
    batch_size: Annotated[str, typer.Option(help="prompts at a time; several with commas: 1,8")] = "1",
    max_new_tokens: Annotated[int, typer.Option(help="most new tokens of each text")] = 128,
    out: Annotated[
        Path | None, typer.Option(help="folder to write; must not exist (default: nothing is written)")
    ] = None,
    resume: Resume = False,
    seed: Seed = 0,
    dtype: DType = "float32",
    device: Device = "auto",
    chat: Chat = False,
    as_json: AsJson = False,
) -> None:
    """Measure a head end to end: right answers and speed, beside the target alone, Transformers' assisted generation and svip.

    Without --model and --assistant the models are those that the head's folder was made with.

    Examples:

      hf-lossy evaluate

      hf-lossy evaluate judge --task demo --limit 64

      hf-lossy evaluate head --task gsm8k --data test.jsonl --threshold 0.5 --threshold 0.9
    """
    from ..policy.policy import made_by
    from ..registry import method as entry_of
    from ..tasks.conversations import NO_ANSWERS, ShareGPT

    if task == ShareGPT.name:
        raise ValueError(NO_ANSWERS)
    for value in threshold or ():
        check_number("--threshold", value, 0.0, 2.0)
    loaded = hla.Head.from_pretrained(head or str(hla.demo.FOLDER / "autojudge_head"))
    method = loaded.config.method
    made = models_from(model, assistant, sources_in([loaded]), drafter)
    if made.model is not None and task is None:
        raise ValueError("evaluate counts right answers: pass --task gsm8k or math with --data, or --task FILE")
    _, problems, _, source = prompts_of(None, task, data, made.model, limit, seed, shots)
    check_answers(problems, source)
    policies = {"svip": hla.as_policy("svip")}
    if not threshold:
        policies[method] = made_by(entry_of(method), head=loaded)
    for value in threshold or ():
        policies[f"{method}:threshold={value!r}"] = made_by(entry_of(method), head=loaded, threshold=value)
    # The annotation is for typer, which makes texts of what was typed: a folder's name could not stand in every one of them.
    compare(
        made.model, made.assistant, made.drafter, policies=policies, task=task, data=data, shots=shots, limit=limit, batch_size=batch_size,  # type: ignore[arg-type]
        max_new_tokens=max_new_tokens, static=False, out=out, resume=resume, seed=seed, dtype=dtype, device=device, chat=chat, as_json=as_json,
    )  # fmt: skip
