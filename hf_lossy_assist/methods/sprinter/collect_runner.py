"""Decoding for data collection: at each position one token is drafted and judged, and its hidden state recorded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ...artifacts.features import FeatureSpec
from ...batch.logits_processing import refuse_unknown
from ...drafters.hidden_state import DraftModel, HiddenStateRun
from ...engine.call import Call
from ...generation.runner import Runner
from ...policy.policy import LossyPolicy
from ...round import Selection, Verified
from ...rules import RuleRun, Strict, accept, draw
from ...stats.speculation import RowStats, SpeculationStats
from ...stops.constant import Constant
from ...training.jobs import SamplingSettings
from ...training.verifier_dataset import KINDS, REPLACED, label_acceptable
from ...validation import LONGEST_DRAFT, MOST_FACTOR, MOST_NEW_TOKENS, MOST_ROWS, check_int, check_number, shown


@dataclass(frozen=True)
class CollectSettings(SamplingSettings):
    """Settings that determine all values in a collected dataset. A resumed run must have the same."""

    new_tokens: int = 64  # positions of each row
    lam: float = 1.2  # λ: acceptable is q(x) ≤ λ·p(x); affects the interleaved rows, and fitting may use another
    batch_size: int = 8  # prompts at a time; each has four rows
    features: FeatureSpec = FeatureSpec()
    mix: float | None = None  # share of the draft's tokens that are replaced, for SpecDec++; None: SPRINTER's rows
    places: int = 1  # tokens that a drafter on the target's states drafts in sequence before it reads new states
    do_sample: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("new_tokens", self.new_tokens, 1, MOST_NEW_TOKENS)
        check_int("batch_size", self.batch_size, 1, MOST_ROWS)
        check_number("lambda", self.lam, 0.0, MOST_FACTOR)
        check_int("places", self.places, 1, LONGEST_DRAFT)
        if self.mix is not None:
            check_number("mix", self.mix, 0.0, 1.0)
        if not isinstance(self.features, FeatureSpec):
            raise TypeError(f"features: expected a FeatureSpec, got {shown(self.features)}")
        method, position = ("SPRINTER", "predicting") if self.mix is None else ("SpecDec++", "token")
        if (self.features.model, self.features.position) != ("draft", position):
            wanted = "that predicts a token" if self.mix is None else "that encodes a token"
            raise ValueError(f"a {method} head reads the draft's state {wanted}, not the {self.features}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of rows for each prompt."""
        return KINDS if self.mix is None else (REPLACED,)


@dataclass(frozen=True)
class _StrictWithStates(Strict):
    """Strict acceptance that makes drafts record their hidden states (`Draft.hidden`)."""

    spec: FeatureSpec = FeatureSpec()

    @property
    def features(self) -> FeatureSpec:  # type: ignore[override]
        return self.spec


class CollectRunner(Runner):
    """Decodes in rounds of one drafted token, each recorded whatever the rows continue with."""

    shares = False  # the draft may be ahead of the target for several rounds here

    def __init__(
        self,
        draft: DraftModel,
        settings: CollectSettings,
        forced: Sequence[list[int] | None],
        progress: Callable[[int], None] = lambda positions: None,
    ):
        """`forced[b]`: the continuation of row b; None if the models write it. `progress`: called with the positions done."""
        super().__init__(LossyPolicy(_StrictWithStates(settings.features), Constant(1)), draft)
        self.wanted, self.forced, self.progress = settings, forced, progress
        self.records: list[tuple] = []  # (row, position, token, p, q, distance)
        self.features: list[list[float]] = []  # of each record, (H,)

    def decode(self, call: Call) -> SpeculationStats:
        rows, drafter = call.rows, call.drafter
        refuse_unknown(call.processing.processors, "collecting needs functions of the text: leave it out")
        if isinstance(drafter, HiddenStateRun):
            drafter.hold_back(self.wanted.places)
        kinds = [self.wanted.kinds[row % len(self.wanted.kinds)] for row in rows.row_id_list]
        positions = 0
        while rows.unfinished:
            draft = drafter.propose(rows, [0 if finished else 1 for finished in rows.finished], call.randomness)
            assert draft.hidden is not None, "the rule asks for them"
            last, counts = rows.uncached_tokens(call.target.lengths)
            raw = call.target.feed(last, counts, keep=1).to(device=rows.ids.device, dtype=torch.float32)
            scores = call.processing(rows.shown_ids, rows.lengths, raw, rows.row_id_list)
            # Nothing reads the position after the drafted token.
            verified = Verified(Selection(draft, draft.lengths), scores.expand(-1, 2, -1))
            following = self._judge(call, verified, draft.hidden[:, 0].float().tolist())
            tokens = [following[kind][b] for b, kind in enumerate(kinds)]
            rows.write(torch.tensor(tokens, device=rows.ids.device)[:, None])
            for b, token in enumerate(tokens):
                if not rows.finished[b]:
                    rows.commit(b, [token], verified.logits[b])
            call.target.rollback(rows.cached_lengths())
            drafter.learn(rows, verified, [0] * len(tokens))
            positions += 1
            self.progress(positions)
        return SpeculationStats([RowStats() for _ in rows.row_id_list], 1, True)

    def _judge(self, call: Call, verified: Verified, features: list[list[float]]) -> dict[str, list[int]]:
        """Record each row's drafted token, and return the tokens that rows of each kind continue with."""
        rows = call.rows
        x, p_x, q_x, distance = compute_acceptance(verified)
        fits = label_acceptable(p_x, q_x, self.wanted.lam)
        verdict = accept(RuleRun(Strict()), verified, call.randomness)
        corrected = torch.where(fits | (verdict.accepted == 1), x, verdict.token)
        drawn = draw(verified.p[:, 0]) if verified.sampling else verified.argmax[:, 0]
        following = {"draft": x.tolist(), "target": drawn.tolist(), "mixed": corrected.tolist()}
        if self.wanted.mix is not None:
            replaced = torch.rand(x.shape, dtype=torch.float32, device=x.device) < self.wanted.mix
            following[REPLACED] = torch.where(replaced, drawn, x).tolist()
        following["original"] = [0] * len(features)
        table = zip(x.tolist(), p_x.tolist(), q_x.tolist(), distance.tolist(), strict=True)
        for b, record in enumerate(table):
            if rows.finished[b]:
                continue
            row, position = rows.row_id_list[b], rows.lengths[b] - rows.prompt_lengths[b]
            if record[-1] != record[-1]:  # NaN: one of the two distributions is invalid
                raise ValueError(
                    f"the target or the draft gave NaN or infinite logits in row {row}, after {position} new tokens"
                )
            self.records.append((row, position, *record))
            self.features.append(features[b])
            ending = self.forced[row]
            if position + 1 == self.wanted.new_tokens or (ending is not None and position >= len(ending)):
                rows.finished[b] = True
            elif ending is not None:
                following["original"][b] = ending[position]
        return following


def compute_acceptance(verified: Verified) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first drafted token x, p(x), q(x) and d_TV(p, q) at its position, each (B,), for decoding's distributions.

    In greedy decoding q(x) = 1, and p(x) is 1 or 0.
    """
    x = verified.tokens[:, 0]
    if verified.q is None:
        same = (x == verified.argmax[:, 0]).float()
        return x, same, torch.ones_like(same), 1.0 - same
    p, q, index = verified.p[:, 0], verified.q[:, 0], x[:, None]  # (B, V)
    return x, p.gather(1, index)[:, 0], q.gather(1, index)[:, 0], (p - q).abs().sum(dim=1) / 2
