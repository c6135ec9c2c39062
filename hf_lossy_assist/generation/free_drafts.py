"""`assistant_model="auto"`: the drafts that need no other model are tried on a call's prompts, and the fastest, or none, drafts from then on.

They are the suffixes of the text, some of the target's layers, and a copy of the target in int8. Models are first judged as `find_exit` judges exits;
those that promise a gain, and the others, then write the first tokens of the call itself. Nothing lossy is tried.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from transformers import PreTrainedModel

from ..drafters.auto import NoDrafter
from ..drafters.suffix import SuffixDrafter
from ..models.compat import CACHE_NAMES
from ..models.distributed import is_one_of_several
from ..models.int8 import int8
from ..models.introspection import base_of, blocks_of, device_of, remember
from ..policy.policy import LossyPolicy
from ..validation import MOST_NEW_TOKENS, check_int, check_positive, one_line
from .draft_settings import FROM_STATES, WITHOUT_MODEL
from .find_early_exit import Exit, ExitTrials, evenly


AUTO, LATE = "auto", "no time left"
MARGIN = 1.05  # how much faster than the target alone a draft must be
EXITS, PROMPTS, REPEATS = 4, 2, 3  # exits to judge, prompts to judge drafts on, timings of each forward
WEIGHTS_PER_SECOND = 2e7  # put into int8 on a slow core; a copy that takes more than half of the time left is not made
# Arguments of the call that a trial must not have: they belong to one text, or set its length.
NOT_TRIED = set(
    "streamer logits_processor stopping_criteria prefix_allowed_tokens_fn stop_strings max_length max_new_tokens min_length min_new_tokens max_time "
    "generator assistant_model return_dict_in_generate output_scores output_logits".split()
)
OTHERS = ("drafter", "hints", "draft_window", "assistant_tokenizer", *WITHOUT_MODEL, *FROM_STATES)
Write = Callable[..., Any]  # a policy's `generate`: takes the policy and keyword arguments


@dataclass(frozen=True)
class AutoAssistant:
    """Choose a free draft: `assistant_model="auto"` is `AutoAssistant()`.

    Args:
        seconds: that the trials of a model's first call may take; a forward that has begun is finished. new_tokens: of a trial.
    """

    seconds: float = 20.0
    new_tokens: int = 32

    def __post_init__(self) -> None:
        check_positive("AutoAssistant.seconds", self.seconds, 86_400.0)
        check_int("AutoAssistant.new_tokens", self.new_tokens, 2, MOST_NEW_TOKENS)


@dataclass(frozen=True)
class FreeDraft:
    """One draft: the arguments of `generate` that use it, as a caller would write them, and its tokens per second, or why it has none."""

    name: str
    arguments: Mapping[str, Any]
    line: str
    speed: float = 0.0
    why_not: str | None = None

    def beside(self, policy: LossyPolicy, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for a call with others: a length of drafts of the policy's or the caller's comes first."""
        stops = policy.stop is not None or given.get("num_assistant_tokens") is not None
        left_out = "num_assistant_tokens" if stops else None
        return {name: value for name, value in self.arguments.items() if name != left_out}

    def __str__(self) -> str:
        return f"{self.name}: {self.why_not or f'{self.speed:.3g} tokens/s'}"


ALONE = FreeDraft("the target alone", {"drafter": NoDrafter()}, "no assistant_model")
SUFFIX = FreeDraft("suffix", {"drafter": SuffixDrafter()}, "drafter=hla.SuffixDrafter()")


def is_auto(given: object) -> TypeGuard[str | AutoAssistant]:
    """Return whether `assistant_model` asks for a free draft."""
    return isinstance(given, AutoAssistant) or (isinstance(given, str) and given == AUTO)


def with_free_draft(
    target: PreTrainedModel, policy: LossyPolicy, given: Mapping[str, Any], write: Write
) -> tuple[LossyPolicy, dict[str, Any]]:
    """Return the policy and the arguments of a call with the target's free draft in place of "auto", which is chosen in its first call.

    Raises: `TypeError` or `ValueError`, one line, for a call in which no draft can be tried.
    """
    auto, base = given["assistant_model"], base_of(target)
    for name in OTHERS:
        if given.get(name) is not None:
            raise ValueError(f'assistant_model="auto" chooses what drafts: leave {name} out, or name the draft')
    if is_one_of_several():
        raise ValueError('assistant_model="auto" tries drafts in one process: name the draft here')
    settings = auto if isinstance(auto, AutoAssistant) else AutoAssistant()
    place = "free draft", device_of(base), base.get_input_embeddings().weight.dtype
    found = remember(base, place, lambda: _choose(base, policy, given, write, settings))
    rest = {name: value for name, value in given.items() if name != "assistant_model"}
    return (LossyPolicy() if found.name == ALONE.name else policy), rest | found.beside(policy, rest)


def _choose(
    base: PreTrainedModel, policy: LossyPolicy, given: Mapping[str, Any], write: Write, auto: AutoAssistant
) -> FreeDraft:
    if any(given.get(name) is not None for name in CACHE_NAMES):
        raise ValueError(
            'assistant_model="auto" tries drafts on whole prompts, and a cache was passed: name the draft'
        )
    end = time.perf_counter() + auto.seconds
    common = {name: value for name, value in given.items() if name not in NOT_TRIED}
    common |= {"max_new_tokens": auto.new_tokens, "return_dict_in_generate": True}

    def tried(draft: FreeDraft, by: LossyPolicy) -> FreeDraft:
        """Write the first tokens twice, and count the faster time."""
        speed = 0.0
        for _ in range(2):
            left, began = end - time.perf_counter(), time.perf_counter()
            if left <= 0:
                break
            generator = torch.Generator(device_of(base)).manual_seed(0)  # the call's random numbers are not touched
            given = common | draft.beside(by, common) | {"max_time": left, "generator": generator}
            out = write(by, **given)
            new = sum(row.num_new_tokens for row in out.speculation.rows)
            speed = max(speed, new / max(time.perf_counter() - began, 1e-9))
        return FreeDraft(draft.name, draft.arguments, draft.line, speed, None if speed else LATE)

    found = [tried(ALONE, LossyPolicy())]  # its errors are those of the call
    models = [FreeDraft(name, {}, "", why_not=LATE) for name in ("some of the target's layers", "int8")]
    with torch.random.fork_rng(devices=[]):  # timings draw tokens
        try:
            if time.perf_counter() < end:
                models = _promising(base, given, end, auto.new_tokens)
        except ValueError as error:
            models = [FreeDraft("some of the target's layers, int8", {}, "", why_not=one_line(error, 150))]
    for draft in (SUFFIX, *models):
        try:
            found.append(draft if draft.why_not else tried(draft, policy))
        except ValueError as error:  # the policy's stop, say, reads what a model drafts with
            found.append(FreeDraft(draft.name, {}, "", why_not=one_line(error, 150)))
    best = max(found, key=lambda draft: draft.speed / (1 if draft is found[0] else MARGIN))
    others = "; ".join(str(draft) for draft in found if draft is not best)
    warnings.warn(
        f'assistant_model="auto" takes {best} ({others}), for this model from now on; to skip the trials: {best.line}',
        UserWarning,
        stacklevel=6,
    )
    return best


def _promising(base: PreTrainedModel, given: Mapping[str, Any], end: float, new_tokens: int) -> list[FreeDraft]:
    """Return the best draft of the target's layers and its copy in int8, each with why it is not worth a trial, if so. Raises: `ValueError`, one line."""
    out, blocks = list[FreeDraft](), len(blocks_of(base) or ())
    ids, mask = given.get("input_ids", given.get("inputs")), given.get("attention_mask")
    if not isinstance(ids, torch.Tensor):
        raise ValueError("they are judged on token ids, and the call has none")
    seen = torch.ones_like(ids) if mask is None else mask
    prompts = [
        row[here.to(row.device).bool()].to(device_of(base)) for row, here in zip(ids[:PROMPTS], seen, strict=False)
    ]
    trials = ExitTrials(base, prompts, new_tokens, REPEATS)
    judged = [trials.first(n) for n in evenly(blocks, EXITS) if n < blocks and time.perf_counter() < end]
    judged += trials.search(time.perf_counter() + (end - time.perf_counter()) / 4, 0)
    if judged:
        best = max(judged, key=lambda one: one.gain)
        without = f" (without {', '.join(map(str, best.skipped))})" if best.skipped else ""
        out.append(_judged(f"{best.layers} of {blocks} layers{without}", lambda: best.draft(base), best, best.code))
    if base.num_parameters() / WEIGHTS_PER_SECOND > (end - time.perf_counter()) / 2:
        return [*out, FreeDraft("int8", {}, "", why_not=LATE)]
    try:
        copied = int8(base)
    except ValueError as error:
        return [*out, FreeDraft("int8", {}, "", why_not=one_line(error, 150))]
    line = "assistant_model=hf_lossy_assist.models.int8.int8(target)"
    return [*out, _judged("int8", lambda: copied, trials.copy(copied), line)]


def _judged(name: str, draft: Callable[[], PreTrainedModel], found: Exit, line: str) -> FreeDraft:
    if found.gain <= 1:
        return FreeDraft(name, {}, "", why_not=f"{found.gain:.2f} × predicted")
    return FreeDraft(name, {"assistant_model": draft(), "num_assistant_tokens": found.gamma}, line)
