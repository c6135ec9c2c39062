"""One call after another with the same settings: what `generate` prepared for one prompt does for the next ones, but for what is a prompt's own."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria

from ..batch.logits_processing import Processing
from ..batch.processor_kinds import PREFIX_FREE
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..drafters.model import AssistantRun
from ..engine.call import Call
from ..engine.joining import cached_models
from ..models.row_model import RowModel
from ..models.together import joins
from ..stats.clock import Clock


SAME_FOR_ALL = (EosTokenCriteria, StopStringCriteria)  # they keep nothing, and do not know how long a prompt is


class Again:
    """Makes calls of one row like one that Transformers has prepared."""

    def __init__(self, call: Call, criteria: StoppingCriteriaList, new_tokens: int):
        """`call`: the one to be like, of which nothing is kept that its prompt fills. `criteria`: of all texts. `new_tokens`: the most of each."""
        self.call, self.criteria, self.new_tokens = call, criteria, new_tokens
        self.call = self(call.rows.ids[:, :1], [], torch.Generator())

    @classmethod
    def of(cls, call: Call, made: Sequence[object], given: object, new_tokens: int) -> "Again | None":
        """From a call that has read nothing yet; None where something in it goes by its prompt, or may do so for all that is known.

        `made`: the caller's criteria for this text alone; `given`: those for all texts, or what makes them. `new_tokens`: the most that were
        asked for.
        """
        rows, shared = (
            call.rows,
            [criterion for criterion in call.rows.criteria if not any(criterion is each for each in made)],
        )
        lengths = [criterion for criterion in shared if type(criterion) is MaxLengthCriteria]
        knows_no_prompt = (
            not call.compiled
            and call.drafter.is_plain_model
            and all(map(joins, cached_models(call)))
            and all(type(criterion) in (*SAME_FOR_ALL, MaxLengthCriteria) for criterion in shared)
            and not any(
                criterion is passed for criterion in lengths for passed in (given if isinstance(given, list) else ())
            )  # a total length
            and all(type(criterion) in PREFIX_FREE for criterion in call.processing.processors)
            and rows.token_types is None
            and not rows.has_holes
        )
        if not knows_no_prompt or not may_be_added(made):
            return None
        return cls(
            call,
            StoppingCriteriaList(criterion for criterion in shared if type(criterion) is not MaxLengthCriteria),
            new_tokens,
        )

    def __call__(self, prompt: torch.Tensor, made: Sequence[object], generator: torch.Generator) -> Call:
        """Return the call of a prompt, (1, n) int64 on the target's device. `made`: criteria of this text alone, such as `may_be_added` allows."""
        old = self.call
        assert isinstance(old.target, RowModel) and isinstance(old.drafter, AssistantRun)
        criteria = StoppingCriteriaList([*self.criteria, *made])
        rows = Rows(prompt, [0], criteria, prompt.shape[1] + self.new_tokens)
        processing, stop, clock = (
            Processing(old.processing.processors, 1),
            old.stop.settings.start(1),
            Clock(prompt.device),
        )
        if old.stop_context is not None:
            stop.pair(*old.stop_context)
        return replace(
            old,
            rows=rows,
            target=old.target.anew(rows.max_length),
            drafter=old.drafter.anew(rows.max_length, stop, processing, clock),
            companion=None if old.companion is None else old.companion.anew(rows.max_length),
            stop=stop,
            rule=old.policy.rule.start(rows.token_ids()),
            processing=processing,
            randomness=Randomness([generator]),
            clock=clock,
        )


def may_be_added(made: Sequence[object]) -> bool:
    """Whether these criteria can stand beside those of all texts: one of a class that Transformers puts there itself would take its place."""
    return all(type(criterion) is MaxLengthCriteria or not isinstance(criterion, SAME_FOR_ALL) for criterion in made)
