"""`hf-lossy plan`: does SPRINTER pay on this machine, and what do rounds cost where the target is spread over devices?"""

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
    Model,
    Overrides,
    chats,
    check_pair,
    check_prompts,
    demo_texts,
    load,
    needs,
)
from .plan_spread import Spread, plan_spread


OF_SPRINTER = ("head", "prompts", "limit", "max_new_tokens", "max_draft", "max_distance", "do_sample", "chat")


def plan(
    ctx: typer.Context,
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
    dtype: Annotated[
        str | None, typer.Option(help="of the models: float32, bfloat16, … (default: float32; with --tp bfloat16)")
    ] = None,
    device: Device = "auto",
    overrides: Overrides = None,
    chat: Chat = False,
    tp: Annotated[
        int | None, typer.Option(help="plan for a target spread over so many devices, in place of SPRINTER")
    ] = None,
    link: Annotated[
        float | None, typer.Option(help="GB/s between two devices, in one direction (default: 300)")
    ] = None,
    hop_us: Annotated[
        float | None,
        typer.Option(help="microseconds of a small all-reduce, with what the framework does around it (default: 15)"),
    ] = None,
    memory: Annotated[float | None, typer.Option(help="GB/s that a device reads from its memory")] = None,
    tflops: Annotated[float | None, typer.Option(help="teraflops a second of a device")] = None,
    step_ms: Annotated[
        str | None,
        typer.Option(help="measured on one device, in ms: a target step, a block of 6 tokens, a draft step"),
    ] = None,
    device_gb: Annotated[
        float | None, typer.Option(help="GB of weights that a device has room for; the rest in main memory")
    ] = None,
    host_link: Annotated[
        float | None, typer.Option(help="GB/s between main memory and a device (default: 50)")
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option(help="texts at once, with --tp; several with commas (default: 1)")
    ] = None,
    context: Annotated[int | None, typer.Option(help="cached tokens of each text, with --tp (default: 2048)")] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(help="share of drafted tokens accepted, with --tp; several with commas (default: 0.8)"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Does SPRINTER pay here, and at which threshold? Measures this machine and predicts.

    Without --model and --assistant the models are those that the head's folder was made with.

    With --tp N: what rounds cost where the target is spread over N devices (docs/scaling.md), from --memory and --tflops, from --step-ms, or measured
    here on models of the sizes of --model and --assistant, of which the configs alone are read. Without any of them: Llama 3.1 70B and 8B on devices
    like an H100.

    Examples:

      hf-lossy plan

      hf-lossy plan --head head --prompts questions.jsonl --chat --limit 8

      hf-lossy plan --tp 4 --link 300 --batch-size 1,8,32
    """
    spread: dict[str, Any] = {
        "link": link, "hop_us": hop_us, "memory": memory, "tflops": tflops, "step_ms": step_ms, "device_gb": device_gb, "host_link": host_link,
        "batch_size": batch_size, "context": context, "acceptance": acceptance,
    }  # fmt: skip
    spread = {name: value for name, value in spread.items() if value is not None}
    if tp is not None:
        check_pair(model, assistant)
        _refuse_of_sprinter(ctx)
        if {"step_ms", "context"} <= spread.keys():
            raise ValueError("--step-ms is of one context, whichever it was measured at: leave --context out")
        return plan_spread(Spread(tp, **spread), model, assistant, dtype or "bfloat16", device, repeats, as_json)
    for name in spread:
        raise ValueError(
            f"--{name.replace('_', '-')} is for a target spread over devices: pass --tp N as well, or leave it out"
        )
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
    if made.drafter is not None:
        raise ValueError(
            f"plan replays texts, and what a drafter on the target's states ({made.drafter}) says depends on the round: hf-lossy evaluate {head}"
        )
    check_prompts(prompts, made.model)
    texts = [text.prompt for text in demo_texts(limit, 0)] if prompts == DEMO else read_prompts(prompts, limit)
    target, draft, tokenizer = load(made.model, made.assistant, dtype or "float32", device, overrides)
    loaded.check(target=target, draft=draft, tokenizer=tokenizer)
    texts = chats(tokenizer, texts) if chat else texts
    found = run(
        target, draft, tokenizer, texts, loaded, data, new_tokens=max_new_tokens, max_draft=max_draft, do_sample=do_sample,
        max_distance=max_distance, repeats=repeats,
    )  # fmt: skip
    remark_on([loaded], do_sample)
    show_json(dataclasses.asdict(found)) if as_json else show(_plan_text(found))


def _refuse_of_sprinter(context: typer.Context) -> None:
    """Refuse options of the command line that are of SPRINTER's plan alone."""
    for name in OF_SPRINTER:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise ValueError(f"--{name.replace('_', '-')} is for SPRINTER's plan: leave it out, or leave --tp out")


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
