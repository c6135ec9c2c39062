"""Of each token of a finished text: p, q and what the policy's heads say of it.

One forward of each model over the whole text, behind the generation: decoding keeps nothing for it and costs nothing more. Decoding reads the same
positions a few at a time, which in float32 gives the same numbers up to the last digits (1e-5); in half precision, and where the tokens of a forward share
a scale (dynamic quantisation), they can differ more.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from ..artifacts.features import FeatureTap
from ..artifacts.heads import Head
from ..drafters.base import Drafter, fit_vocabulary
from ..models.architecture import Architecture
from ..models.inspect import vocabulary_of
from ..policy.policy import LossyPolicy
from .arms import COMPILED, failed
from .measuring import Answer, Writer


FIRST = 4  # prompts whose texts are shown
DRAFTED = (0, 1)  # of `stats.row.SOURCES`: what heads are asked about
AT_ONCE = 64  # positions whose logits are turned into float32 together
DIGITS = 6  # that are kept of a probability


@dataclass(frozen=True)
class Scores:
    """Of each new token of one text, in order.

    Args:
        p: (n,) the target's probability of it: softmax of the raw logits, before temperature and filters.
        q: (n,) the draft's; empty where no model drafted.
        heads: of each head, under what its probability is of, (n,); None of tokens that were not drafted.
    """

    p: list[float]
    q: list[float] = field(default_factory=list)
    heads: dict[str, list[float | None]] = field(default_factory=dict)

    def rounded(self) -> "Scores":
        """To `DIGITS` significant digits, as files keep them."""
        heads = {name: [None if its is None else _short(its) for its in said] for name, said in self.heads.items()}
        return Scores([_short(its) for its in self.p], [_short(its) for its in self.q], heads)


@torch.no_grad()
def score(
    target: Any, draft: Any, heads: Mapping[str, Head], prompt: Sequence[int], new: Sequence[int], sources: Sequence[int]
) -> Scores:  # fmt: skip
    """p, q and the heads' probabilities of the tokens `new` behind `prompt`, both without padding.

    Args:
        draft: the model that drafted; None where there was none. A drafter on the target's states is no model of texts, and says nothing here.
        heads: as `LossyPolicy.heads` gives them. One that reads a model that is not here, such as a companion, says nothing.
        sources: (n,) of each new token an index into `stats.row.SOURCES`; empty: nothing was drafted.

    Raises: `ValueError`, one line, where one of the two is empty.
    """
    if not prompt or not new:
        raise ValueError(f"scores are of new tokens behind a prompt: got {len(prompt)} and {len(new)} tokens")
    models: dict[str, Any] = ({} if draft is None or isinstance(draft, Drafter) else {"draft": draft}) | {
        "target": target
    }
    asked = {name: head for name, head in _by_meaning(heads).items() if _can_read(head, models)} if sources else {}
    ids, vocabulary = torch.tensor([*prompt, *new]), vocabulary_of(target)
    found: dict[str, list[float]] = {}
    # What each head reads, (T, H): of one model, or of the draft and then of the target.
    states: dict[str, list[torch.Tensor]] = {name: [] for name in asked}
    for role, model in models.items():
        reading = {name: head.config.features for name, head in asked.items() if head.config.features.reads(role)}
        with ExitStack() as taps:
            tapped = {name: taps.enter_context(FeatureTap(model, spec)) for name, spec in reading.items()}
            found[role] = _probabilities(model, ids, len(new), vocabulary)
            for name, tap in tapped.items():
                states[name].append(tap.latest[0])
    said = {name: _say(head, states[name], len(prompt), len(new)) for name, head in asked.items()}
    drafted = {
        name: [its if source in DRAFTED else None for its, source in zip(values, sources, strict=True)]
        for name, values in said.items()
    }
    return Scores(found["target"], found.get("draft", []), drafted)


def shown(answers: Sequence[Answer]) -> list[Answer]:
    """Those whose texts a report shows: of policies, the first prompts, at the smallest batch size."""
    found = [answer for answer in answers if answer.sources and answer.prompt < FIRST]
    smallest = min((answer.batch_size for answer in found), default=None)
    return [answer for answer in found if answer.batch_size == smallest]


def score_answers(
    writer: Writer, draft: Any, policies: Mapping[str, LossyPolicy], answers: Sequence[Answer], prompts: Sequence[str]
) -> None:
    """Write scores into the answers that a report shows. Where a model fails it warns: what was measured for hours is not lost for it.

    policies: by the names of their arms. prompts: all, by their places.
    """
    try:
        for answer in shown(answers):
            heads = policies[answer.arm.removesuffix(COMPILED)].heads()
            prompt = writer.tokenizer(prompts[answer.prompt])["input_ids"]
            its = score(writer.target, draft, heads, prompt, answer.token_ids, answer.sources).rounded()
            answer.p, answer.q, answer.heads = its.p, its.q, its.heads
    except Exception as error:  # what a model raises is of any kind
        warnings.warn(f"p and q of the texts were not worked out: {failed(error)}", stacklevel=2)


def scores_of(answer: Answer) -> Scores | None:
    """What `score_answers` wrote; None where it did not."""
    return Scores(answer.p, answer.q, answer.heads) if answer.p else None


def _probabilities(model: Any, ids: torch.Tensor, new: int, vocabulary: int) -> list[float]:
    """The model's probability of each of the last `new` tokens of `ids` (T,), over the target's `vocabulary`."""
    facts = Architecture.of(model)
    kept: dict[str, Any] = {"logits_to_keep": new + 1} if facts.keeps_logits else {}
    # As the engine shows a draft of a smaller vocabulary what it cannot know.
    fed = ids.to(facts.device).clamp(max=facts.known - 1)[None]
    logits = fit_vocabulary(model(input_ids=fed, use_cache=False, **kept).logits[0, -new - 1 : -1], vocabulary)
    tokens, found = ids[-new:].to(logits.device), []
    for some, its in zip(logits.split(AT_ONCE), tokens.split(AT_ONCE), strict=True):
        exact = some.float()
        found += (exact.gather(1, its[:, None])[:, 0] - exact.logsumexp(dim=1)).exp().tolist()
    return found


def _say(head: Head, states: list[torch.Tensor], prompt: int, new: int) -> list[float]:
    """What a head says of each new token, of each model's states (T, H)."""
    first = prompt - (head.config.features.position == "predicting")
    device = next(head.parameters()).device
    return head(torch.cat([its[first : first + new].to(device) for its in states], dim=-1)).tolist()


def _by_meaning(heads: Mapping[str, Head]) -> dict[str, Head]:
    """Each head under what its probability is of, and its place in the policy too where another one has that."""
    found: dict[str, Head] = {}
    for place, head in heads.items():
        name = f"P({head.config.polarity})"
        found[f"{name} of {place}" if name in found else name] = head
    return found


def _can_read(head: Head, models: Mapping[str, Any]) -> bool:
    spec = head.config.features
    return spec.model != "companion" and all(role in models for role in ("draft", "target") if spec.reads(role))


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
