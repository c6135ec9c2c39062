"""Continuations of many responses at once during the search, from a local batch or a server, and the choice of tokens."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from ...batch.logits_processing import Processing, refuse_unknown
from ...models.introspection import device_of, end_tokens
from ...models.row_model import RowModel
from ...tasks.endpoint import Endpoint
from .prefixes import PrefixReader, count_shared, reserve


class Backend(Protocol):
    """Interface that writes continuations for several places at once."""

    def start(self, place: int, prompt: list[int], prefix: list[int], budget: int) -> None:
        """Start to continue the response `prefix` to `prompt` by up to `budget` tokens."""

    def step(self) -> list[tuple[int, list[int], bool]]:
        """Continue until something may be ready; return (place, continuation, whether its text was retokenised differently) for each."""

    def forget(self, place: int) -> None:
        """Note that the place's problem is finished."""

    def narrow(self, places: Sequence[int]) -> None:
        """Keep only these places, renumbered in this order."""

    @property
    def busy(self) -> bool:
        """True while any continuation is under way."""


# They depend on one prompt's length, so one set of processors cannot serve all prompts.
PER_PROMPT = {
    MinNewTokensLengthLogitsProcessor: "min_new_tokens",
    ForcedBOSTokenLogitsProcessor: "forced_bos_token_id",
    ForcedEOSTokenLogitsProcessor: "forced_eos_token_id",
    SuppressTokensAtBeginLogitsProcessor: "begin_suppress_tokens",
    ExponentialDecayLengthPenalty: "exponential_decay_length_penalty",
}


class Sampler:
    """Choice of the next token of each text: the argmax, or the Gumbel-max sample of a random state (Appendix A).

    argmax_i log P(i | text) + g_i, with Gumbel noise g drawn from a seed that is a hash of (state, text): a sample of P that is the same for the
    same state and text in any batch, and shared by target and draft.
    """

    def __init__(self, processors: LogitsProcessorList, state: int | None):
        """`state`: None for greedy choices."""
        refuse_unknown(processors, "mining needs functions of the text: leave it out")
        self.processing, self.state = Processing(processors, 1), state

    def __call__(self, texts: Sequence[list[int]], logits: torch.Tensor, model: str = "") -> list[int]:
        """Choose one token after each of `texts`, from raw `logits` (N, V) of the model `model`.

        Raises: `ValueError`, one line, if the processed logits of a text are NaN or infinite.
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
            noise = torch.stack([self.draw_noise(text, scores.shape[-1]) for text in texts])
            scores = scores.log_softmax(dim=-1) + noise.to(scores.device)
        return scores.argmax(dim=-1).tolist()

    def draw_noise(self, text: Sequence[int], size: int) -> torch.Tensor:
        """Draw the Gumbel noise (size,) float32 of this state after `text`."""
        content = np.array([self.state, *text], dtype=np.int64).tobytes()
        seed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
        uniform = torch.empty(size, dtype=torch.float32)
        return uniform.exponential_(generator=torch.Generator().manual_seed(seed)).log().neg()


def prepare_decoding(model: PreTrainedModel, config: GenerationConfig) -> tuple[LogitsProcessorList, set[int]]:
    """Return the processors and end tokens with which `model.generate` would decode under `config`.

    Raises: `ValueError` if the model's generation config sets a processor that depends on the prompt's length.
    """
    found: dict[str, Any] = {}

    def record(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
        **_: object,
    ) -> torch.Tensor:
        found.update(processors=logits_processor, config=generation_config)
        return input_ids

    ids = torch.zeros(1, 1, dtype=torch.int64, device=device_of(model))
    mask = torch.ones_like(ids)
    type(model).generate(model, ids, attention_mask=mask, generation_config=config, custom_generate=record)
    for processor in found["processors"]:
        if type(processor) in PER_PROMPT:
            name = PER_PROMPT[type(processor)]
            raise ValueError(
                f"the generation config of {type(model).__name__} sets {name}, which counts from each prompt's end and is not "
                f"supported in mining: set model.generation_config.{name} = None"
            )
    return found["processors"], end_tokens(found["config"])


@dataclass(eq=False)
class _BatchPlace:
    """A row of the batch."""

    reader: PrefixReader | None  # of a model with a recurrent state, which cannot be rolled back to a common prefix
    cached: list[int] = field(default_factory=list)  # tokens in the row's cache
    prompt: list[int] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    new: list[int] | None = None  # None: idle
    budget: int = 0
    fresh: bool = True  # nothing of its problem was read yet


class LocalBackend:
    """A local target. Each place is a row of one cache, and the common prefix of a place's successive texts is not run again."""

    def __init__(
        self, target: PreTrainedModel, places: int, limit: int, sampler: Sampler, over: Callable[[Sequence[int]], bool]
    ):
        """`limit`: the most tokens of a place's prompt and response. `over`: whether a response has ended."""
        self.model, self.sampler, self.over = RowModel(target, places, limit), sampler, over
        self.recurrent = self.model.facts.keeps_states
        self.places = [
            _BatchPlace(PrefixReader(RowModel(target, 1, limit)) if self.recurrent else None) for _ in range(places)
        ]
        reserve(self.model, limit)

    @property
    def busy(self) -> bool:
        return any(place.new is not None for place in self.places)

    @torch.inference_mode()
    def start(self, place: int, prompt: list[int], prefix: list[int], budget: int) -> None:
        row, text = self.places[place], prompt + prefix
        row.prompt, row.prefix, row.new, row.budget = prompt, prefix, [], budget
        if row.reader is not None:
            self.model.insert([place], row.reader.read(text[:-1], len(prompt)), [0])
            return
        shared = self._reuse(place, text[:-1])
        row.cached, row.fresh = text[:-1], False
        self.model.lengths[place] = shared
        if shared < len(text) - 1:  # a parallel forward of this row alone
            missing = torch.tensor([text[shared:-1]])
            self.model.row(place).feed(missing, [missing.shape[1]], keep=0)
            self.model.lengths[place] = len(text) - 1

    def _reuse(self, place: int, text: list[int]) -> int:
        """Return how many tokens of a text a place holds; the beginning of a prompt may be copied from another place."""
        fresh = self.places[place].fresh
        shared = [count_shared(row.cached, text) if fresh or b == place else 0 for b, row in enumerate(self.places)]
        most = max(shared)
        if most > shared[place] and not self.model.reads_whole:  # else keys depend on the length of the prompt
            self.model.cache.copy([place], self.model.cache, [shared.index(most)], [most])
            return most
        return shared[place]

    @torch.inference_mode()
    def step(self) -> list[tuple[int, list[int], bool]]:
        """Write one token at every active place."""
        writing = [(b, row, row.new) for b, row in enumerate(self.places) if row.new is not None]
        texts = [row.prompt + row.prefix + new for _, row, new in writing]
        feed = torch.zeros(len(self.places), 1, dtype=torch.int64)
        for (b, _, _), text in zip(writing, texts, strict=True):
            feed[b, 0] = text[-1]
        counts = [int(row.new is not None) for row in self.places]  # idle rows are fed a token that is not counted
        logits = self.model.feed(feed, counts, keep=1)[:, -1]
        if self.recurrent:  # drop the recorded steps, which are not needed any more
            self.model.rollback(self.model.lengths)
        rows = torch.tensor([b for b, _, _ in writing], device=logits.device)
        ready = []
        for (b, row, new), text, token in zip(
            writing, texts, self.sampler(texts, logits[rows], "target"), strict=True
        ):
            row.cached = text
            new.append(token)
            if len(new) == row.budget or self.over(row.prefix + new):
                ready.append((b, new, False))
                row.new = None
        return ready

    def forget(self, place: int) -> None:
        self.places[place].fresh = True

    def narrow(self, places: Sequence[int]) -> None:
        self.model.select(places)
        self.places = [self.places[b] for b in places]


class ServerBackend:
    """A target behind an OpenAI-compatible server (Appendix R): sends each place's text and tokenises the reply.

    A text has several tokenisations, and the server does not report which one it used. If the tokens of the whole text begin with those sent, the
    rest are the new ones; otherwise the prefix keeps its tokens, the new text is tokenised separately, and the continuation is counted as
    retokenised.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        over: Callable[[Sequence[int]], bool],
        pool: ThreadPoolExecutor,
    ):
        """Take `ends`: end tokens, of which the tokenizer's, or else the first, represents the end that a server reports.

        `over`: whether a response has ended; what the server wrote after that is cut off.
        """
        self.endpoint, self.tokenizer, self.over, self.pool = endpoint, tokenizer, over, pool
        self.end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else next(iter(ends), None)
        # The server also adds a begin token if the tokenizer does so automatically, but not one spelled out in the text.
        self.added = int(tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id])
        self.pending: dict[int, Future[tuple[list[int], bool]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.pending)

    def start(self, place: int, prompt: list[int], prefix: list[int], budget: int) -> None:
        self.pending[place] = self.pool.submit(self._request, prompt, prefix, budget)

    def step(self) -> list[tuple[int, list[int], bool]]:
        wait(self.pending.values(), return_when=FIRST_COMPLETED)
        ready = [place for place, future in self.pending.items() if future.done()]
        return [(place, *self.pending.pop(place).result()) for place in ready]

    def forget(self, place: int) -> None:
        pass

    def narrow(self, places: Sequence[int]) -> None:
        self.pending = {new: self.pending[old] for new, old in enumerate(places) if old in self.pending}

    def _request(self, prompt: list[int], prefix: list[int], budget: int) -> tuple[list[int], bool]:
        ids = (prompt + prefix)[self.added :]
        text = self.tokenizer.decode(ids)
        completion = self.endpoint.complete(text, budget)
        spelt = self.tokenizer(text + completion.text, add_special_tokens=False)["input_ids"]
        respelt = spelt[: len(ids)] != ids
        new = spelt[len(ids) :]
        if respelt:
            new = self.tokenizer(completion.text, add_special_tokens=False)["input_ids"]
        if completion.finished and self.end is not None:
            new = [*new, self.end]
        new = new[:budget]  # the server counts in its tokenisation: ours may exceed the budget
        last = next((i for i in range(len(new)) if self.over(prefix + new[: i + 1])), len(new) - 1)
        return new[: last + 1], respelt
