"""Find the best draft made of a target's layers: measure each one's agreement with the target, and its cost.

Such a draft needs no training and no memory (models/early_exit.py); its gain depends on the target.
"""

import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..models.compat import CACHE
from ..models.early_exit import ExitModel, early_exit, first_of_kind, skip_layers
from ..models.introspection import base_of, blocks_of, device_of, end_tokens, learned_positions
from ..models.quirks.rope import ChangingRope
from ..models.row_model import RowModel
from ..stats.clock import wait_for
from ..stats.intervals import Estimate, rate
from ..terminal import Bar
from ..validation import MOST_NEW_TOKENS, check_int, check_number, shown


GAMMAS = range(1, 17)  # draft lengths to try
WIDTHS = (1, 2, 4, 8, 17)  # tokens in the target's timed forwards; other times are interpolated
MOST_SETS = 1000  # of layers, judged in a search


@dataclass(frozen=True)
class Exit:
    """A draft of the target's layers. `acceptance`: share of the target's tokens that it predicts, over texts; `step`, `target_step`: seconds per token."""

    layers: int  # that it has
    acceptance: Estimate
    step: float
    target_step: float
    gamma: int  # the draft length with the largest gain
    gain: float  # predicted speed relative to the target alone; below 1 drafting is slower
    skipped: tuple[int, ...] = ()  # numbers of the layers that it lacks; (): all after its last

    @property
    def code(self) -> str:
        """The arguments of `generate` that draft with it, as Python code."""
        lacks = f"skip_layers(target, {list(self.skipped)})" if self.skipped else f"early_exit(target, {self.layers})"
        return f"assistant_model=hla.{lacks}, num_assistant_tokens={self.gamma}"

    def draft(self, target: PreTrainedModel) -> PreTrainedModel:
        """Return the draft model."""
        return skip_layers(target, self.skipped) if self.skipped else early_exit(target, self.layers)


@dataclass(frozen=True)
class Exits:
    """Measured drafts of the target's layers, by number of layers."""

    found: tuple[Exit, ...]

    @property
    def best(self) -> Exit | None:
        """The one with the largest gain; None if the target alone is fastest."""
        best = max(self.found, key=lambda found_exit: found_exit.gain)
        return best if best.gain > 1 else None

    def __str__(self) -> str:
        lines = ["layers  accepted  step, ms  × of target's   γ  gain  without"]
        for found_exit in self.found:
            lines.append(
                f"{found_exit.layers:6}  {found_exit.acceptance.value:8.1%}  {found_exit.step * 1e3:8.2f}  {found_exit.step / found_exit.target_step:13.2f}  {found_exit.gamma:2}  {found_exit.gain:4.2f}  {', '.join(map(str, found_exit.skipped)) or 'the last'}"
            )
        return "\n".join([*lines, self.best.code if self.best else "no exit pays: take another draft, or none"])


def find_exit(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    new_tokens: int = 64,
    repeats: int = 5,
    seconds: float = 0.0,
    seed: int = 0,
) -> Exits:
    """Try some of the target's layers as its draft, and predict the gain of each set at batch 1, greedily.

    The target continues each prompt greedily, and at each position an exit predicts the next token. Forwards are timed after as many cached tokens as the
    texts have on average; a draft step takes its share, by number of layers, between those of one layer and all. The prediction is that of Leviathan et
    al. (Equation 1, huggingface.co/papers/2211.17192), with the same acceptance rate at each position of a draft.

    Args:
        prompts: texts as given to the model. new_tokens: how many the target writes for each.
        layers: numbers of first layers to try; None: up to eight, evenly spaced.
        repeats: of each timing; the median counts.
        seconds: also search middle layers to leave out (`skip_layers`), for so long; sets tried by a `seed` are the same up to then.

    Raises: `ValueError` or `TypeError`, one line, for a target without separable layers, and for invalid prompts.
    """
    base = base_of(target)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"find_exit: expected a loaded Transformers model, got {type(target).__name__}")
    check_int("find_exit.new_tokens", new_tokens, 2, MOST_NEW_TOKENS)
    check_int("find_exit.repeats", repeats, 1, 10**6)
    check_number("find_exit.seconds", seconds, 0.0, 86_400.0)
    check_int("find_exit.seed", seed, 0)
    if layers is None:
        layers = evenly(len(blocks_of(base) or ()), 8)
    elif isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"find_exit.layers: expected a list of numbers of layers, got {shown(layers)}")
    for count in layers:
        early_exit(base, count)
    if not layers:
        raise ValueError("find_exit.layers: expected at least one number of layers")
    trials = ExitTrials(base, _read_prompts(base, tokenizer, prompts), new_tokens, repeats)
    found = []
    with Bar(len(layers), "trying exits", "exits") as bar:
        for done, count in enumerate(layers):
            found.append(trials.first(count))
            bar.to(done + 1)
    return Exits((*found, *trials.search(time.perf_counter() + seconds, seed)))


def evenly(blocks: int, most: int) -> list[int]:
    """Return up to `most` numbers of layers, evenly spaced, fewer than `blocks`."""
    some = min(most, max(blocks - 1, 1))
    return sorted({max(1, round(blocks * n / (some + 1))) for n in range(1, some + 1)})


class ExitTrials:
    """Judge drafts of a target's layers, and its copies, on what it writes after `prompts`, ids (T,) each; see `find_exit`."""

    def __init__(self, base: PreTrainedModel, prompts: Sequence[torch.Tensor], new_tokens: int, repeats: int):
        self.base, self.repeats, self.blocks = base, repeats, len(blocks_of(base) or ())
        self.texts = [(continue_greedily(base, ids, new_tokens), len(ids)) for ids in prompts]
        self.context = int(sum(len(text) for text, _ in self.texts) / len(self.texts))
        self.took = time_forwards(base, self.context, WIDTHS, repeats)  # seconds of the target's forwards over them

    @cached_property
    def one(self) -> float:
        """Return the seconds of a forward of the first layer over one token."""
        return time_forwards(early_exit(self.base, 1), self.context, (1,), self.repeats)[0]

    def first(self, layers: int) -> Exit:
        """Judge the first `layers` layers."""
        draft = early_exit(self.base, layers)
        return self._judge(layers, self._step(layers), [_match_tokens(draft, *text) for text in self.texts])

    def copy(self, draft: PreTrainedModel) -> Exit:
        """Judge a copy of the target."""
        step = time_forwards(draft, self.context, (1,), self.repeats)[0]
        return self._judge(self.blocks, step, [_match_tokens(draft, *text) for text in self.texts])

    @torch.inference_mode()
    def search(self, end: float, seed: int) -> list[Exit]:
        """Search sets of middle layers to leave out until the clock shows `end`; return those judged, at most `MOST_SETS`.

        Begin with those that change the hidden states least (Men et al., "ShortGPT", huggingface.co/papers/2403.03853), and then change the best set by
        one or two layers at random. Each set predicts each text in one forward after the target's cache of the prompt, as it would draft.
        """
        fixed, found = first_of_kind(self.base), dict[frozenset[int], Exit]()
        may = [n for n in range(self.blocks) if n not in fixed]
        if ChangingRope.of(self.base, 1) is not None or not may or time.perf_counter() >= end:
            return []
        held = [RowModel(self.base, 1, len(text)) for text, _ in self.texts]
        changes = torch.zeros(self.blocks)
        for model, (text, prompt) in zip(held, self.texts, strict=True):
            model.feed(text[None, : prompt - 1], [prompt - 1], keep=0)
            states = self.base(input_ids=text[None], use_cache=False, output_hidden_states=True).hidden_states
            changes -= torch.stack([torch.cosine_similarity(a, b, dim=-1).mean().cpu() for a, b in pairwise(states)])
        order = sorted(may, key=lambda n: float(changes[n]))
        waiting = [frozenset(order[:count]) for count in evenly(len(may) + 1, 8)]
        draw = random.Random(seed)
        for _ in range(MOST_SETS):
            if time.perf_counter() >= end:
                break
            best = max(found, key=lambda one: self._score(found[one]), default=frozenset())
            skipped = (
                waiting.pop(0)
                if waiting
                else best.symmetric_difference(draw.sample(may, min(len(may), draw.choice((1, 2)))))
            )
            if skipped and skipped not in found:
                found[skipped] = self._skip(skipped, held)
        return list(found.values())

    def _skip(self, skipped: frozenset[int], held: Sequence[RowModel]) -> Exit:
        draft, right, numbers = skip_layers(self.base, skipped), [], tuple(sorted(skipped))
        for model, (text, prompt) in zip(held, self.texts, strict=True):
            logits = ExitModel(draft, model).feed(text[None, prompt - 1 : -1], [len(text) - prompt])[0]
            right.append(logits.argmax(dim=-1) == text[prompt:])
        layers = self.blocks - len(skipped)
        return self._judge(layers, self._step(layers), right, () if numbers[0] == layers else numbers)

    def _score(self, one: Exit) -> float:
        """Return its gain where a forward takes as long as its layers are many: no clock decides which sets a seed tries."""
        return find_best_draft_length([1.0] * len(WIDTHS), one.layers / self.blocks, one.acceptance.value)[1]

    def _step(self, layers: int) -> float:
        return self.one + (self.took[0] - self.one) * (layers - 1) / max(self.blocks - 1, 1)

    def _judge(self, layers: int, step: float, right: Sequence[torch.Tensor], skipped: tuple[int, ...] = ()) -> Exit:
        acceptance = rate([float(matches.sum()) for matches in right], [float(len(matches)) for matches in right])
        gamma, gain = find_best_draft_length(self.took, step, acceptance.value)
        return Exit(layers, acceptance, step, self.took[0], gamma, gain, skipped)


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
