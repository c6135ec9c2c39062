"""Continuations of many responses at once during the search, by a local target or a server, and the choice of tokens."""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)

from ...batch.callers_code import serves_any_prompt
from ...batch.logits_processing import Processing
from ...drafters.base import split_assistant_and_drafter
from ...drafters.hidden_state import DraftModel
from ...generation.preparation import Preparation, TextRequest
from ...generation.scheduler import Scheduler
from ...models.introspection import device_of, end_tokens
from ...models.prefix_cache import PrefixCache
from ...policy.parse import as_policy
from ...tasks.endpoint import Endpoint


Over: TypeAlias = Callable[[Sequence[int]], bool]  # whether a response has ended with its last token


class Continuation(NamedTuple):
    """New tokens of the response of search `number`; `retokenised`: their text was tokenised differently."""

    number: int
    tokens: list[int]
    retokenised: bool = False


class GumbelNoise(LogitsProcessor):
    """Noise with which the argmax is the Gumbel-max sample of a random state (Appendix A).

    argmax_i log P(i | text) + g_i, with g drawn from a seed that is a hash of (state, text): a sample of P that is the
    same for the same state and text in any batch, and shared by target and draft. P is the softmax of the scores after
    `warpers`.
    """

    def __init__(self, state: int, warpers: Sequence[LogitsProcessor] = ()):
        self.state, self.warpers = state, LogitsProcessorList(warpers)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.add(input_ids.tolist(), self.warpers(input_ids, scores))

    def add(self, texts: Sequence[list[int]], scores: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities (N, V) of `scores` with the noise after each of `texts`."""
        noise = torch.stack([self.draw(text, scores.shape[-1]) for text in texts])
        return scores.log_softmax(dim=-1) + noise.to(scores.device)

    def draw(self, text: Sequence[int], size: int) -> torch.Tensor:
        """Draw the noise (size,) float32 after `text`."""
        content = np.array([self.state, *text], dtype=np.int64).tobytes()
        seed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
        uniform = torch.empty(size, dtype=torch.float32)
        return uniform.exponential_(generator=torch.Generator().manual_seed(seed)).log().neg()


class Sampler:
    """Choice of the draft's next token of each text: the argmax of its processed logits, plus noise if there is any."""

    def __init__(self, processors: LogitsProcessorList, noise: GumbelNoise | None = None):
        self.processing, self.noise = Processing(processors, 1), noise

    def __call__(self, texts: Sequence[list[int]], logits: torch.Tensor) -> list[int]:
        """Choose one token after each of `texts`, from raw `logits` (N, V).

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
                f"the draft model gave NaN or infinite logits after {len(text)} tokens of a problem's text, prompt "
                "included: look at its dtype and weights, and at the temperature"
            )
        scores = scores if self.noise is None else self.noise.add(texts, scores)
        return scores.argmax(dim=-1).tolist()


@dataclass(frozen=True)
class Decoding:
    """How `model.generate` would decode: its processors, those of them that sampling adds, and its end tokens."""

    processors: LogitsProcessorList
    warpers: Sequence[LogitsProcessor]
    ends: set[int]


def prepare_decoding(model: PreTrainedModel, new_tokens: int, settings: Mapping[str, object]) -> Decoding:
    """Return how `model.generate` would write up to `new_tokens` under the sampling `settings`.

    Raises: `ValueError` if the model's generation config sets a processor that is no function of the text alone.
    """
    options: dict[str, Any] = {}

    def record(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
        **_: object,
    ) -> torch.Tensor:
        options.update(processors=logits_processor, ends=end_tokens(generation_config))
        return input_ids

    def prepare(settings: Mapping[str, object]) -> LogitsProcessorList:
        ids = torch.zeros(1, 1, dtype=torch.int64, device=device_of(model))
        config = GenerationConfig(max_new_tokens=new_tokens, pad_token_id=0, **settings)
        type(model).generate(
            model, ids, attention_mask=torch.ones_like(ids), generation_config=config, custom_generate=record
        )
        return options["processors"]

    greedy, processors = prepare({"do_sample": False}), prepare(settings)
    wrong = [processor for processor in processors if not serves_any_prompt(processor)]
    if [type(processor) for processor in greedy] != [type(processor) for processor in processors[: len(greedy)]]:
        wrong.append(processors[-1])  # follows those that sampling adds
    if wrong:
        raise ValueError(
            f"the generation config of {type(model).__name__} sets a {type(wrong[0]).__name__}, which depends on where "
            "a prompt ends or on what was sampled: mining needs functions of the text, set its option to None"
        )
    return Decoding(processors, processors[len(greedy) :], options["ends"])


class ResponseEnds(StoppingCriteria):
    """The end of the response that begins after `start` tokens."""

    judges_rows_alone = True  # it keeps nothing

    def __init__(self, over: Over, start: int):
        self.over, self.begin = over, start

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.tensor([self.over(text[self.begin :]) for text in input_ids.tolist()], device=input_ids.device)


class LocalBackend:
    """A local target, by the scheduler of `generate_many`, whose prefix cache has what the texts have in common.

    The draft drafts under strict acceptance, which changes no token of greedy decoding; with noise, too, it is greedy.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DraftModel,
        rows: int,
        limit: int,
        over: Over,
        noise: GumbelNoise | None = None,
    ):
        """`rows`: most texts at a time. `limit`: the most tokens of a prompt and its response."""
        assistant, drafter = split_assistant_and_drafter(draft, None)
        settings = {"assistant_model": assistant, "drafter": drafter, "do_sample": False, "pad_token_id": 0}
        settings["logits_processor"] = None if noise is None else [noise]
        self.preparation, self.over = Preparation(target, as_policy("strict"), None, 0, settings), over
        self.scheduler = Scheduler(self.preparation, rows, prefixes=PrefixCache(rows * limit))
        self.waiting = deque[TextRequest]()

    @property
    def busy(self) -> bool:
        """Whether any continuation is under way."""
        return bool(self.waiting) or self.scheduler.going > 0

    def start(self, index: int, prompt: list[int], prefix: list[int], budget: int) -> None:
        """Start to continue the response `prefix` of search `index` to `prompt` by up to `budget` tokens."""
        ends = ResponseEnds(self.over, len(prompt))
        request = self.preparation.request(index, prompt + prefix, max_new_tokens=budget, stopping_criteria=[ends])
        self.waiting.append(request)

    def step(self) -> list[Continuation]:
        """Run one round; return the finished continuations."""
        while self.waiting and self.scheduler.admit(self.waiting[0]):
            self.waiting.popleft()
        return [Continuation(result.index, result.token_ids) for result in self.scheduler.step()]


class ServerBackend:
    """A target behind an OpenAI-compatible server (Appendix R), with the methods of `LocalBackend`.

    A text has several tokenisations, and the server does not report which one it used. If the tokens of the whole text
    begin with those sent, the rest are the new ones; otherwise the prefix keeps its tokens, the new text is tokenised
    separately, and the continuation is counted as retokenised.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        over: Over,
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

    def start(self, index: int, prompt: list[int], prefix: list[int], budget: int) -> None:
        self.pending[index] = self.pool.submit(self._request, prompt, prefix, budget)

    def step(self) -> list[Continuation]:
        wait(self.pending.values(), return_when=FIRST_COMPLETED)
        ready = [index for index, future in self.pending.items() if future.done()]
        return [Continuation(index, *self.pending.pop(index).result()) for index in ready]

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
