"""The base classes of verify filters, with and without a companion model, and staged speculation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..artifacts.identity import ModelIdentity
from ..artifacts.loading import load_model
from ..models.introspection import base_of, vocabulary_of
from ..models.probe import why_not_rows
from ..registry.frozen import Frozen
from ..round import Draft, Selection, Verified
from ..rules import RuleRun, Strict, accept
from ..rules.acceptance import RandomSource
from ..validation import shown


@dataclass(frozen=True)
class VerifyFilter(Frozen, kind="filter"):
    """The base of verify filters, which choose after drafting how many tokens the target verifies. `VerifyAll` is neutral."""

    lossless: ClassVar[bool] = True
    # Whether dropping a token may depend on the token itself, not only on those before it. The correction is then re-weighted.
    depends_on_token: ClassVar[bool] = False
    joint: ClassVar[bool] = False  # weighs the rows of a batch against each other

    def companion_for(self, target: PreTrainedModel) -> PreTrainedModel | None:
        """Return the model whose distributions the filter reads; None: it reads none."""
        return None

    def check(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        longest: int = 0,
    ) -> None:
        """Raise an error for unsupported models, or for drafts of up to `longest` tokens."""

    def check_decoding(self, decoding: Mapping[str, object]) -> None:
        """Warn about unsupported sampling settings."""

    def reads_companion(self, rows: int) -> bool:
        """Return whether the companion runs in a batch of `rows` rows."""
        return False

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        """Select the drafted tokens to send to the target.

        Args:
            companion: distributions at each drafted position and the next, (B, γ + 1, V) float32; None: the companion did not run.
            randomness: for filters that draw tokens; independent of the round's other random numbers.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method select(draft, companion, randomness)")


class VerifyAll(VerifyFilter, name="all"):
    """Verify every drafted token."""

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        return Selection(draft, draft.lengths, sends_all=True, companion=companion)


class CompanionFilter(VerifyFilter):
    """The base of filters with a companion, which runs one forward over each drafted block.

    `companion` (`PreTrainedModel` or `str`): a causal model with the draft's vocabulary. A folder or a name on the Hub is loaded at the
    first call, in the target's dtype and on its device, from safetensors only and without remote code.
    """

    companion: PreTrainedModel

    def reads_companion(self, rows: int) -> bool:
        return True

    def companion_for(self, target: PreTrainedModel) -> PreTrainedModel | None:
        if not isinstance(self.companion, str):
            return self.companion
        if not self._loaded:
            self._loaded.append(load_model(self.companion, dtype=target.dtype).to(target.device).eval())
        return self._loaded[0]

    @cached_property
    def _loaded(self) -> list[PreTrainedModel]:
        return []

    def check(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        longest: int = 0,
    ) -> None:
        if draft is None:
            raise ValueError("a companion is compared with a draft model: pass assistant_model=…")
        companion = self.companion_for(base_of(target))
        if not isinstance(base_of(companion), PreTrainedModel):
            raise TypeError(f"companion: expected a Transformers model or the name of one, got {shown(companion)}")
        reason = why_not_rows(companion)
        if reason is not None:
            raise ValueError(f"a companion must run in batches, and this one does not: {reason}")
        identity = getattr(draft, "identity", None)  # set by a drafter that is not a model
        draft_size = identity.vocab_size if isinstance(identity, ModelIdentity) else vocabulary_of(draft)
        sizes = [draft_size, vocabulary_of(companion)]
        if abs(sizes[0] - sizes[1]) > 0.02 * max(sizes):  # vocabulary padding differs by less
            raise ValueError(
                f"the draft has {sizes[0]} token ids, the companion {sizes[1]}: both need the same tokenizer"
            )


class Staged(CompanionFilter, name="staged", paper="2308.04623", example={"companion": "folder or org/name"}):
    """Accept drafted tokens strictly against `companion`, and replace the first rejected one by the companion's correction.

    The remaining tokens follow the companion's distributions c, so the target verifies them with q = c. Whether a position remains depends
    only on the positions before it, so the output has the target's distribution. Neutral: the draft as companion. Spector & Ré, "Staged
    Speculative Decoding" (huggingface.co/papers/2308.04623), without the tree: a baseline of the SV paper.
    """

    companion: PreTrainedModel = field(repr=False)

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        gamma = draft.gamma
        if companion is None or gamma == 0:
            return Selection(draft, draft.lengths, companion=companion)
        inner = Verified(Selection(draft, draft.lengths), companion.log())
        verdict = accept(RuleRun(Strict()), inner, randomness)
        at, rejected = verdict.accepted, verdict.accepted < draft.lengths  # (B,) each
        slot = at.clamp(max=gamma - 1)[:, None]
        token = torch.where(rejected[:, None], verdict.token[:, None], draft.tokens.gather(1, slot))
        corrected = replace(draft, tokens=draft.tokens.scatter(1, slot, token), probs=companion[:, :gamma])
        replaced = torch.where(rejected, at, gamma)
        return Selection(corrected, torch.minimum(at + 1, draft.lengths), companion=companion, replaced=replaced)
