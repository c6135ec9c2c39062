"""Multi-token prediction layers of the target's checkpoint as a drafter at batch 1, through Transformers'
`MTPCandidateGenerator`."""

import copy
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator, candidate_generator

from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.hidden_state_hook import NORMED, HiddenStateHook
from ..models.introspection import base_of, blocks_of
from ..registry import register_drafter
from ..round import Draft, Verified
from ..validation import one_line, shown
from .base import DraftContext, Drafter, DrafterRun, certain_draft


@dataclass(frozen=True, eq=False)
class MTPDrafter(Drafter):
    """Draft with the multi-token prediction layers in the target's checkpoint; one row at a time.

    Each layer drafts one token. Same as `generate(use_mtp=True, lossy_policy=…)`. The layers are read from the
    checkpoint once for each target.
    """

    def start(self, context: DraftContext) -> "MTPRun":
        rows, base = len(context.rows.row_id_list), base_of(context.target)
        if rows > 1:
            raise ValueError(f"MTP drafts for one row at a time; this batch has {rows}: pass prompts one by one")
        if not getattr(base.config.get_text_config(decoder=True), "num_mtp_layers", None):
            raise ValueError(
                f"{type(base).__name__} has no multi-token prediction layers (num_mtp_layers in its config): pass "
                "assistant_model=… in place of MTP"
            )
        generator = copy.copy(_generator_of(base))
        generator.mtp_cache = copy.deepcopy(generator.mtp_cache)  # it is empty
        generator.do_sample = context.sampling
        generator.logits_processor = context.processing.functions
        return MTPRun(generator, context, base)


class MTPRun(DrafterRun):
    """The layers during one call; they get the target's states of the tokens committed since their last draft."""

    reads_target = True
    why_eager = "what drafts is a generator of Transformers'"

    def __init__(self, generator: CandidateGenerator, context: DraftContext, base: PreTrainedModel):
        self.generator, self.vocabulary = generator, context.vocabulary
        self.sampling, self.clock = context.sampling, context.clock
        # The layer that Transformers returns as `hidden_states[-1]`: the head's input, except for models whose config
        # says otherwise.
        tied = getattr(base.config.get_text_config(decoder=True), "tie_last_hidden_states", None)
        self.hook = HiddenStateHook(context.target, [len(blocks_of(base) or ()) if tied is False else NORMED])
        compiled = context.compiled_target
        self.compiled = compiled if compiled is not None and compiled.keep_states(self.hook.layers) else None
        # Tokens whose states are unknown: to the generator the text begins after them.
        self.begin = context.cached[0] if context.cached else 0
        self.known = self.begin  # tokens whose states the target has provided
        self.new: list[torch.Tensor] = []  # states not yet passed to the generator, (1, n, H) each

    @property
    def taps(self) -> Sequence[HiddenStateHook]:
        return [self.hook] if self.compiled is None else []

    def prompts_are_read(self, rows: Rows) -> None:
        self._collect(rows)

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        self._collect(rows)
        # Transformers rolls back as many tokens as there are layers, whether they exist or not.
        if not self.new or not limits[0] or self.known - self.begin < self.generator.num_mtp_layers:
            return certain_draft([[]], rows, limits, self.sampling)
        text, states = rows.token_ids()[0][None, self.begin :], torch.cat(self.new, dim=1)
        self.new = []
        positions = torch.arange(self.begin, self.begin + text.shape[1], device=text.device)[None]
        with self.clock.time("draft"), randomness.everywhere(rows.row_id_list[0], text.device):
            candidates, logits = self.generator.get_candidates(
                text,
                model_kwargs={"position_ids": positions, "attention_mask": torch.ones_like(positions)},
                model_outputs=SimpleNamespace(hidden_states={-1: states}),
                is_first_iteration=False,
                n_last_matches=states.shape[1] - 1,
            )
        tokens = candidates[:, text.shape[1] :][:, : limits[0]].to(rows.ids.device)
        gamma, probs = tokens.shape[1], None
        if self.sampling and logits is not None and gamma:
            logits = logits[:, :gamma, : self.vocabulary].to(device=rows.ids.device, dtype=torch.float32)
            probs = logits.softmax(dim=-1)
        lengths = torch.tensor([gamma], device=rows.ids.device)
        return Draft(tokens, lengths, rows.row_ids, max(limits), self.sampling, probs)

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        self._collect(rows)

    def _collect(self, rows: Rows) -> None:
        states, cached = (self.compiled or self.hook).take_states(), rows.cached_lengths()[0]
        if states is not None and cached > self.known:
            self.new.append(states[:, : cached - self.known])
            self.known = cached


# By target: the device and dtype of its weights, and the generator in its state before a call, for which a checkpoint
# is read.
_generators = weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple[torch.device, torch.dtype], CandidateGenerator]]()
_LOADING = threading.Lock()


def _generator_of(base: PreTrainedModel) -> CandidateGenerator:
    """Return a target's generator in its state before a call, with its layers loaded.
    Raises: `ValueError`, one line, if that fails."""
    weight = base.get_input_embeddings().weight
    key = weight.device, weight.dtype
    with _LOADING:
        if base not in _generators or _generators[base][0] != key:
            make = getattr(candidate_generator, "MTPCandidateGenerator", None)
            if make is None:
                raise ValueError("this Transformers has no MTPCandidateGenerator: install a newer one")
            try:
                generator = make(main_model=base, generation_config=GenerationConfig(), model_kwargs={})
            except (OSError, KeyError, RuntimeError, SafetensorError) as error:
                raise ValueError(
                    f"the MTP layers of {shown(base.config.name_or_path)} cannot be read ({one_line(error, 200)}): "
                    "pass assistant_model=… in place of MTP"
                ) from error
            of_target = set(map(id, base.parameters()))
            # They are loaded in the config's precision, which is not that of a target cast to another.
            for parameter in generator.mtp_model.parameters():
                if parameter.is_floating_point() and id(parameter) not in of_target:
                    parameter.data = parameter.data.to(weight.dtype)
            _generators[base] = key, generator
        return _generators[base][1]


register_drafter(
    "mtp",
    MTPDrafter,
    paper="2404.19737",
    summary="The multi-token prediction layers of the target's own checkpoint, through Transformers; one row at a "
    "time.",
)
