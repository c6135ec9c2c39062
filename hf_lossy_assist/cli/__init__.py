"""The `hf-lossy` command. Heavy imports wait until a command runs, so `--help` is quick."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal import console, show_json, streamer
from . import autojudge as judge_commands
from . import commands, exits
from . import policies as policies_command
from . import specdec as specdec_commands
from . import sv as profile_commands
from .commands import chats
from .sv import Companion, load_companion, load_profile


if TYPE_CHECKING:
    from ..stats.report import RowStats

app = typer.Typer(
    help="Assisted generation for Hugging Face Transformers: faster, batched, measured.",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
)

DEMO_PROBLEMS = 3
OPTIONS = dict.fromkeys(("--head", "--threshold"), ("sprinter", "autojudge")) | {"--window": ("autojudge",)}
OPTIONS |= dict.fromkeys(("--profile", "--companion", "--gamma"), ("sv",))  # whose each is
COLOURS = ("green", "magenta", "bold yellow", "cyan")  # of stats.SOURCES


def main() -> None:
    """Entry point: what users can mend is one line on stderr and exit code 2."""
    sys.exit(exits.run(app))


commands.add_to(app)
judge_commands.add_to(app)
specdec_commands.add_to(app)
profile_commands.add_to(app)
policies_command.add_to(app)


@app.command()
def generate(
    model: Annotated[str | None, typer.Option(help="target: a path or Hub id; default the embedded demo")] = None,
    assistant: Annotated[str | None, typer.Option(help="draft: a path or Hub id; default the embedded demo")] = None,
    policy: Annotated[str, typer.Option(help="name, JSON, file, folder or Hub id; `target`: no draft")] = "strict",
    head: Annotated[str | None, typer.Option(help="of sprinter and autojudge; default the demo's")] = None,
    threshold: Annotated[float | None, typer.Option(help="of sprinter (0.5) and autojudge (the head's own)")] = None,
    window: Annotated[int | None, typer.Option(help="of autojudge: tokens drafted a round (32)")] = None,
    profile: Annotated[str | None, typer.Option(help="of sv: a folder or Hub id; default the demo's")] = None,
    companion: Companion = None,
    gamma: Annotated[int | None, typer.Option(help="of sv: tokens drafted a round; default as profiled")] = None,
    fallback: Annotated[bool, typer.Option("--fallback", help="no drafts while they do not pay")] = False,
    prompt: Annotated[
        list[str] | None, typer.Option(help="a prompt (repeatable); default a few demo problems")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with `prompt` (or GSM8K, Spec-Bench rows)")] = None,
    max_new_tokens: Annotated[int, typer.Option()] = 128,
    do_sample: Annotated[bool, typer.Option("--do-sample", help="sample; default greedy")] = False,
    temperature: Annotated[float, typer.Option(help="with --do-sample")] = 1.0,
    top_k: Annotated[int, typer.Option(help="with --do-sample; 0: all tokens")] = 0,
    top_p: Annotated[float, typer.Option(help="with --do-sample; 1: all tokens")] = 1.0,
    seed: Annotated[int, typer.Option(help="of sampling and of the demo problems")] = 0,
    batch_size: Annotated[int, typer.Option()] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; default cuda where there is one")] = "auto",
    chat: Annotated[bool, typer.Option("--chat", help="put prompts through the tokenizer's chat template")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="print the text as it is written (batch size 1)")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Continue prompts with a draft model's help, and say how much it helped."""
    import torch

    from .. import demo
    from ..generation.enable import enable
    from ..policy.methods import SpeculativeVerification
    from ..stats.report import SpeculationStats
    from ..tasks.prompts import read_prompts
    from ..validation import LONGEST_DRAFT, MOST_NEW_TOKENS, MOST_ROWS, check_int, check_positive

    check_int("--max-new-tokens", max_new_tokens, 1, MOST_NEW_TOKENS)
    check_int("--batch-size", batch_size, 1, MOST_ROWS)
    check_int("--seed", seed, 0)
    check_int("--gamma", 1 if gamma is None else gamma, 1, LONGEST_DRAFT)
    check_int("--top-k", top_k, 0)
    check_positive("--top-p", top_p, 1.0, hint=": leave --do-sample out for greedy decoding")
    check_positive("--temperature", temperature)
    if stream and (as_json or batch_size > 1):
        raise ValueError("--stream shows one text at a time: leave out --json and --batch-size")
    if prompt and prompts:
        raise ValueError("--prompt and --prompts are two sources: pass one of them")
    if policy != "target":
        check_pair(model, assistant)
    elif fallback:
        raise ValueError("--fallback switches drafting off, and --policy target has none: leave it out")
    given = {"--head": head, "--threshold": threshold, "--window": window}
    given |= {"--profile": profile, "--companion": companion, "--gamma": gamma}
    check_options(policy, given)
    chosen = None if policy == "sv" else _policy(policy, head, threshold, window, model is None)
    made = load_profile(profile, companion, model is None) if policy == "sv" else None
    texts = list(prompt or []) or (read_prompts(prompts) if prompts else [])
    problems = [] if texts or model is not None else demo.problems(DEMO_PROBLEMS, seed)
    texts = texts or [p.prompt for p in problems]
    if not texts:
        raise ValueError("nothing to continue: pass --prompt or --prompts with --model")
    if not all(t.strip() for t in texts):
        raise ValueError("a prompt is empty: every prompt needs some text")

    target, draft, tokenizer = load(model, assistant, dtype, device)
    if made is not None:
        chosen = SpeculativeVerification(made, load_companion(companion, target, draft, tokenizer), gamma)
    if fallback and chosen is not None:
        chosen = chosen.with_fallback()
    if chosen is not None:  # else the target's own `generate`, whatever policy came with its files
        enable(target)
    texts = chats(tokenizer, texts) if chat else texts

    torch.manual_seed(seed)
    outputs: list[dict[str, Any]] = []
    calls: list[SpeculationStats] = []
    seconds = 0.0
    for start in range(0, len(texts), batch_size):
        inputs = tokenizer(texts[start : start + batch_size], return_tensors="pt", padding=True).to(target.device)
        inputs.pop("token_type_ids", None)
        if stream:
            inputs["streamer"] = streamer(tokenizer, skip_prompt=True)
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": do_sample}
        if do_sample:
            settings |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        if chosen is not None:
            settings |= {"assistant_model": draft, "lossy_policy": chosen}
        began = time.perf_counter()
        out = target.generate(**inputs, **settings, return_dict_in_generate=True)
        seconds += time.perf_counter() - began
        stats = getattr(out, "speculation", None)
        calls += [] if stats is None else [stats]
        new = out.sequences[:, inputs["input_ids"].shape[1] :]
        for i, padded in enumerate(new.tolist()):
            row = None if stats is None else stats.rows[i]
            ids = _trimmed(padded, target.generation_config) if row is None else padded[: row.num_new_tokens]
            outputs.append({"prompt": texts[start + i], "ids": ids, "row": row, "stats": stats})

    merged = SpeculationStats.merge(calls) if calls else None
    if as_json:
        report = {
            "model": model or "demo/target",
            "assistant": (assistant or "demo/draft") if chosen else None,
            "policy": policy if chosen is None else chosen.to_dict() or "strict",
            "seconds": round(seconds, 4),
            "speculation": merged.to_dict() if merged else None,
            "outputs": [
                {
                    "prompt": o["prompt"],
                    "text": tokenizer.decode(o["ids"], skip_special_tokens=True),
                    "token_ids": o["ids"],
                    "speculation": o["stats"].summary(o["row"], sources=True) if o["row"] else None,
                }
                for o in outputs
            ],
        }
        show_json(report)
        return

    _show(outputs, tokenizer, problems, streamed=stream)
    _report(merged, sum(len(o["ids"]) for o in outputs), seconds, policy)


def _policy(policy: str, head: str | None, threshold: float | None, window: int | None, demo_models: bool) -> Any:
    """`--policy`: what `lossy_policy=` takes, a method with its head, or a repository on the Hub."""
    from .. import demo
    from ..artifacts.heads import Head
    from ..policy.forms import as_policy, of_name
    from ..policy.policy import LossyPolicy
    from ..registry import Names, method

    if policy == "target":
        return None
    if policy in Names("method") and "head" in method(policy).needs:
        if head is None and not demo_models:
            raise ValueError(
                f"--policy {policy} needs --head for models of your own: a folder or org/name (hf-lossy fit)"
            )
        loaded = demo.head(policy) if head is None else Head.from_pretrained(head)
        given: dict[str, Any] = {"threshold": threshold, "window": window}
        return of_name(policy, {"head": loaded}, **{name: value for name, value in given.items() if value is not None})
    on_the_hub = policy.count("/") == 1 and not policy.endswith(".json") and not policy.lstrip().startswith("{")
    if on_the_hub and not Path(policy).exists():
        return LossyPolicy.from_pretrained(policy)
    return as_policy(policy)


def check_options(policy: str, given: dict[str, Any]) -> None:
    """Refuse an option that this policy has no use for."""
    for option, value in given.items():
        if value is not None and policy not in OPTIONS[option]:
            raise ValueError(f"{option} is for --policy {' or '.join(OPTIONS[option])}, not {policy!r}")


def check_pair(model: str | None, assistant: str | None) -> None:
    """Both or neither: the demo's draft fits the demo's target alone."""
    if (model is None) != (assistant is None):
        given, missing = ("--model", "--assistant") if assistant is None else ("--assistant", "--model")
        raise ValueError(f"{given} needs {missing} beside it (without both, the demo models run)")


def needs(extra: str, *modules: str) -> None:
    """Refuse in one line where an optional dependency is missing."""
    from importlib.util import find_spec

    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ImportError(f"this command needs {', '.join(missing)}: pip install 'hf_lossy_assist[{extra}]'")


def load(model: str | None, assistant: str | None, dtype: str, device: str) -> tuple[Any, Any, Any]:
    """Target, draft and tokenizer as the options name them; the demo's where both are None."""
    import torch

    from .. import demo
    from ..models.loading import load_model, load_tokenizer

    if device == "auto":  # under `accelerate launch` each process has its own
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise ValueError(f"--dtype: expected {', '.join(kinds)}, got {dtype!r}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    if model is None and assistant is None:
        models = demo.load(kinds[dtype], device)
        return models.target, models.draft, models.tokenizer

    def read(source: str | None) -> Any:
        return None if source is None else load_model(source, dtype=kinds[dtype]).to(device).eval()

    source = model or str(demo.FOLDER / "target")
    tokenizer = load_tokenizer(source, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return read(source), read(assistant), tokenizer


def _trimmed(ids: list[int], config: Any) -> list[int]:
    """New tokens up to the first end token; the rest is padding."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)


def _show(outputs: list[dict[str, Any]], tokenizer: Any, problems: list[Any], streamed: bool) -> None:
    """Prompts and continuations; drafted-and-accepted tokens in another colour than the target's own."""
    from rich.text import Text

    from .. import demo

    screen = console(highlight=False, soft_wrap=True)
    solved = 0
    for i, output in enumerate(outputs):
        if not streamed:
            screen.print(Text(output["prompt"].strip(), style="dim"))
            screen.print(_coloured(output["ids"], output["row"], tokenizer))
            screen.print()
        if problems:
            solved += demo.answer(tokenizer.decode(output["ids"])) == problems[i].answer
    if problems:
        screen.print(f"solved {solved} of {len(problems)} problems")


def _coloured(ids: list[int], row: "RowStats | None", tokenizer: Any) -> Any:
    from itertools import groupby

    from rich.text import Text

    text = Text()
    kinds = row.token_sources if row else [None] * len(ids)
    # Neighbours of one kind are decoded together: a word may be spread over several tokens.
    for kind, group in groupby(zip(kinds, ids, strict=True), key=lambda pair: pair[0]):
        piece = tokenizer.decode([token for _, token in group], skip_special_tokens=True)
        text.append(piece, style="" if kind is None else COLOURS[kind])
    return text


def _report(stats: Any, tokens: int, seconds: float, policy: str) -> None:
    from rich.text import Text

    from ..stats.report import SOURCES

    screen = console(highlight=False)
    if stats is not None:
        legend = Text("tokens: ").append_text(
            Text(" ").join(Text(name, style=colour) for name, colour in zip(SOURCES, COLOURS, strict=True))
        )
        screen.print(legend)
        screen.print(stats.table())
    screen.print(f"policy {policy}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
