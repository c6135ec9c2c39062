"""Measure speculation along long texts: each arm's speed relative to the target alone within windows of the text's length.

    python benchmarks/long_texts.py --model SmolLM2-135M --prompts questions.jsonl --problems 4 --exit 12     # drafts by its first 12 layers
    python benchmarks/long_texts.py --model M --assistant D --prompts questions.jsonl --problems 4 --tokens 1024

Source of the claim: SVIP's paper (huggingface.co/papers/2411.18462), whose gain grows with the text. Arms: the target alone, `strict γ`, `heuristic`
(Transformers' schedule) and `svip`; sampling at --temperature, or greedily at 0. All arms take turns at each prompt, every text has `--tokens` new
tokens, and one prompt is a repeat. Ratios are medians over the prompts, with the lowest and highest. "accepted": of drafted tokens, over the whole text.
"""

import statistics
import time
from typing import Any

import torch
from pairs import machine, options, record
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

import hf_lossy_assist as hla
from hf_lossy_assist.tasks.prompts import read_prompts


class Clock(BaseStreamer):
    """A streamer that notes when how many new tokens were there."""

    def __init__(self) -> None:
        self.moments: list[tuple[int, float]] = []
        self.prompt = True

    def put(self, value: torch.Tensor) -> None:
        count = 0 if self.prompt else self.moments[-1][0] + value.numel()
        self.moments.append((count, time.perf_counter()))
        self.prompt = False

    def end(self) -> None:
        pass

    def seconds(self, tokens: int) -> float:
        """Return the moment at which there were as many new tokens, between two notes in proportion."""
        before = self.moments[0]
        for count, moment in self.moments:
            if count >= tokens:
                share = (tokens - before[0]) / max(count - before[0], 1)
                return before[1] + share * (moment - before[1])
            before = count, moment
        raise ValueError(f"the text has {before[0]} new tokens, {tokens} were expected")


def main() -> None:
    parser = options(__doc__, problems=4)
    parser.add_argument(
        "--exit", type=int, help="draft by the target's first layers, so many, in place of --assistant"
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    if args.model is None or args.prompts is None or (args.assistant is None) == (args.exit is None):
        parser.error("needs --model, --prompts and one of --assistant and --exit")
    target = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    draft = (
        hla.early_exit(target, args.exit)
        if args.assistant is None
        else AutoModelForCausalLM.from_pretrained(args.assistant, dtype=target.dtype).to(args.device).eval()
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    hla.enable(target)
    windows = [0, *(size for size in (256, 512, 1024, 2048, 4096, 8192) if size <= args.tokens)]
    arms: dict[str, dict[str, Any]] = {
        "target": {},
        f"strict {args.gamma}": {"lossy_policy": "strict", "num_assistant_tokens": args.gamma},
        "heuristic": {"lossy_policy": {"stop": "heuristic"}},
        "svip": {"lossy_policy": "svip"},
    }
    speeds: dict[str, list[list[float]]] = {name: [] for name in arms}
    accepted: dict[str, list[float]] = {name: [] for name in arms}

    def run(name: str, text: str, tokens: int, seed: int) -> tuple[Clock, Any]:
        torch.manual_seed(seed)
        how = arms[name] | ({} if name == "target" else {"assistant_model": draft})
        sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
        clock, inputs = Clock(), tokenizer(text, return_tensors="pt").to(args.device)
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens, "top_k": 0}
        out = target.generate(**inputs, **length, **sampling, **how, streamer=clock, return_dict_in_generate=True)
        return clock, out

    prompts = read_prompts(args.prompts, args.problems)
    for name in arms:  # warm-up
        run(name, prompts[0], 32, args.seed)
    for number, text in enumerate(prompts):
        turn = number % len(arms)
        for name in [*arms][turn:] + [*arms][:turn]:
            clock, out = run(name, text, args.tokens, args.seed + number)
            marks = [clock.seconds(size) for size in windows]
            sizes = zip(windows, windows[1:], marks, marks[1:], strict=False)
            speeds[name].append([(end - start) / (after - before) for start, end, before, after in sizes])
            if name != "target":
                accepted[name].append(out.speculation.draft_acceptance_rate)
            print(f"prompt {number}, {name}: {[round(speed, 1) for speed in speeds[name][-1]]} tokens/s", flush=True)

    titles = [f"{start}–{end}" for start, end in zip(windows, windows[1:], strict=False)]
    table = Table("arm", *titles, "accepted", title=f"{machine(args.device)}: × the target alone")
    rows = []
    for name in arms:
        ratios = [
            [ours[w] / alone[w] for ours, alone in zip(speeds[name], speeds["target"], strict=True)]
            for w in range(len(titles))
        ]
        cells = [f"{statistics.median(each):.2f} ({min(each):.2f}–{max(each):.2f})" for each in ratios]
        rate = statistics.fmean(accepted[name]) if accepted[name] else None
        table.add_row(name, *cells, "" if rate is None else f"{rate:.1%}")
        rows.append({"arm": name, "windows": windows, "speeds": speeds[name], "accepted": rate})
    Console(width=140).print(table)
    record(args, machine(args.device), arms=rows)


if __name__ == "__main__":
    main()
