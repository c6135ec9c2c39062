"""`hf-lossy generate`: prompts continued with a draft model's help."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_lossy_assist as hla

from ..tasks.prompts import read_prompts
from ..terminal import Bar, show_json, streamer
from ..validation import MOST_NEW_TOKENS, MOST_ROWS, check_int, check_positive
from .generated import Output, json_report, show_outputs, show_report, write_page
from .made_with import MadeWith, folder_of, models_from, remark_on, remark_on_companion, sources_in
from .options import (
    TARGET,
    AsJson,
    Assistant,
    Chat,
    Companion,
    Device,
    DoSample,
    DType,
    Model,
    Seed,
    Temperature,
    TopK,
    TopP,
    chats,
    check_sampling,
    load,
    read_drafter,
)
from .policy_options import PolicyOptions


DEMO_PROBLEMS = 3


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How the texts are written."""

    max_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int
    batch_size: int
    stream: bool

    def __post_init__(self) -> None:
        check_int("--max-new-tokens", self.max_new_tokens, 1, MOST_NEW_TOKENS)
        check_int("--batch-size", self.batch_size, 1, MOST_ROWS)
        check_int("--seed", self.seed, 0)
        check_int("--top-k", self.top_k, 0)
        check_positive("--top-p", self.top_p, 1.0, hint=": leave --do-sample out for greedy decoding")
        check_positive("--temperature", self.temperature)
        check_sampling(self.do_sample, self.temperature, self.top_k, self.top_p)

    def settings(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        settings: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.do_sample}
        if self.do_sample:
            settings |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return settings


def generate(
    model: Model = None,
    assistant: Assistant = None,
    policy: Annotated[
        str, typer.Option(help=f"method, rule or stop by name, JSON, file, folder or Hub id; `{TARGET}` for no draft")
    ] = "strict",
    head: Annotated[
        str | None,
        typer.Option(help="head for sprinter, autojudge or specdec: a folder or Hub id (default: the demo's)"),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="decision threshold of the head (default: the head's own, or the method's)")
    ] = None,
    window: Annotated[int | None, typer.Option(help="draft length for autojudge (default: 32)")] = None,
    profile: Annotated[
        str | None, typer.Option(help="profile for sv: a folder or Hub id (default: the demo's)")
    ] = None,
    companion: Companion = None,
    gamma: Annotated[int | None, typer.Option(help="draft length for sv (default: the profile's)")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="what drafts instead of the assistant: suffix, composite, …, or JSON with its name"),
    ] = None,
    compile_rounds: Annotated[
        bool, typer.Option("--compile", help="compile the rounds; the first texts wait for it")
    ] = False,
    fallback: Annotated[bool, typer.Option("--fallback", help="stop drafting while it does not pay")] = False,
    prompt: Annotated[
        list[str] | None, typer.Option(help="a prompt; repeatable (default: a few demo problems)")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `prompt` (or rows of GSM8K or Spec-Bench)")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="most prompts (default: all; of the demo 3, or one batch)")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="most new tokens of each text")] = 128,
    do_sample: DoSample = False,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    batch_size: Annotated[int, typer.Option(help="prompts at a time")] = 1,
    dtype: DType = "float32",
    device: Device = "auto",
    chat: Chat = False,
    stream: Annotated[bool, typer.Option("--stream", help="print each text as it is written (batch size 1)")] = False,
    html: Annotated[
        Path | None, typer.Option(help="write the texts as a page, each token with its source, p and q")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue prompts with a draft model's help, and say how much it helped.

    Without --model and --assistant the models are those that the head's or profile's folder was made with, or the demo's.

    Examples:

      hf-lossy generate --policy svip

      hf-lossy generate --model M --assistant D --prompts questions.jsonl --chat --policy svip --fallback --batch-size 8

      hf-lossy generate --policy sprinter --head head --threshold 0.7 --prompt "How many legs have six ants?"
    """
    decoding = Decoding(
        max_new_tokens=max_new_tokens, do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        batch_size=batch_size, stream=stream,
    )  # fmt: skip
    options = PolicyOptions(
        policy=policy, head=head, threshold=threshold, window=window, profile=profile, companion=companion, gamma=gamma,
        fallback=fallback,
    )  # fmt: skip
    if stream and (as_json or batch_size > 1):
        raise ValueError("--stream shows one text at a time: leave out --json and --batch-size")
    drafts = read_drafter(drafter, policy, model, assistant)
    finish, parts = options.read(demo_models=model is None)
    made = (
        models_from(model, assistant, [*sources_in(parts), *folder_of(policy)])
        if drafts is None
        else MadeWith(model, assistant)
    )
    if limit is not None:
        check_int("--limit", limit, 1)
    texts, problems = _texts(prompt, prompts, made.model, seed, limit, max(DEMO_PROBLEMS, batch_size))
    target, draft, tokenizer = load(made.model, made.assistant, dtype, device)
    chosen = finish(target, draft, tokenizer, made.companion)
    if drafts is not None and not drafts.needs_assistant:
        draft = None
    asked = {"assistant_model": draft, "drafter": drafts, "lossy_policy": chosen}
    if compile_rounds:
        asked["cache_implementation"] = "static"
    outputs, seconds = _write(target, tokenizer, asked, chats(tokenizer, texts) if chat else texts, decoding)
    if html is not None:
        write_page(html, outputs, tokenizer, policy, (target, draft), chosen)
    remark_on(parts, do_sample)
    remark_on_companion(chosen, batch_size)
    if as_json:
        names: dict[str, Any] = {
            "model": made.model or "demo/target",
            "assistant": (made.assistant or "demo/draft") if chosen and draft is not None else None,
        }
        if drafter is not None:
            names["drafter"] = drafter
        names["policy"] = policy if chosen is None else chosen.to_dict() or "strict"
        show_json(json_report(outputs, tokenizer, names, seconds))
        return
    show_outputs(outputs, tokenizer, problems, streamed=stream)
    show_report(outputs, seconds, policy)


def _texts(
    prompt: list[str] | None, prompts: Path | None, model: str | None, seed: int, limit: int | None, usual: int
) -> tuple[list[str], list[Any]]:
    """The prompts, and the demo problems that they are, if they are; `usual`: so many of the demo where there is no limit."""
    if prompt and prompts:
        raise ValueError("--prompt and --prompts are two sources: pass one of them")
    texts = list(prompt or [])[:limit] or (read_prompts(prompts, limit) if prompts else [])
    problems = [] if texts or model is not None else hla.demo.problems(usual if limit is None else limit, seed)
    texts = texts or [p.prompt for p in problems]
    if not texts:
        raise ValueError("nothing to continue: pass --prompt or --prompts with --model")
    if not all(t.strip() for t in texts):
        raise ValueError("a prompt is empty: every prompt needs some text")
    return texts, problems


def _write(
    target: Any, tokenizer: Any, asked: dict[str, Any], texts: list[str], decoding: Decoding
) -> tuple[list[Output], float]:
    """Each text's continuation, and the seconds that writing took. `asked`: what drafts, and the policy."""
    import torch

    settings = decoding.settings()
    if asked["lossy_policy"] is not None:  # else the target's own `generate`, whatever policy came with its files
        hla.enable(target)
        # The tokenizer too: heads and profiles refuse one that they were not made with.
        settings |= {name: value for name, value in asked.items() if value is not None} | {"tokenizer": tokenizer}
    torch.manual_seed(decoding.seed)
    outputs: list[Output] = []
    seconds = 0.0
    with Bar(len(texts), "writing", "prompts", quiet=decoding.stream or len(texts) <= decoding.batch_size) as bar:
        for start in range(0, len(texts), decoding.batch_size):
            batch = texts[start : start + decoding.batch_size]
            inputs = tokenizer(batch, return_tensors="pt", padding=True).to(target.device)
            inputs.pop("token_type_ids", None)
            if decoding.stream:
                inputs["streamer"] = streamer(tokenizer, skip_prompt=True)
            began = time.perf_counter()
            out = target.generate(**inputs, **settings, return_dict_in_generate=True)
            seconds += time.perf_counter() - began
            stats = getattr(out, "speculation", None)
            new = out.sequences[:, inputs["input_ids"].shape[1] :]
            for i, padded in enumerate(new.tolist()):
                row = None if stats is None else stats.rows[i]
                ids = _trimmed(padded, target.generation_config) if row is None else padded[: row.num_new_tokens]
                outputs.append(
                    Output(batch[i], ids, row, stats, cut=not set(ids[-1:]) & set(_ends(target.generation_config)))
                )
            bar.to(start + len(batch))
    return outputs, seconds


def _trimmed(ids: list[int], config: Any) -> list[int]:
    """New tokens up to the first end token; the rest is padding."""
    ends = _ends(config)
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)


def _ends(config: Any) -> list[int | None]:
    return config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
