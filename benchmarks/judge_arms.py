"""The arms of `autojudge_speed.py`: a pair with its judge, the policies over it, and what they wrote."""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from engine import Arm
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lossy_assist as hla
from hf_lossy_assist.cli.options import chats
from hf_lossy_assist.stats.report import SpeculationStats
from hf_lossy_assist.tasks.tasks import AnswerTask, Problem


@dataclass
class Pair:
    target: Any
    draft: Any
    tokenizer: Any
    head: hla.Head
    chat: bool

    def text(self, problem: Problem) -> str:
        if not self.chat:
            return problem.prompt
        return chats(self.tokenizer, [problem.prompt])[0]


def load(args: argparse.Namespace) -> Pair:
    if args.model is None:
        models = hla.demo.load(getattr(torch, args.dtype), args.device)
        head = hla.Head.from_pretrained(args.head) if args.head else hla.demo.head("autojudge")
        pair = Pair(models.target, models.draft, models.tokenizer, head, args.chat)
    else:
        target, draft = (
            AutoModelForCausalLM.from_pretrained(m, dtype=getattr(torch, args.dtype)).to(args.device).eval()
            for m in (args.model, args.assistant)
        )
        tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
        pair = Pair(target, draft, tokenizer, hla.Head.from_pretrained(args.head), args.chat)
    hla.enable(pair.target)
    return pair


def policies(pair: Pair, args: argparse.Namespace) -> dict[str, Callable[[int], hla.LossyPolicy]]:
    """The arms that speculate, by name: window → policy."""
    size = pair.target.config.get_text_config(decoder=True).vocab_size
    found: dict[str, Callable[[int], hla.LossyPolicy]] = {
        "strict": lambda window: hla.LossyPolicy(stop=hla.Constant(window))
    }
    for k in [k or size for k in args.top_k]:
        name = f"top-{k}" if k < size else "top-|V|"
        found[name] = lambda window, k=k: hla.LossyPolicy(rule=hla.TopK(k), stop=hla.Constant(window))  # type: ignore[misc]
    for t in args.threshold or thresholds(pair.head):
        found[f"autojudge τ={t:.7g}"] = lambda window, t=t: hla.AutoJudge(pair.head, t, window)  # type: ignore[misc]
    return found


def thresholds(head: hla.Head, count: int = 6) -> list[float]:
    """The head's own threshold, and others of its table spread over what they accept of the unimportant tokens."""
    own, table = head.config.threshold, head.config.metrics["thresholds"]
    goals = [(i + 1) / (count + 1) for i in range(count)]
    near = [min(table, key=lambda row: abs(row["accepted"] - goal))["threshold"] for goal in goals]
    return sorted({own, *near, *[row["threshold"] for row in table if row["threshold"] in (0.5, 0.9)]})


def arm(name: str, pair: Pair, policy: hla.LossyPolicy | None, batch_size: int) -> Arm:
    if name == "draft alone":
        return Arm(name, batch_size, lambda **kwargs: pair.draft.generate(**kwargs))
    if policy is None:
        plain = type(pair.target).generate
        return Arm(name, batch_size, lambda **kwargs: plain(pair.target, **kwargs))
    return Arm(
        name,
        batch_size,
        lambda **kwargs: pair.target.generate(assistant_model=pair.draft, lossy_policy=policy, **kwargs),
    )


class Texts:
    """What the arms wrote in all parts."""

    def __init__(self, arms: list[Arm]):
        self.texts: dict[str, list[tuple[int, ...]]] = {a.name: [] for a in arms}
        self.calls: dict[str, list[SpeculationStats]] = {a.name: [] for a in arms}

    def add(self, arms: list[Arm]) -> None:
        for a in arms:
            self.texts[a.name] += a.texts
            self.calls[a.name] += a.calls

    def row(self, name: str, pair: Pair, task: AnswerTask, problems: list[Problem]) -> dict[str, Any]:
        """Figures of one arm over all problems."""
        texts = [pair.tokenizer.decode(t, skip_special_tokens=True) for t in self.texts[name]]
        answers = [task.extract(p, t) for p, t in zip(problems, texts, strict=True)]
        row: dict[str, Any] = {
            "arm": name,
            "right": statistics.mean(task.right(p, a) is True for p, a in zip(problems, answers, strict=True)),
            "no_answer": statistics.mean(a is None for a in answers),
            "tokens": sum(map(len, self.texts[name])),
            "tokens_per_target_call": 1.0,
        }
        if name == "draft alone":
            row["tokens_per_target_call"] = None
        if self.calls[name]:
            stats = SpeculationStats.merge(self.calls[name])
            total = stats.total()
            row |= {
                "tokens_per_target_call": total.num_new_tokens / total.num_spec_steps,
                "accepted_per_call": total.num_accepted_draft_tokens / total.num_spec_steps,
                "lossy": total.num_lossy_accepts / total.num_new_tokens,
            }
        return row
