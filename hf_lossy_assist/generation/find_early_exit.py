"""Find the best early exit of a target as its draft: measure each exit's agreement with the target, and its cost.

An early exit needs no training and no memory (models/early_exit.py); its gain depends on the target.
"""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..models.compat import CACHE
from ..models.early_exit import early_exit
from ..models.introspection import base_of, blocks_of, device_of, end_tokens, learned_positions
from ..models.row_model import RowModel
from ..stats.clock import wait_for
from ..stats.intervals import Estimate, rate
from ..terminal import Bar
from ..validation import MOST_NEW_TOKENS, check_int, shown


GAMMAS = range(1, 17)  # draft lengths to try
WIDTHS = (1, 2, 4, 8, 17)  # tokens in the target's timed forwards; other times are interpolated


@dataclass(frozen=True)
class Exit:
    """One number of layers. `acceptance`: share of the target's tokens that it predicts, over texts; `step`, `target_step`: seconds per token."""

    layers: int
    acceptance: Estimate
    step: float
    target_step: float
    gamma: int  # the draft length with the largest gain
    gain: float  # predicted speed relative to the target alone; below 1 drafting is slower


@dataclass(frozen=True)
class Exits:
    """Measured exits, by number of layers."""

    found: tuple[Exit, ...]

    @property
    def best(self) -> Exit | None:
        """The exit with the largest gain; None if the target alone is fastest."""
        best = max(self.found, key=lambda found_exit: found_exit.gain)
        return best if best.gain > 1 else None

    def __str__(self) -> str:
        lines = ["layers  accepted  step, ms  × of target's   γ  gain"]
        for found_exit in self.found:
            lines.append(
                f"{found_exit.layers:6}  {found_exit.acceptance.value:8.1%}  {found_exit.step * 1e3:8.2f}  {found_exit.step / found_exit.target_step:13.2f}  {found_exit.gamma:2}  {found_exit.gain:4.2f}"
            )
        best = self.best
        advice = "no exit pays: take another draft, or none"
        if best is not None:
            advice = f"assistant_model=early_exit(target, {best.layers}), num_assistant_tokens={best.gamma}"
        return "\n".join([*lines, advice])


def find_exit(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    new_tokens: int = 64,
    repeats: int = 5,
) -> Exits:
    """Try the target's first layers as its draft, and predict the gain of each number of layers at batch 1, greedily.

    The target continues each prompt greedily, and at each position an exit predicts the next token. Draft steps and the target's forwards are timed
    after as many cached tokens as the texts have on average. The prediction is that of Leviathan et al. (Equation 1,
    huggingface.co/papers/2211.17192), with the same acceptance rate at each position of a draft.

    Args:
        prompts: texts as given to the model. new_tokens: how many the target writes for each.
        layers: numbers of layers to try; None: up to eight, evenly spaced.
        repeats: of each timing; the median counts.

    Raises: `ValueError` or `TypeError`, one line, for a target without separable layers, and for invalid prompts.
    """
    base = base_of(target)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"find_exit: expected a loaded Transformers model, got {type(target).__name__}")
    check_int("new_tokens", new_tokens, 2, MOST_NEW_TOKENS)
    check_int("repeats", repeats, 1, 10**6)
    blocks = len(blocks_of(base) or ())
    if layers is None:
        some = min(8, max(blocks - 1, 1))
        layers = sorted({max(1, round(blocks * n / (some + 1))) for n in range(1, some + 1)})
    elif isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"find_exit.layers: expected a list of numbers of layers, got {shown(layers)}")
    exits = {count: early_exit(target, count) for count in layers}
    if not exits:
        raise ValueError("find_exit.layers: expected at least one number of layers")
    given = _read_prompts(base, tokenizer, prompts)
    texts = [(continue_greedily(base, ids, new_tokens), len(ids)) for ids in given]
    context = int(sum(len(text) for text, _ in texts) / len(texts))
    blocks_took = time_forwards(base, context, WIDTHS, repeats)
    found = []
    with Bar(len(exits), "trying exits", "exits") as bar:
        for done, (count, draft) in enumerate(exits.items()):
            found.append(predict(draft, count, texts, blocks_took, repeats))
            bar.to(done + 1)
    return Exits(tuple(found))


def predict(
    draft: PreTrainedModel,
    layers: int,
    texts: Sequence[tuple[torch.Tensor, int]],
    blocks_took: Sequence[float],
    repeats: int,
) -> Exit:
    """Predict the gain of a draft model of `layers` layers; see `find_exit`.

    Args: `texts`: the target's, ids (T,) each, and how many of them are the prompt's. `blocks_took`: seconds of its forwards over `WIDTHS` tokens.
    """
    context = int(sum(len(text) for text, _ in texts) / len(texts))
    right = [_match_tokens(draft, text, prompt) for text, prompt in texts]
    acceptance = rate([float(matches.sum()) for matches in right], [float(len(matches)) for matches in right])
    step = time_forwards(draft, context, (1,), repeats)[0]
    gamma, gain = find_best_draft_length(blocks_took, step, acceptance.value)
    return Exit(layers, acceptance, step, blocks_took[0], gamma, gain)


@torch.inference_mode()
def time_forwards(model: PreTrainedModel, context: int, widths: Sequence[int], repeats: int) -> list[float]:
    """Return median seconds of one row's forwards over each number of tokens in `widths`, after `context` cached ones; the first is a warm-up."""
    cached = RowModel(model, 1, context + max(widths))
    ids = torch.randint(
        model.config.get_text_config(decoder=True).vocab_size, (1, context + max(widths)), device=model.device
    )
    cached.feed(ids[:, :context], [context], keep=0)
    medians = []
    for width in widths:
        took = []
        for _ in range(repeats + 1):
            cached.rollback([context])
            wait_for(model.device)
            began = time.perf_counter()
            cached.feed(ids[:, -width:], [width])
            wait_for(model.device)
            took.append(time.perf_counter() - began)
        medians.append(statistics.median(took[1:]))
    return medians


def find_best_draft_length(blocks_took: Sequence[float], step: float, acceptance: float) -> tuple[int, float]:
    """Return the draft length γ in `GAMMAS` with the largest gain, and that gain: speed relative to the target alone.

    blocks_took: seconds of the target's forwards over `WIDTHS` tokens; step: of a draft step; acceptance: probability for each drafted token.
    """

    def gain(gamma: int) -> float:
        tokens = sum(acceptance**n for n in range(gamma + 1))
        seconds = gamma * step + float(np.interp(gamma + 1, WIDTHS, blocks_took))
        return tokens * blocks_took[0] / seconds

    best = max(GAMMAS, key=gain)
    return best, gain(best)


def _read_prompts(base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: object) -> list[torch.Tensor]:
    """Return the ids of each prompt (T,), on the target's device; refuse invalid prompts."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"find_exit.prompts: expected a list of texts, got {shown(prompts)}")
    if not callable(tokenizer):
        raise TypeError(f"find_exit.tokenizer: expected the target's tokenizer, got {shown(tokenizer)}")
    found, room = [], learned_positions(base)
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise TypeError(f"find_exit.prompts[{i}]: expected a text, got {shown(prompt)}")
        ids = torch.tensor(tokenizer(prompt)["input_ids"], dtype=torch.int64, device=device_of(base))
        if not len(ids):
            raise ValueError(f"find_exit.prompts[{i}] has no token: leave it out")
        if room is not None and len(ids) >= room:
            raise ValueError(
                f"find_exit.prompts[{i}] has {len(ids)} tokens, and {type(base).__name__} has positions for {room}: shorten it"
            )
        found.append(ids)
    if not found:
        raise ValueError("find_exit: there is no prompt to try exits on")
    return found


@torch.no_grad()
def continue_greedily(base: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Return a prompt's ids with its greedy continuation, up to an end token or the last position, (T,).

    Without `generate`: the target's generation config may set penalties, beams or another kind of output, which exits do not use.
    """
    ends = end_tokens(base.generation_config)
    cache = DynamicCache(config=base.config.get_text_config(decoder=True))
    text, held = prompt, 0
    for _ in range(min(new_tokens, (learned_positions(base) or MOST_NEW_TOKENS) - len(prompt))):
        places = torch.arange(held, len(text), device=text.device)
        out = base(input_ids=text[None, held:], position_ids=places[None], **{CACHE: cache}, use_cache=True)
        text, held = torch.cat([text, out.logits[0, -1:].argmax(dim=-1).to(text.device)]), len(text)
        if int(text[-1]) in ends:
            break
    return text


@torch.no_grad()
def _match_tokens(draft: PreTrainedModel, text: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return whether the exit predicts each of the target's tokens after the prompt, bool."""
    predicted = draft(input_ids=text[None], use_cache=False).logits[0, prompt - 1 : -1].argmax(dim=-1)
    return predicted.to(text.device) == text[prompt:]
