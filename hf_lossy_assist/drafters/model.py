"""Where drafted tokens come from: a draft model with its own loop, or one of Transformers' candidate generators."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from ..artifacts.features import FeatureTap
from ..batch.positions import TableEnds
from ..batch.processing import Processing
from ..batch.rows import Rows
from ..batch.soundness import something
from ..models.cached import CachedModel
from ..models.stock_exit import layers_restored
from ..round import Block
from ..rules import draw
from ..stats.clock import Clock
from ..stops import DraftStop


class Drafter(Protocol):
    """Proposes a block, and learns how much of it was accepted."""

    def propose(self, rows: Rows, limits: Sequence[int]) -> Block:
        """Up to `limits[b]` tokens for row b; leaves them written behind each row's text (`Rows.write`)."""

    def learn(self, rows: Rows, block: Block, accepted: Sequence[int]) -> None:
        """Called after every commit, with `rows` already grown by it."""

    def select(self, keep: Sequence[int]) -> None:
        """Keep these rows only."""


def fitted(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Logits (…, V') over the target's `vocabulary`: missing ids get −inf, surplus is cut off."""
    missing = vocabulary - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits[..., :vocabulary]


class ModelDrafter:
    """A draft model: one token at a time for all rows, until each row's limit, its stop, or an end token.

    A row that stops early is masked, not dropped: the others go on beside it. Tokens are drawn from q, the draft's law after
    the call's logits processors (applied once), and q is kept for the acceptance rule.
    """

    def __init__(
        self,
        model: CachedModel,
        stop: DraftStop,
        processing: Processing,
        vocabulary: int,
        sampling: bool,
        clock: Clock,
        tap: FeatureTap | None = None,
        states: FeatureTap | None = None,
    ):
        """`vocabulary`: the target's. A smaller draft's missing ids get q = 0; a larger one's surplus is cut off.

        `tap` and `states`, on the draft model, are entered by the caller; the stop is given what `tap` holds, and what `states`
        holds of each drafted token goes into the block, for the rule.
        """
        self.model, self.stop, self.processing, self.tap, self.states = model, stop, processing, tap, states
        self.vocabulary, self.sampling, self.clock = vocabulary, sampling, clock
        # (B, γ) of this round: a number of each drafted token's law (greedy: its largest logit), not finite where there is no law.
        self.peaks: torch.Tensor | None = None
        self.lacks = False  # the model has fewer token ids than the target
        self.keep_laws = False  # in greedy decoding too, for a filter that reads them

    def propose(self, rows: Rows, limits: Sequence[int]) -> Block:
        device, batch = rows.ids.device, rows.ids.shape[0]
        tokens, peaks = [], []  # (B,) each
        laws: list[torch.Tensor] = []  # (B, V) each
        states: list[torch.Tensor] = []  # (B, H) each
        counted, going = [0] * batch, [limit > 0 for limit in limits]  # for adaptive stops alone
        # Rows that need not have stopped for the round to end.
        may_wait = sum(going) - max(1, math.ceil(self.stop.patience * sum(going) - 1e-9))

        ended = torch.tensor([not here for here in going], device=device)  # (B,) for the other stops
        feed, counts = rows.after(self.model.lengths)
        for i in range(max(limits)):
            raw = self._logits(feed, counts, device)  # (B, V)
            if self.states is not None:
                states.append(self._last(self.states, counts))
            scores = self.processing(rows.ids, [n + i for n in rows.lengths], raw[:, None], rows.index)[:, 0]
            if self.lacks:
                scores = something(scores, raw)
            if self.sampling or self.keep_laws:
                laws.append(scores.softmax(dim=-1))
            if self.sampling:
                token, peak = draw(laws[-1]), laws[-1][:, 0]
            else:
                peak, token = scores.max(dim=-1)
            tokens.append(token)
            peaks.append(peak)
            if self.processing.needs_prefix:
                rows.write(token[:, None], i)
            if self.stop.adaptive:
                stops = self._stops(token, raw, counts, rows.index).to(device) | rows.ends(token)
                for b, stopped in enumerate(stops.tolist()):  # the one look at the device that an adaptive stop costs
                    if going[b]:
                        counted[b], going[b] = i + 1, not stopped and i + 1 < limits[b]
                if sum(going) <= may_wait:
                    break
            elif device.type == "cpu":  # where a look costs nothing: no row drafts on when all have come to their end
                ended |= rows.ends(token)
                if bool(ended.all()):
                    break
            feed, counts = token[:, None], [1] * batch

        room = torch.tensor(counted if self.stop.adaptive else list(limits), device=device)
        if not tokens:
            self.peaks = None
            return Block(rows.ids[:, :0], room, None, self.sampling)
        if self.states is not None and self.states.spec.position == "token":
            # A token's own state is known one forward later: the first of them encodes no draft, the last is still missing.
            self._logits(tokens[-1][:, None], [1] * batch, device)
            states = states[1:] + [self._last(self.states, [1] * batch)]
        drawn = torch.stack(tokens, dim=1)  # (B, γ)
        rows.write(drawn)
        drafted = room
        if not self.stop.adaptive:  # up to the first end, with it
            drafted = torch.minimum(1 + (rows.ends(drawn).long().cumsum(dim=1) == 0).sum(dim=1), room)
        self.peaks = torch.stack(peaks, dim=1)
        law = torch.stack(laws, dim=1) if laws else None
        block = Block(drawn, drafted, law if self.sampling else None, self.sampling, laws=law)
        block.states = torch.stack(states, dim=1) if states else None
        return block

    def _stops(self, token: torch.Tensor, raw: torch.Tensor, counts: list[int], rows: list[int]) -> torch.Tensor:
        """What the stop says of `token` (B,), drawn from `raw` (B, V), the last of `counts[b]` positions of the forward."""
        if self.tap is None:
            return self.stop(token[:, None], (raw,), rows=rows)
        with self.clock.time("head"):
            return self.stop(token[:, None], (raw,), rows=rows, features=self._last(self.tap, counts))

    @staticmethod
    def _last(tap: FeatureTap, counts: list[int]) -> torch.Tensor:
        """What `tap` holds of each row's last real position, (B, H)."""
        return tap.at(-1 if len(set(counts)) == 1 else torch.tensor([c - 1 for c in counts]))

    def _logits(self, feed: torch.Tensor, counts: list[int], device: torch.device) -> torch.Tensor:
        with self.clock.time("draft"):
            even = len(set(counts)) == 1
            logits = self.model.feed(feed, counts, keep=1 if even else None)
        last = logits[:, -1] if even else logits[range(len(counts)), [c - 1 for c in counts]]
        self.lacks = last.shape[-1] < self.vocabulary
        return fitted(last.to(device=device, dtype=torch.float32), self.vocabulary)

    def learn(self, rows: Rows, block: Block, accepted: Sequence[int]) -> None:
        held = block.known(rows.held(), accepted)
        self.model.rollback([min(a, b) for a, b in zip(self.model.lengths, held, strict=True)])

    def select(self, keep: Sequence[int]) -> None:
        self.model.select(keep)


class CandidateDrafter:
    """One of Transformers' candidate generators, at batch 1: prompt lookup, early exit, another tokenizer."""

    def __init__(
        self, generator: CandidateGenerator, vocabulary: int, sampling: bool, clock: Clock, target: PreTrainedModel
    ):
        self.target = target
        self.generator, self.vocabulary, self.sampling, self.clock = generator, vocabulary, sampling, clock

    def propose(self, rows: Rows, limits: Sequence[int]) -> Block:
        text = rows.prompts()[0][None]
        with self.clock.time("draft"), layers_restored(self.target):
            try:
                candidates, logits = self.generator.get_candidates(text)
            except TableEnds:  # for good: the text only grows
                candidates, logits = text, None
        tokens = candidates[:, text.shape[1] :][:, : limits[0]].to(rows.ids.device)
        gamma = tokens.shape[1]
        q = None
        if self.sampling and logits is not None and gamma:
            q = logits[:, :gamma, : self.vocabulary].to(device=rows.ids.device, dtype=torch.float32).softmax(dim=-1)
        rows.write(tokens)
        return Block(tokens, torch.tensor([gamma], device=rows.ids.device), q, self.sampling)

    def learn(self, rows: Rows, block: Block, accepted: Sequence[int]) -> None:
        text = rows.prompts()[0][None]
        self.generator.update_candidate_strategy(text, block.scores, accepted[0])

    def select(self, keep: Sequence[int]) -> None:
        if list(keep) != [0]:
            raise AssertionError(f"a candidate generator serves one row; asked for {list(keep)}")


class StoppingCandidateGenerator(AssistedCandidateGenerator):
    """A `DraftStop` inside Transformers' own assisted generation: its usual draft loop, which also stops where `stop` says.

    `scores` that the stop sees there are the processed ones. `num_assistant_tokens` is the stop's longest draft, and
    Transformers' own confidence stop is off.
    """

    def __init__(self, *args: Any, stop: DraftStop, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.stop = stop.start(1)
        self.assistant_generation_config.assistant_confidence_threshold = 0.0
        self.generation_config.assistant_confidence_threshold = 0.0
        self.assistant_generation_config.num_assistant_tokens_schedule = "constant"

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        self.num_assistant_tokens = self.stop.limits([0])[0]
        candidates, logits = super().get_candidates(input_ids, **kwargs)
        self._drafted = candidates.shape[1] - input_ids.shape[1]
        return candidates, logits

    def _prepare_generation_args(self, *args: Any, **kwargs: Any) -> dict:
        arguments = super()._prepare_generation_args(*args, **kwargs)
        return arguments | {"stopping_criteria": StoppingCriteriaList([self.stop])}

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        self.stop.observe([0], [self._drafted], [int(num_matches)])


def stock_generator(model: PreTrainedModel, stop: DraftStop) -> Any:
    """A `_get_candidate_generator` for `model` that drafts with `stop`; see `integration.stock_stop`."""

    def get(
        generation_config: Any,
        input_ids: torch.LongTensor,
        inputs_tensor: torch.Tensor,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        assistant_model: PreTrainedModel | None = None,
        **others: Any,
    ) -> CandidateGenerator:
        if assistant_model is None:
            raise ValueError("a draft stop in Transformers' own loop needs assistant_model=…")
        return StoppingCandidateGenerator(
            input_ids=input_ids,
            assistant_model=assistant_model,
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            inputs_tensor=inputs_tensor,
            logits_processor=logits_processor,
            stop=stop,
        )

    return get
