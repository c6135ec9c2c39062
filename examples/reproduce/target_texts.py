"""Read texts of the target with the draft beside it: where the draft agrees, its entropy there, and the lengths that stops would draft.

The lengths are those along the target's text: what a draft writes behind its first rejected token is not known.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_lossy_assist.demo import Demo
from hf_lossy_assist.stops.confidence import SVIP
from hf_lossy_assist.stops.constant import Heuristic
from hf_lossy_assist.tasks.base import Problem


ROWS = 25  # that the target continues at once


@dataclass(frozen=True)
class TargetText:
    """One greedy text of L tokens: their ids, the draft's entropy and KL(q‖p) in nats (L,) float64, and where both agree (L,) bool."""

    tokens: list[int]
    entropy: torch.Tensor
    kl: torch.Tensor
    match: torch.Tensor

    def lengths(self, stop: str) -> list[tuple[int, int]]:
        """Return the proposed and the oracle's draft length of each round: "svip", "heuristic", or a number for a constant one."""
        svip, heuristic = SVIP(), Heuristic().start(1)
        doubted = (svip.c * self.entropy).sqrt() > svip.h
        at, count, found = 0, len(self.match), []
        while at < count:
            oracle = _steps_before(~self.match[at:])
            if stop == "svip":
                proposed = min(_steps_before(doubted[at:]) + 1, svip.max_draft)
            else:
                proposed = heuristic.begin_round([0])[0] if stop == "heuristic" else int(stop)
            proposed = min(proposed, count - at)
            found.append((proposed, oracle))
            accepted = min(proposed, oracle)
            heuristic.observe([0], [proposed], [accepted])
            at += accepted + 1
        return found


def _steps_before(event: torch.Tensor) -> int:
    return int(event.nonzero()[0]) if bool(event.any()) else len(event)


def write_texts(models: Demo, problems: list[Problem], max_new_tokens: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Have the target continue each prompt greedily; yield each text (n,) up to its end token, and the length of its prompt."""
    for start in range(0, len(problems), ROWS):
        inputs = models.tokenizer(
            [problem.prompt for problem in problems[start : start + ROWS]], padding=True, return_tensors="pt"
        )
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        written = type(models.target).generate(models.target, **inputs, **settings)
        width = inputs["input_ids"].shape[1]
        for mask, row in zip(inputs["attention_mask"].bool(), written, strict=True):
            new = row[width:]
            end = (new == models.target.generation_config.eos_token_id).nonzero()
            yield torch.cat([row[:width][mask], new[: int(end[0]) + 1 if len(end) else None]]), int(mask.sum())


@torch.no_grad()
def read_texts(models: Demo, problems: list[Problem], max_new_tokens: int) -> list[TargetText]:
    """Have the target continue each prompt greedily, and read every text with both models."""
    found = []
    for text, begin in write_texts(models, problems, max_new_tokens):
        p, q = (model(text[None]).logits[0, begin - 1 : -1] for model in (models.target, models.draft))
        log_p, log_q = p.double().log_softmax(dim=-1), q.double().log_softmax(dim=-1)
        weight, ratio = log_q.exp(), log_p - log_q
        entropy = -(weight * log_q).sum(dim=-1)
        kl = (weight * (ratio.expm1() - ratio)).sum(dim=-1)  # adds Σ p − Σ q = 0, so that all terms are ≥ 0
        found.append(TargetText(text[begin:].tolist(), entropy, kl, p.argmax(dim=-1) == q.argmax(dim=-1)))
    return found
