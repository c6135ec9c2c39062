"""`hf-lossy collect`: data for a head on the draft, or for an EAGLE-3 drafter."""

from typing import Annotated, Any

from .. import methods
from ..tasks.prompts import PromptText
from ..terminal import show
from ..validation import MOST, MOST_NEW_TOKENS, nearest, require
from . import _options
from ._models import load_models, read_prompt_texts, with_template
from ._runs import check_out, find_workers, hint_resume


MIX, LAMBDA = 0.15, 1.2
METHODS = ("sprinter", "specdec", "eagle3")  # methods that are trained on this data
NEW_TOKENS = {"eagle3": 256}  # of an answer; for a head 64 per row


@_options.command
def collect_command(
    *,
    out: _options.Out,
    models: _options.ModelOptions,
    prompts: _options.Prompts = _options.DEMO,
    method: Annotated[
        str,
        "--for",
        "a head: sprinter (four rows a prompt) or specdec (one); or a drafter on the target's states: eagle3",
    ] = METHODS[0],
    mix: Annotated[
        float | None, f"share of draft tokens that the target's replace, for specdec (default: {MIX})"
    ] = None,
    lam: Annotated[
        float | None, "--lambda", f"label a token acceptable where q(x) ≤ λ·p(x) (default: {LAMBDA})"
    ] = None,
    limit: Annotated[int | None, (1, MOST), "most prompts to use (default: all; 64 of the demo)"] = None,
    max_new_tokens: Annotated[
        int | None, (1, MOST_NEW_TOKENS), "most new tokens of each row (default: 64; 256 for eagle3)"
    ] = None,
    batch_size: _options.BatchSize = 8,
    seed: _options.Seed = 0,
    running: _options.RunOptions,
    ray: _options.Ray = None,
    do_sample: Annotated[
        bool | None,
        "--do-sample/--greedy",
        "sample, or take the likeliest token each time (default: sample; greedy for eagle3)",
    ] = None,
    temperature: _options.Temperature = 1.0,
    top_k: _options.TopK = 0,
    top_p: _options.TopP = 1.0,
    loading: _options.LoadOptions,
    chat: _options.Chat = False,
) -> None:
    """Collect training data for a head on the draft: the draft's state at each token, and the token's probability in both models.

    Texts are sampled, as in the papers; for greedy decoding pass --greedy. With --for eagle3 the target alone answers the prompts.

    Examples:

      hf-lossy collect --prompts demo --limit 64 --out data

      hf-lossy collect --model M --assistant D --prompts questions.jsonl --chat --limit 256 --out data

      hf-lossy collect --for specdec --model M --assistant D --prompts questions.jsonl --out data

      hf-lossy collect --for eagle3 --model M --prompts questions.jsonl --chat --out texts
    """
    require("this command", "accelerate", "datasets", "jinja2")
    check_out(out, running.resume)
    if method not in METHODS:
        raise ValueError(f"--for: {nearest('method', method, METHODS)}")
    for_head = method != "eagle3"
    if for_head:
        models.check_learnable(drafters=False)
    elif models.assistant is not None or models.drafter is not None:
        raise ValueError("--for eagle3: the target alone answers: leave --assistant and --drafter out")
    max_new_tokens = NEW_TOKENS.get(method, 64) if max_new_tokens is None else max_new_tokens
    do_sample = for_head if do_sample is None else do_sample
    for option, value, takers in (("--lambda", lam, METHODS[:2]), ("--mix", mix, METHODS[1:2])):
        if value is not None and method not in takers:
            raise ValueError(f"{option} is for --for {' and '.join(takers)}, not {method}: leave it out")
    decoding = {"do_sample": do_sample, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    _options.SamplingOptions(do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p).check()
    _options.check_prompts(prompts, models.model)
    texts, source = read_prompt_texts(prompts, limit, _options.DEMO_PROMPTS, seed)
    settings: Any
    common: dict[str, Any] = decoding | {"new_tokens": max_new_tokens, "batch_size": batch_size, "seed": seed}
    if not for_head:
        settings = methods.TextSettings(**common)
    else:
        if method == "specdec":
            common["mix"] = MIX if mix is None else mix
        settings = methods.CollectSettings(lam=LAMBDA if lam is None else lam, **common)
    processes = find_workers(ray, models, loading, load_models)
    target, draft, tokenizer = load_models(models, loading)
    if chat:
        written = with_template(tokenizer, [t.prompt for t in texts])
        texts = [PromptText(text, t.continuation) for text, t in zip(written, texts, strict=True)]
    run: dict[str, Any] = {"resume": running.resume, "source": source, "processes": processes}
    with hint_resume(out):
        if for_head:
            from datasets import load_from_disk

            methods.collect(target, draft, tokenizer, texts, out, settings, **run)
            what = f"{len(load_from_disk(str(out)))} tokens of {len(texts)} prompts, with a data card"
        else:
            methods.collect_texts(target, tokenizer, [text.prompt for text in texts], out, settings, **run)
            what = f"answers to {len(texts)} prompts"
    show(f"{out}: {what}")
