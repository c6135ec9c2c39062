"""The commands that make and share heads and policies: collect, fit, plan, push, pull. `cli` adds them to `hf-lossy`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..terminal import console, show, show_json
from ..validation import one_line


DEMO = "demo"
MIX = 0.15  # of `--for specdec`
DEMO_PROMPTS = 64  # of `--prompts demo` without --limit

Model = Annotated[str | None, typer.Option(help="target: a path or Hub id; default the embedded demo")]
Assistant = Annotated[str | None, typer.Option(help="draft: a path or Hub id; default the embedded demo")]
Prompts = Annotated[str, typer.Option(help="JSON lines with `prompt` (or GSM8K, Spec-Bench rows), or `demo`")]
Chat = Annotated[bool, typer.Option("--chat", help="put prompts through the tokenizer's chat template")]
DType = Annotated[str, typer.Option(help="float32, bfloat16 or float16")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; default cuda where there is one")]
Token = Annotated[str | None, typer.Option(help="of the Hub; default the stored one, or HF_TOKEN")]
Revision = Annotated[str | None, typer.Option(help="a branch, tag or commit")]

fit_app = typer.Typer(help="Train a head on collected data.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Add every command here to `app`."""
    app.command()(collect)
    app.add_typer(fit_app, name="fit")
    app.command()(plan)
    app.command()(push)
    app.command()(pull)


def collect(
    out: Annotated[Path, typer.Option(help="folder of the dataset; must not exist")],
    model: Model = None,
    assistant: Assistant = None,
    prompts: Prompts = DEMO,
    method: Annotated[
        str, typer.Option("--for", help="which head: sprinter (four rows a prompt) or specdec (one)")
    ] = "sprinter",
    mix: Annotated[
        float | None,
        typer.Option(help="of specdec: share of the draft's tokens replaced by the target's; default 0.15"),
    ] = None,
    lam: Annotated[float, typer.Option("--lambda", help="a token is acceptable where q(x) ≤ λ·p(x)")] = 1.2,
    limit: Annotated[int | None, typer.Option(help="prompts to use; default all (of the demo 64)")] = None,
    new_tokens: Annotated[int, typer.Option(help="positions of each row")] = 64,
    batch_size: Annotated[int, typer.Option(help="prompts at a time")] = 8,
    seed: Annotated[int, typer.Option(help="of sampling and of the demo problems")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an unfinished collection")] = False,
    greedy: Annotated[bool, typer.Option("--greedy", help="for greedy decoding; default sampling")] = False,
    temperature: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option()] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    dtype: DType = "float32",
    device: Device = "auto",
    chat: Chat = False,
) -> None:
    """Collect data for a head on the draft: its hidden state, the token it proposes, and p and q of that token."""
    from ..tasks.prompts import Text, read_texts
    from ..validation import check_int, nearest
    from . import check_pair, load, needs

    needs("train", "accelerate", "datasets")
    check_pair(model, assistant)
    check_int("--limit", DEMO_PROMPTS if limit is None else limit, 1)
    check_int("--seed", seed, 0)
    if method not in ("sprinter", "specdec"):
        raise ValueError(f"--for: {nearest('method', method, ('sprinter', 'specdec'))}")
    if mix is not None and method != "specdec":
        raise ValueError(f"--mix is for --for specdec, not {method}: leave it out")
    check_greedy(greedy, temperature, top_k, top_p)
    if prompts == DEMO and model is not None:
        raise ValueError("--prompts demo is for the demo models: pass a file of prompts with --model")
    from datasets import load_from_disk

    from ..artifacts.features import FeatureSpec
    from ..methods.sprinter.collect import CollectSettings
    from ..methods.sprinter.collect import collect as run

    own: dict[str, Any] = (
        {} if method == "sprinter" else {"features": FeatureSpec(position="token"), "mix": MIX if mix is None else mix}
    )
    settings = CollectSettings(new_tokens, lam, not greedy, temperature, top_k, top_p, batch_size, seed, **own)
    source = f"the demo task, calibration problems of seed {seed}" if prompts == DEMO else Path(prompts).name
    if prompts == DEMO:
        texts = [Text(*pair) for pair in _demo_texts(DEMO_PROMPTS if limit is None else limit, seed)]
    else:
        texts = read_texts(prompts, limit)
    target, draft, tokenizer = load(model, assistant, dtype, device)
    if chat:
        texts = [
            Text(text, t.continuation)
            for text, t in zip(chats(tokenizer, [t.prompt for t in texts]), texts, strict=True)
        ]
    try:
        run(target, draft, tokenizer, texts, out, settings, resume=resume, source=source)
    except KeyboardInterrupt:
        show(f"interrupted; what is done is in {out}.partial: the same command with --resume goes on")
        raise
    show(f"{out}: {len(load_from_disk(str(out)))} tokens of {len(texts)} prompts, with a data card")


@fit_app.command("sprinter")
def fit_sprinter(
    data: Annotated[Path, typer.Argument(help="folder that `hf-lossy collect` wrote")],
    out: Annotated[Path, typer.Option(help="folder of the head; must not exist")],
    lam: Annotated[
        list[float] | None, typer.Option("--lambda", help="repeatable; the data's own λ is the one kept")
    ] = None,
    head: Annotated[str, typer.Option(help="linear or mlp")] = "linear",
    width: Annotated[int, typer.Option(help="hidden units of an mlp")] = 64,
    balance: Annotated[bool, typer.Option(help="weigh both labels equally in the loss")] = True,
    seed: Annotated[int, typer.Option(help="of the split by prompt and of training")] = 0,
) -> None:
    """Train SPRINTER's verifier and say on held-out prompts how good it is."""
    from rich.table import Table

    from . import needs

    needs("train", "datasets", "sklearn", "matplotlib")
    from ..methods.sprinter.fit import FitSettings
    from ..methods.sprinter.fit import fit_sprinter as run

    fitted, reports = run(data, out, lam or (), FitSettings(kind=head, width=width, balance=balance, seed=seed))
    kinds = reports[0].auroc_by_kind
    table = Table("λ", "AUROC", *kinds, "Brier", "acceptable", "η_TP", "η_FP")
    table.caption = f"AUROC on all held-out prompts and by prefix ({', '.join(kinds)}); η at τ = 0.5"
    for r in reports:
        tp, fp = r.at(0.5)
        aurocs = [f"{value:.3f}" for value in (r.auroc, *r.auroc_by_kind.values())]
        table.add_row(f"{r.lam:g}", *aurocs, f"{r.brier:.4f}", f"{r.acceptable:.1%}", f"{tp:.3f}", f"{fp:.3f}")
    console().print(table)
    kept = fitted.config.lam
    same = len(reports) > 1 and not fitted.config.decoding.get("do_sample")
    note = "; greedy laws are 0 or 1, so every λ ≥ 1 gives the same labels" if same else ""
    show(f"{out}: the head for λ = {kept:g}, with its card and plots{note}")


def plan(
    head: Annotated[str | None, typer.Option(help="a folder or Hub repository; default the demo head")] = None,
    model: Model = None,
    assistant: Assistant = None,
    prompts: Annotated[str, typer.Option(help="for the times; JSON lines, or `demo`")] = DEMO,
    limit: Annotated[int, typer.Option(help="prompts to time")] = 8,
    new_tokens: Annotated[int, typer.Option(help="of each text")] = 96,
    max_draft: Annotated[int, typer.Option(help="the most tokens of one round")] = 20,
    max_distance: Annotated[float, typer.Option(help="mean d_TV per token that the advice stays within")] = 0.02,
    do_sample: Annotated[bool, typer.Option("--do-sample", help="time sampling; default greedy")] = False,
    repeats: Annotated[int, typer.Option(help="times are medians of these")] = 3,
    dtype: DType = "float32",
    device: Device = "auto",
    chat: Chat = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Does SPRINTER pay here, and at which threshold? Measures this machine and predicts."""
    import dataclasses

    from .. import demo
    from ..artifacts.heads import Head
    from ..tasks.prompts import read_prompts
    from ..validation import LONGEST_DRAFT, MOST_NEW_TOKENS, check_int, check_number
    from . import check_pair, load, needs

    needs("train", "datasets", "scipy", "sklearn")
    check_pair(model, assistant)
    check_int("--limit", limit, 1)
    check_int("--repeats", repeats, 1, 10**6)
    check_int("--new-tokens", new_tokens, 2, MOST_NEW_TOKENS)
    check_int("--max-draft", max_draft, 1, LONGEST_DRAFT)
    check_number("--max-distance", max_distance, 0.0, 1.0)
    from ..methods.sprinter.plan import plan as run
    from ..methods.sprinter.plan import read_held_out

    if head is None and model is not None:
        raise ValueError("--model needs --head: the demo head is for the demo models alone")
    source = head or str(demo.FOLDER / "sprinter_head")
    loaded = Head.from_pretrained(source)
    data = read_held_out(source)
    if prompts == DEMO and model is not None:
        raise ValueError("--prompts demo is for the demo models: pass a file of prompts with --model")
    texts = [prompt for prompt, _ in _demo_texts(limit, 0)] if prompts == DEMO else read_prompts(prompts, limit)
    target, draft, tokenizer = load(model, assistant, dtype, device)
    loaded.check(target=target, draft=draft, tokenizer=tokenizer)
    texts = chats(tokenizer, texts) if chat else texts
    found = run(
        target, draft, tokenizer, texts, loaded, data, new_tokens=new_tokens, max_draft=max_draft, do_sample=do_sample,
        max_distance=max_distance, repeats=repeats,
    )  # fmt: skip
    show_json(dataclasses.asdict(found)) if as_json else show(_plan_text(found))


def push(
    path: Annotated[Path, typer.Argument(help="folder of a head, policy, models, dataset or custom_generate")],
    repo_id: Annotated[str, typer.Argument(help="org/name")],
    private: Annotated[bool, typer.Option("--private", help="make a new repository private")] = False,
    revision: Revision = None,
    message: Annotated[str | None, typer.Option(help="of the commit")] = None,
    token: Token = None,
) -> None:
    """Upload a folder to the Hub, after a check that it loads and holds no pickle."""
    from ..policy.sharing import push as run

    show(run(path, repo_id, private=private or None, token=token, message=message, revision=revision))


def pull(
    repo_id: Annotated[str, typer.Argument(help="org/name, org/name@revision, datasets/org/name")],
    out: Annotated[Path | None, typer.Option(help="copy it into this folder, which must not exist")] = None,
    revision: Revision = None,
    token: Token = None,
    local_files_only: Annotated[bool, typer.Option("--local-files-only", help="only what is in the cache")] = False,
    force_download: Annotated[
        bool, typer.Option("--force-download", help="also what is in the cache already")
    ] = False,
) -> None:
    """Download a head, a policy, models or a dataset from the Hub, check them, and print the folder."""
    from ..policy.sharing import pull as run

    if local_files_only and force_download:
        raise ValueError("--local-files-only and --force-download contradict each other: pass one of them")
    show(
        run(
            repo_id,
            out,
            revision=revision,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
        )
    )


def check_greedy(greedy: bool, temperature: float, top_k: int, top_p: float) -> None:
    """Refuse settings of sampling beside `--greedy`, which has no use for them."""
    if greedy and (temperature, top_k, top_p) != (1.0, 0, 1.0):
        raise ValueError("--temperature, --top-k and --top-p are of sampling: leave them or --greedy out")


# -- parts ------------------------------------------------------------------------------------------------------------


def chats(tokenizer: Any, prompts: list[str]) -> list[str]:
    """Prompts in the tokenizer's chat template, without the begin token that the tokenizer will add itself."""
    try:
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
            for p in prompts
        ]
    except Exception as error:  # the template is a program of the model's, and may raise whatever it likes
        raise ValueError(
            f"--chat: the tokenizer's chat template failed ({type(error).__name__}: {one_line(error)}): leave --chat out, or use "
            "another tokenizer"
        ) from None
    begin = tokenizer.bos_token
    if begin and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        texts = [text.removeprefix(begin) for text in texts]
    return texts


def _demo_texts(count: int, seed: int) -> list[tuple[str, str]]:
    """(prompt, solution) of demo problems that neither the models were trained on nor a test uses."""
    from .. import demo

    return [(p.prompt, p.solution) for p in demo.problems(count, seed, "calibration")]


def _plan_text(found: Any) -> str:
    from rich.table import Table

    table = Table(
        "τ",
        "η_TP",
        "η_FP",
        "tokens / call",
        "Thm 3.3",
        "never checked",
        "d_TV / token",
        "tokens/s",
        "× strict",
        "× target",
    )
    for line in found.lines:
        table.add_row(
            f"{line.threshold:g}", f"{line.eta_tp:.3f}", f"{line.eta_fp:.3f}", f"{line.tokens_per_call:.2f}",
            f"{line.by_theorem:.2f}", f"{line.unseen:.1%}", f"{line.distance:.4f}", f"{line.tokens_per_second:.0f}",
            f"{line.of_strict:.2f}", f"{line.of_target:.2f}",
        )  # fmt: skip
    screen = console(width=120, color_system=None)  # its text is shown once more
    with screen.capture() as capture:
        screen.print(table)
    mean = sum(length * count for length, count in found.runs.items()) / sum(found.runs.values())
    return (
        f"measured here: draft step t_d {found.t_draft * 1e3:.2f} ms, target call t_t {found.t_target * 1e3:.2f} ms, "
        f"head t_v {found.t_verifier * 1e3:.3f} ms; a call {found.per_text * 1e3:.1f} ms + "
        f"{found.per_round * 1e3:.2f} ms a round + {found.per_token * 1e3:.2f} ms a drafted token\n"
        f"target alone {found.target_per_second:.0f} tokens/s; strict γ = 5 {found.strict_per_second:.0f} tokens/s, "
        f"{found.strict_per_call:.2f} tokens a call\n"
        f"held-out texts: {found.acceptable:.1%} of the drafted tokens acceptable, {mean:.1f} in a row\n\n"
        f"predicted:\n{capture.get()}\n{found.advice}"
    )
