"""Where drafted tokens come from: a draft model with its own loop, or one of Transformers' candidate generators."""

import math
from collections.abc import Sequence

import torch

from ..artifacts.features import FeatureTap
from ..batch.processing import Processing
from ..batch.rows import Rows
from ..batch.soundness import something
from ..models.cached import CachedModel
from ..registry import register_drafter
from ..round import Block
from ..rules import draw
from ..stats.clock import Clock
from ..stops import StopRun
from .base import fitted


class ModelDrafter:
    """A draft model: one token at a time for all rows, until each row's limit, its stop, or an end token.

    A row that stops early is masked, not dropped: the others go on beside it. Tokens are drawn from q, the draft's law after
    the call's logits processors (applied once), and q is kept for the acceptance rule.
    """

    def __init__(
        self,
        model: CachedModel,
        stop: StopRun,
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
        may_wait = sum(going) - max(1, math.ceil(self.stop.settings.patience * sum(going) - 1e-9))

        ended = torch.tensor([not here for here in going], device=device)  # (B,) for the other stops
        feed, counts = rows.after(self.model.lengths)
        open_places = [int(here) for here in going]  # 0: the caller's processors are not asked
        for i in range(max(limits)):
            raw = self._logits(feed, counts, device)  # (B, V)
            if self.states is not None:
                states.append(self._last(self.states, counts))
            found = self.processing(rows.ids, [n + i for n in rows.lengths], raw[:, None], rows.index, open_places)[
                :, 0
            ]
            scores = something(found, raw) if self.lacks else found
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
            if self.stop.settings.adaptive:
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
            if self.processing.runs_callers_code:
                over = (rows.ends(token) | (found.gather(1, token[:, None])[:, 0] == -math.inf)).tolist()
                goes_on = going if self.stop.settings.adaptive else [limit > i + 1 for limit in limits]
                open_places = [int(o and g and not e) for o, g, e in zip(open_places, goes_on, over, strict=True)]
            feed, counts = token[:, None], [1] * batch

        room = torch.tensor(counted if self.stop.settings.adaptive else list(limits), device=device)
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
        if not self.stop.settings.adaptive:  # up to the first end, with it
            drafted = torch.minimum(1 + (rows.ends(drawn).long().cumsum(dim=1) == 0).sum(dim=1), room)
        self.peaks = torch.stack(peaks, dim=1)
        law = torch.stack(laws, dim=1) if laws else None
        block = Block(drawn, drafted, law if self.sampling else None, self.sampling, laws=law)
        block.states = torch.stack(states, dim=1) if states else None
        return block

    def _stops(self, token: torch.Tensor, raw: torch.Tensor, counts: list[int], rows: list[int]) -> torch.Tensor:
        """Whether each row stops after `token` (B,), drawn from `raw` (B, V), the last of `counts[b]` positions of the forward."""
        if self.tap is None:
            return self.stop.after_token(token[:, None], (raw,), rows=rows)
        with self.clock.time("head"):
            return self.stop.after_token(token[:, None], (raw,), rows=rows, features=self._last(self.tap, counts))

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


register_drafter(
    "model", ModelDrafter, paper="2211.17192",
    summary="A draft model writes one token after the other, for all rows of a batch.",
)  # fmt: skip
