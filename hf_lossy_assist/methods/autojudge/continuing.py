"""The target under the search: its continuations of many responses in one batch, and how a token is chosen."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from ...batch.logits_processing import Processing
from ...models.row_cache import SPARE
from ...models.row_model import RowModel
from .reading import Reader


class Continuer(Protocol):
    """Writes continuations for several places at once: a batch of a model, or a server."""

    def start(self, place: int, prompt: list[int], prefix: list[int], budget: int) -> None:
        """Have the response `prefix` to `prompt` continued by up to `budget` tokens."""

    def step(self) -> list[tuple[int, list[int], bool]]:
        """Go on until something may be ready: (place, continuation, whether its text has another spelling in tokens)."""

    def forget(self, place: int) -> None:
        """The place's problem is done."""

    def narrow(self, places: Sequence[int]) -> None:
        """Keep these places only; they are numbered anew, in this order."""

    @property
    def busy(self) -> bool:
        """Whether any continuation is under way."""


# Made for one prompt's length, so one set of processors cannot serve all prompts.
OF_ONE_PROMPT = {
    MinNewTokensLengthLogitsProcessor: "min_new_tokens",
    ForcedBOSTokenLogitsProcessor: "forced_bos_token_id",
    ForcedEOSTokenLogitsProcessor: "forced_eos_token_id",
    SuppressTokensAtBeginLogitsProcessor: "begin_suppress_tokens",
    ExponentialDecayLengthPenalty: "exponential_decay_length_penalty",
}


class Choice:
    """The next token after each text: the argmax, or the Gumbel-max sample of a random state (Appendix A).

    argmax_i log P(i | text) + g_i, with Gumbel noise g drawn from a seed that is a hash of (state, text): a sample of P that
    is the same whenever the state and the text are, in any batch, and shared by target and draft.
    """

    def __init__(self, processors: LogitsProcessorList, state: int | None):
        """`state`: None for greedy choices."""
        self.processing, self.state = Processing(processors, 1), state

    def __call__(self, texts: Sequence[list[int]], logits: torch.Tensor, model: str = "") -> list[int]:
        """One token after each of `texts`, from raw `logits` (N, V) of the model `model`.

        Raises: `ValueError`, one line, where they are NaN or infinite, after the processors too: no choice could be made of them.
        """
        if not texts:
            return []
        lengths = [len(text) for text in texts]
        ids = torch.zeros(len(texts), 0, dtype=torch.int64, device=logits.device)
        if self.processing.needs_prefix:
            ids = torch.tensor([text + [0] * (max(lengths) - len(text)) for text in texts], device=logits.device)
        scores = self.processing(ids, lengths, logits.float()[:, None], [0] * len(texts))[:, 0]
        fine = scores.amax(dim=-1).isfinite()
        if not fine.all():
            text = texts[int((~fine).nonzero()[0])]
            raise ValueError(
                f"the {model} model gave NaN or infinite logits after {len(text)} tokens of a problem's text, prompt included: look at "
                "its dtype and weights, and at the temperature"
            )
        if self.state is not None:
            noise = torch.stack([self.noise(text, scores.shape[-1]) for text in texts])
            scores = scores.log_softmax(dim=-1) + noise.to(scores.device)
        return scores.argmax(dim=-1).tolist()

    def noise(self, text: Sequence[int], size: int) -> torch.Tensor:
        """Gumbel noise (size,) float32 of this state after `text`."""
        content = np.array([self.state, *text], dtype=np.int64).tobytes()
        seed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
        return (
            torch.empty(size, dtype=torch.float32)
            .exponential_(generator=torch.Generator().manual_seed(seed))
            .log()
            .neg()
        )


def decoding_processors(model: Any, config: GenerationConfig) -> tuple[LogitsProcessorList, set[int]]:
    """The processors and end tokens with which `model.generate` would decode under `config`.

    Raises: `ValueError` where the model's own generation config asks for one that depends on the prompt's length.
    """
    found: dict[str, Any] = {}

    def keep(model: Any, input_ids: torch.Tensor, logits_processor: LogitsProcessorList, generation_config: Any, **_: Any) -> Any:  # fmt: skip
        found.update(processors=logits_processor, ends=generation_config.eos_token_id)
        return input_ids

    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    mask = torch.ones_like(ids)
    type(model).generate(model, ids, attention_mask=mask, generation_config=config, custom_generate=keep)
    for processor in found["processors"]:
        if type(processor) in OF_ONE_PROMPT:
            name = OF_ONE_PROMPT[type(processor)]
            raise ValueError(
                f"the generation config of {type(model).__name__} sets {name}, which counts from each prompt's end and is not "
                f"supported in mining: set model.generation_config.{name} = None"
            )
    ends = found["ends"]
    return found["processors"], set(ends if isinstance(ends, list) else [] if ends is None else [ends])


class Batch:
    """A `Continuer` on a local target. Each place is a row of one cache, and what two texts of a place share is not run again."""

    def __init__(self, target: Any, places: int, limit: int, choice: Choice, over: Callable[[Sequence[int]], bool]):
        """`limit`: the most tokens that prompt and response of a place can have."""
        self.model, self.choice, self.over = RowModel(target, places, limit), choice, over
        self.cached: list[list[int]] = [[] for _ in range(places)]  # what the cache holds of each row
        self.prompts: list[list[int]] = [[] for _ in range(places)]
        self.prefixes: list[list[int]] = [[] for _ in range(places)]
        self.new: list[list[int] | None] = [None] * places  # None: not writing
        self.budgets = [0] * places
        self.fresh = [True] * places  # nothing of its problem was read yet
        states = self.model.facts.keeps_states  # which cannot go back to what two texts share
        self.readers = [Reader(RowModel(target, 1, limit)) for _ in range(places if states else 0)]
        make_room(self.model, limit)

    @property
    def busy(self) -> bool:
        return any(new is not None for new in self.new)

    @torch.inference_mode()
    def start(self, place: int, prompt: list[int], prefix: list[int], budget: int) -> None:
        text = prompt + prefix
        self.prompts[place], self.prefixes[place] = prompt, prefix
        self.new[place], self.budgets[place] = [], budget
        if self.readers:
            self.model.take(place, self.readers[place].read(text[:-1], len(prompt)))
            return
        shared = self._shared(place, text[:-1])
        self.cached[place], self.fresh[place] = text[:-1], False
        self.model.lengths[place] = shared
        if shared < len(text) - 1:  # what this row alone has to catch up with, in one parallel forward of its own
            alone = self.model.row(place)
            missing = torch.tensor([text[shared:-1]])
            alone.feed(missing, [missing.shape[1]], keep=0)
            self.model.lengths[place] = len(text) - 1

    def _shared(self, place: int, text: list[int]) -> int:
        """How many tokens of a text a place holds; the beginning of a prompt may come from another place, which has read it."""
        held = [
            in_common(cached, text) if self.fresh[place] or b == place else 0 for b, cached in enumerate(self.cached)
        ]
        most = max(held)
        if most > held[place] and self.model.rope is None:  # else keys depend on the length of their prompt
            self.model.cache.copy(place, self.model.cache, held.index(most), most)
            return most
        return held[place]

    @torch.inference_mode()
    def step(self) -> list[tuple[int, list[int], bool]]:
        """One token for every place that is writing."""
        started = [(b, new) for b, new in enumerate(self.new) if new is not None]
        writing = [b for b, _ in started]
        texts = [self.prompts[b] + self.prefixes[b] + new for b, new in started]
        feed = torch.zeros(len(self.new), 1, dtype=torch.int64)
        for b, text in zip(writing, texts, strict=True):
            feed[b, 0] = text[-1]
        counts = [int(new is not None) for new in self.new]  # idle rows are fed a token that nobody remembers
        logits = self.model.feed(feed, counts, keep=1)[:, -1]
        if self.readers:  # what each token left is not needed any more
            self.model.rollback(self.model.lengths)
        tokens = self.choice(texts, logits[torch.tensor(writing, device=logits.device)], "target")
        ready = []
        for (b, new), text, token in zip(started, texts, tokens, strict=True):
            self.cached[b] = text
            new.append(token)
            if len(new) == self.budgets[b] or self.over(self.prefixes[b] + new):
                ready.append((b, new, False))
                self.new[b] = None
        return ready

    def forget(self, place: int) -> None:
        self.fresh[place] = True

    def narrow(self, places: Sequence[int]) -> None:
        self.model.select(places)
        names = ["cached", "prompts", "prefixes", "new", "budgets", "fresh", *["readers"] * bool(self.readers)]
        for name in names:
            setattr(self, name, [getattr(self, name)[b] for b in places])


@torch.inference_mode()
def make_room(model: RowModel, limit: int) -> None:
    """Storage for all tokens at once, so that rows can be copied and shared."""
    rows = len(model.lengths)
    model.reserve(limit + SPARE)
    model.feed(torch.zeros(rows, 1, dtype=torch.int64), [0] * rows, keep=0)


def in_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
