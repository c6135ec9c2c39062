"""The prompt that was read last, for the next ones may begin like it: few-shot examples, a system prompt."""

import torch

from ..engine.call import Call
from ..engine.joining import cached_models
from ..models.row_model import RowModel
from ..models.together import keeps_prompts


WORTH_COPYING = 32  # tokens that two prompts have in common


class ReadBefore:
    """Keys and values of one prompt, in caches of its own."""

    def __init__(self) -> None:
        self.ids: torch.Tensor | None = None  # (n,)
        self.models: list[RowModel] = []
        self.keeps = True

    def keep(self, call: Call) -> None:
        """Keep what the models of a call of one row have read, where it is the same behind any prompt that begins alike."""
        models = cached_models(call)
        if self.keeps and not call.drafter.reads_target and all(map(keeps_prompts, models)):
            self.ids, self.models = None, []  # which make room for the copies
            self.models = [model.copy() for model in models]
            self.ids = call.rows.ids[0, : call.rows.width].clone()

    def give(self, call: Call) -> bool:
        """Copy to the models of a call what its prompt begins with; whether there was any."""
        ids, models = call.rows.ids[0, : call.rows.width], cached_models(call)
        if self.ids is None or call.drafter.reads_target or not all(map(keeps_prompts, models)):
            return False
        both = min(len(ids), len(self.ids))
        differ = (ids[:both] != self.ids[:both]).nonzero()
        common = min(int(differ[0]) if len(differ) else both, len(ids) - 1)
        if common < WORTH_COPYING:
            return False
        for model, source in zip(models, self.models, strict=True):
            model.take(0, source, min(common, source.lengths[0]))
        return True

    def stop(self) -> None:
        """Give the memory back, and keep nothing any more."""
        self.ids, self.models, self.keeps = None, [], False
