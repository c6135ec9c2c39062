"""The walk over texts that collecting makes: at each position one drafted token, judged, and its hidden state kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...artifacts.features import FeatureSpec
from ...drafters.states_run import StatesRun
from ...engine.call import Call
from ...generation.runner import Runner
from ...models.quirks.rope import renew
from ...policy.policy import LossyPolicy
from ...round import Selection, Verified
from ...rules import RuleRun, Strict, accept, draw
from ...stats.speculation import RowStats, SpeculationStats
from ...stops.constant import Constant
from ...training.dataset import REPLACED, label_acceptable
from .collect_settings import CollectSettings


@dataclass(frozen=True)
class _Keeps(Strict):
    """Has the draft's hidden states kept (`Draft.hidden`)."""

    spec: FeatureSpec = FeatureSpec()

    @property
    def features(self) -> FeatureSpec:  # type: ignore[override]
        return self.spec


class Walk(Runner):
    """Decoding's own rounds with one drafted token each, of which something else than the rule's verdict is kept."""

    shares = False  # here the draft may be ahead of the target for several rounds
    reads_wholly = True

    def __init__(
        self,
        draft: Any,
        settings: CollectSettings,
        forced: Sequence[list[int] | None],
        tell: Callable[[int], None] = lambda positions: None,
    ):
        """`forced[b]`: the tokens that row b goes on with; None where the models write it. `tell`: is given the positions done."""
        super().__init__(LossyPolicy(_Keeps(settings.features), Constant(1)), draft)
        self.wanted, self.forced, self.tell = settings, forced, tell
        self.records: list[tuple] = []  # (row, position, token, p, q, distance)
        self.features: list[list[float]] = []  # of each record, (H,)

    def decode(self, call: Call) -> SpeculationStats:
        rows, drafter = call.rows, call.drafter
        if isinstance(drafter, StatesRun):
            drafter.hold_back(self.wanted.places)
        kinds = [self.wanted.kinds[row % len(self.wanted.kinds)] for row in rows.index]
        positions = 0
        while rows.unfinished:
            renew(call.renewing, rows, call.clock)
            draft = drafter.propose(rows, [0 if finished else 1 for finished in rows.finished], call.randomness)
            assert draft.hidden is not None, "the rule has them kept"
            features = draft.hidden[:, 0].float()  # (B, H)
            last, counts = rows.after(call.target.lengths)
            raw = call.target.feed(last, counts, keep=1).to(device=rows.ids.device, dtype=torch.float32)
            scores = call.processing(rows.ids, rows.lengths, raw, rows.index)
            # The place behind the drafted token is never looked at.
            verified = Verified(Selection(draft, draft.lengths), scores.expand(-1, 2, -1))
            x, p_x, q_x, distance = judged(verified)
            fits = label_acceptable(p_x, q_x, self.wanted.lam)
            verdict = accept(RuleRun(Strict()), verified, call.randomness)
            corrected = torch.where(fits | (verdict.accepted == 1), x, verdict.token)
            own = draw(verified.p[:, 0]) if verified.sampling else verified.argmax[:, 0]
            following = {"draft": x.tolist(), "target": own.tolist(), "mixed": corrected.tolist()}
            if self.wanted.mix is not None:
                replaced = torch.rand(x.shape, dtype=torch.float32, device=x.device) < self.wanted.mix
                following[REPLACED] = torch.where(replaced, own, x).tolist()

            table = zip(x.tolist(), p_x.tolist(), q_x.tolist(), distance.tolist(), strict=True)
            following["original"] = [0] * len(kinds)
            for b, record in enumerate(table):
                if rows.finished[b]:
                    continue
                position = rows.lengths[b] - rows.begins[b]
                if record[-1] != record[-1]:  # NaN: the distance of two distributions of which one is none
                    raise ValueError(
                        f"the target or the draft gave NaN or infinite logits in row {rows.index[b]}, after {position} new tokens"
                    )
                self.records.append((rows.index[b], position, *record))
                self.features.append(features[b].tolist())
                ending = self.forced[rows.index[b]]
                over = position + 1 == self.wanted.new_tokens or (ending is not None and position >= len(ending))
                if over:
                    rows.finished[b] = True
                elif ending is not None:
                    following["original"][b] = ending[position]
            tokens = [following[kind][b] for b, kind in enumerate(kinds)]
            rows.write(torch.tensor(tokens, device=rows.ids.device)[:, None])
            for b, token in enumerate(tokens):
                if not rows.finished[b]:
                    rows.commit(b, [token], verified.logits[b])
                    call.processing.commit(rows.index[b], 1)
            call.target.rollback(rows.held())
            drafter.learn(rows, verified, [0] * len(tokens))
            positions += 1
            self.tell(positions)
        return SpeculationStats([RowStats() for _ in rows.index], 1, True)


def judged(verified: Verified) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first drafted token x, p(x), q(x) and d_TV(p, q) at its position, each (B,), by the distributions that decoding uses.

    Greedy distributions are certain: q(x) = 1, and p(x) is 1 or 0.
    """
    x = verified.tokens[:, 0]
    if verified.q is None:
        same = (x == verified.argmax[:, 0]).float()
        return x, same, torch.ones_like(same), 1.0 - same
    p, q = verified.p[:, 0], verified.q[:, 0]  # (B, V)
    of_x = x[:, None]
    return x, p.gather(1, of_x)[:, 0], q.gather(1, of_x)[:, 0], (p - q).abs().sum(dim=1) / 2
