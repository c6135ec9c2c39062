"""A Space: one prompt continued by the target alone and with a policy, side by side, each token in the colour of its source.

TARGET and DRAFT in the environment name another pair than the embedded one.
"""

import os
import time
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.loading import load_tokenizer
from hf_lossy_assist.stats.speculation import SOURCES
from hf_lossy_assist.text.detokenizer import Detokenizer, continuation, special_tokens


COLOURS = dict(zip(SOURCES, ("#4ade80", "#f472b6", "#fb923c", "#60a5fa"), strict=True))
MOST_PROMPT, MOST_NEW = 512, 256  # tokens
Runs = list[tuple[str, str | None]]  # a text in parts: (text, source)


@dataclass(frozen=True)
class Pair:
    """Two models with one tokenizer, and the policies that the page offers by name."""

    target: Any
    draft: Any
    tokenizer: Any
    policies: dict[str, hla.LossyPolicy]
    prompts: list[str]


def load() -> Pair:
    names = os.environ.get("TARGET"), os.environ.get("DRAFT")
    if any(names) and not all(names):
        raise ValueError("TARGET and DRAFT name a pair: set both, or neither for the embedded one")
    policies = {name: hla.as_policy(name) for name in ("strict", "svip", "top_k:k=3+svip")}
    if all(names):
        target, draft = (hla.load(name) for name in names if name)
        pair = Pair(target, draft, load_tokenizer(names[0]), policies, ["The capital of France is"])
    else:
        target, draft, _, tokenizer = hla.demo.load()
        policies |= {name: hla.as_policy(name, head=hla.demo.head(name)) for name in ("autojudge", "sprinter")}
        pair = Pair(target, draft, tokenizer, policies, [p.prompt.strip() for p in hla.demo.problems(3, seed=5)])
    hla.enable(pair.target)
    return pair


def write(pair: Pair, prompt: str, policy: str | None, new_tokens: float) -> tuple[Runs, float, Any]:
    """Continue a prompt, greedily: the text in runs of one source, the seconds, and the call's report; without a policy it has none."""
    inputs = pair.tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    width = inputs["input_ids"].shape[1]
    if not prompt.strip() or width > MOST_PROMPT:
        raise ValueError(f"expected a prompt of 1 to {MOST_PROMPT} tokens, got {width if prompt.strip() else 0}")
    settings = {} if policy is None else {"assistant_model": pair.draft, "lossy_policy": pair.policies[policy]}
    began = time.perf_counter()
    out = pair.target.generate(
        **inputs,
        **settings,
        max_new_tokens=min(int(new_tokens), MOST_NEW),
        do_sample=False,
        return_dict_in_generate=True,
    )
    seconds = time.perf_counter() - began
    report = getattr(out, "speculation", None)
    sources = [] if report is None else report.rows[0].token_sources
    tokens = split_text(pair.tokenizer, inputs["input_ids"][0].tolist(), out.sequences[0, width:].tolist())
    names = [SOURCES[source] for source in sources] or [None] * len(tokens)
    runs = groupby(zip(names, tokens, strict=True), key=lambda pair: pair[0])
    return [("".join(piece for _, piece in run), name) for name, run in runs], seconds, report


def split_text(tokenizer: Any, prompt: list[int], new: list[int]) -> list[str]:
    """Return the text of each new token; a character spelled by several tokens belongs to the last of them."""
    special = special_tokens(tokenizer)
    growing, whole, ends = Detokenizer(tokenizer, prompt, special), continuation(tokenizer, prompt, new, special), [0]
    for count in range(1, len(new)):
        text = growing.decode(new[:count])
        ends.append(max(ends[-1], len(text)) if whole.startswith(text) else ends[-1])
    return [whole[begin:end] for begin, end in pairwise([*ends, len(whole)])][: len(new)]


def compare(pair: Pair, prompt: str, policy: str, new_tokens: float) -> tuple[Runs, Runs, str]:
    """Return both texts, and a table of what they took. Each is written twice, in turns, and the faster time counts."""
    sides: dict[str | None, tuple[Runs, float, Any]] = {}
    for name in (None, policy) * 2:
        done = write(pair, prompt, name, new_tokens)
        sides[name] = done if name not in sides else (*done[:1], min(done[1], sides[name][1]), done[2])
    (plain, alone, _), (runs, seconds, report) = sides[None], sides[policy]
    same = "".join(text for text, _ in plain) == "".join(text for text, _ in runs)
    rows = {
        "guarantee": report.guarantee if report.lossless else "**lossy**",
        "the target's text": "yes" if same else "no",
        "seconds, the target alone": f"{alone:.3f}",
        f"seconds, {policy}": f"{seconds:.3f}",
        "speed": f"**{alone / seconds:.2f}** × the target alone",
        "tokens a round": f"{report.mean_acceptance_length:.2f}",
        "accepted of the drafted tokens": f"{report.draft_acceptance_rate:.0%}",
        "of the new tokens lossy": f"{report.num_lossy_accepts / report.num_new_tokens:.0%}",
    }
    table = "\n".join(
        [f"| policy | {policy} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    )
    return plain, runs, table


def make_page(pair: Pair) -> Any:
    """Return the page, a `gradio.Blocks`."""
    import gradio as gr

    with gr.Blocks(title="hf_lossy_assist") as page:
        gr.Markdown(
            "# Assisted generation, token by token\n"
            "A small draft proposes tokens, and the target checks them: lossless policies write the target's own text; lossy ones say so. "
            "The embedded models know word problems of this kind only; any other word is empty to them."
        )
        prompt = gr.Textbox(pair.prompts[0], label="prompt", lines=3)
        with gr.Row():
            policy = gr.Dropdown(list(pair.policies), value="svip", label="policy")
            length = gr.Slider(16, MOST_NEW, value=96, step=16, label="most new tokens")
        button = gr.Button("Write", variant="primary")
        with gr.Row():
            plain = gr.HighlightedText(label="the target alone", color_map=COLOURS, show_inline_category=False)
            coloured = gr.HighlightedText(label="with the policy", color_map=COLOURS, show_legend=True)
        table = gr.Markdown()
        gr.Examples([[text] for text in pair.prompts], [prompt])
        button.click(lambda *given: compare(pair, *given), [prompt, policy, length], [plain, coloured, table])
    return page


if __name__ == "__main__":
    make_page(load()).launch(show_error=True)
