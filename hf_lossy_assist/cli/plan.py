"""`hf-lossy plan`: does SPRINTER pay on this machine?"""

import dataclasses
from typing import Annotated, Any

import typer

import hf_lossy_assist as hla

from ..tasks.prompts import read_prompts
from ..terminal import console, show, show_json, table
from ..validation import LONGEST_DRAFT, MOST_NEW_TOKENS, check_int, check_number
from .made_with import models_from, remark_on, sources_in
from .options import (
    DEMO,
    AsJson,
    Assistant,
    Chat,
    Device,
    DoSample,
    DType,
    Model,
    chats,
    check_pair,
    check_prompts,
    demo_texts,
    load,
    needs,
)


def plan(
    head: Annotated[str | None, typer.Option(help="SPRINTER head: a folder or Hub id (default: the demo's)")] = None,
    model: Model = None,
    assistant: Assistant = None,
    prompts: Annotated[str, typer.Option(help="prompts to time: JSON lines, or `demo`")] = DEMO,
    limit: Annotated[int, typer.Option(help="prompts to time")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="new tokens of each text")] = 96,
    max_draft: Annotated[int, typer.Option(help="most draft tokens of one round")] = 20,
    max_distance: Annotated[float, typer.Option(help="largest mean d_TV per token that the advice may cost")] = 0.02,
    do_sample: DoSample = False,
    repeats: Annotated[int, typer.Option(help="repetitions of each timing; medians are used")] = 3,
    dtype: DType = "float32",
    device: Device = "auto",
    chat: Chat = False,
    as_json: AsJson = False,
) -> None:
    """Does SPRINTER pay here, and at which threshold? Measures this machine and predicts.

    Without --model and --assistant the models are those that the head's folder was made with.

    Examples:

      hf-lossy plan

      hf-lossy plan --head head --prompts questions.jsonl --chat --limit 8
    """
    needs("train", "datasets", "scipy", "sklearn")
    check_pair(model, assistant)
    check_int("--limit", limit, 1)
    check_int("--repeats", repeats, 1, 10**6)
    check_int("--max-new-tokens", max_new_tokens, 2, MOST_NEW_TOKENS)
    check_int("--max-draft", max_draft, 1, LONGEST_DRAFT)
    check_number("--max-distance", max_distance, 0.0, 1.0)
    from ..methods.sprinter.held_out import read_held_out
    from ..methods.sprinter.plan import plan as run

    if head is None and model is not None:
        raise ValueError("--model needs --head: the demo head is for the demo models alone")
    source = head or str(hla.demo.FOLDER / "sprinter_head")
    loaded = hla.Head.from_pretrained(source)
    data = read_held_out(source)
    made = models_from(model, assistant, sources_in([loaded]))
    check_prompts(prompts, made.model)
    texts = [text.prompt for text in demo_texts(limit, 0)] if prompts == DEMO else read_prompts(prompts, limit)
    target, draft, tokenizer = load(made.model, made.assistant, dtype, device)
    loaded.check(target=target, draft=draft, tokenizer=tokenizer)
    texts = chats(tokenizer, texts) if chat else texts
    found = run(
        target, draft, tokenizer, texts, loaded, data, new_tokens=max_new_tokens, max_draft=max_draft, do_sample=do_sample,
        max_distance=max_distance, repeats=repeats,
    )  # fmt: skip
    remark_on([loaded], do_sample)
    show_json(dataclasses.asdict(found)) if as_json else show(_plan_text(found))


def _plan_text(found: Any) -> str:
    titles = (
        "η_TP", "η_FP", "tokens\na call", "Thm\n3.3", "unchecked", "d_TV a\ntoken", "tokens/s", "×\nstrict", "×\nsvip", "×\ntarget"
    )  # fmt: skip
    predicted = table("τ", *titles)
    predicted.padding = (0, 1, 0, 0)  # eleven columns
    for line in found.lines:
        predicted.add_row(
            f"{line.threshold:g}", f"{line.eta_tp:.3f}", f"{line.eta_fp:.3f}", f"{line.tokens_per_call:.2f}",
            f"{line.by_theorem:.2f}", f"{line.unchecked:.1%}", f"{line.distance:.4f}", f"{line.tokens_per_second:.0f}",
            f"{line.of_strict:.2f}", f"{line.of_svip:.2f}", f"{line.of_target:.2f}",
        )  # fmt: skip
    screen = console(color_system=None)  # its text is shown once more
    with screen.capture() as capture:
        screen.print(predicted)
    mean = sum(length * count for length, count in found.runs.items()) / sum(found.runs.values())
    return (
        f"measured here: draft step t_d {found.t_draft * 1e3:.2f} ms, target call t_t {found.t_target * 1e3:.2f} ms, "
        f"head t_v {found.t_verifier * 1e3:.3f} ms; a call {found.per_text * 1e3:.1f} ms + "
        f"{found.per_round * 1e3:.2f} ms a round + {found.per_token * 1e3:.2f} ms a drafted token\n"
        f"target alone {found.target_per_second:.0f} tokens/s; strict γ = 5 {found.strict_per_second:.0f} tokens/s, "
        f"{found.strict_per_call:.2f} tokens a call; svip {found.svip_per_second:.0f} tokens/s\n"
        f"held-out texts: {found.acceptable:.1%} of the drafted tokens acceptable, {mean:.1f} in a row\n\n"
        f"predicted:\n{capture.get()}\n{found.advice}"
    )
