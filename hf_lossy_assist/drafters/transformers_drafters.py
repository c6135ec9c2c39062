"""Candidate generators of Transformers that read the target's states, as drafters at batch 1: MTP layers of the checkpoint, and DFlash."""

import copy
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TypeAlias

import torch
import transformers
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator, candidate_generator

from ..batch.processor_kinds import only_functions
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.hidden_state_hook import NORMED, HiddenStateHook
from ..models.introspection import base_of, blocks_of, vocabulary_of
from ..registry import register_drafter
from ..round import Draft, Verified
from ..validation import one_line, shown
from .base import DraftContext, Drafter, DrafterRun, certain_draft


# Earlier releases pass a DFlash model the inputs of the layers that its config names, not their outputs.
DFLASH_SINCE, VERSION = (5, 23), tuple(int(part) for part in transformers.__version__.split(".")[:2])


@dataclass(frozen=True, eq=False)
class MTPDrafter(Drafter):
    """Draft with the multi-token prediction layers in the target's checkpoint, through Transformers' `MTPCandidateGenerator`; one row at a time.

    Each layer drafts one token. Same as `generate(use_mtp=True, lossy_policy=…)`. The layers are read from the checkpoint once for each target.
    """

    def start(self, context: DraftContext) -> "TransformersStatesRun":
        _one_row(context, "MTP")
        base = base_of(context.target)
        if not getattr(base.config.get_text_config(decoder=True), "num_mtp_layers", None):
            raise ValueError(
                f"{type(base).__name__} has no multi-token prediction layers (num_mtp_layers in its config): pass assistant_model=… in place of MTP"
            )
        generator = copy.copy(_mtp_of(base))
        generator.mtp_cache = copy.deepcopy(generator.mtp_cache)  # it is empty
        generator.do_sample = context.sampling
        generator.logits_processor = only_functions(context.processing.processors)
        return TransformersStatesRun(generator, context, {-1: _last(base)}, generator.num_mtp_layers)


@dataclass(frozen=True, eq=False)
class TransformersDFlashDrafter(Drafter):
    """Draft with a DFlash model of Transformers (`muse_glimmer_assistant`, …) through its `DFlashTokenCandidateGenerator`; one row at a time.

    Same as `generate(assistant_model=model, speculation_type="dflash", lossy_policy=…)`. Args: model: the loaded draft model.
    """

    model: PreTrainedModel

    def __post_init__(self) -> None:
        needed, config = ("target_layer_ids", "block_size", "mask_token_id"), getattr(self.model, "config", None)
        missing = [name for name in needed if not hasattr(config, name)]
        if missing:
            raise TypeError(
                f'speculation_type="dflash": expected a DFlash draft model, got {shown(self.model)}, whose config has no {missing[0]}: load a '
                "drafter's files with hf_lossy_assist.load_drafter, or leave speculation_type out"
            )

    def start(self, context: DraftContext) -> "TransformersStatesRun":
        if VERSION < DFLASH_SINCE:
            raise ValueError(
                f"a DFlash model of Transformers' is handed other states by Transformers {transformers.__version__} than it was trained on: "
                "install 5.23 or newer, or load a drafter's files with hf_lossy_assist.load_drafter"
            )
        _one_row(context, "DFlash through Transformers")
        base, config = base_of(context.target), self.model.config
        blocks = len(blocks_of(base) or ())
        layers = {layer + 1: layer + 1 for layer in config.target_layer_ids}
        if blocks in layers:
            layers[blocks] = _last(base)
        table, size = base.get_input_embeddings().weight, vocabulary_of(base)
        if config.mask_token_id >= size:
            raise ValueError(
                f"the DFlash model's mask token {config.mask_token_id} is outside of the target's vocabulary of {size}: it is another target's"
            )
        if config.hidden_size != table.shape[1]:
            raise ValueError(
                f"the DFlash model reads embeddings of {config.hidden_size} numbers, and the target's have {table.shape[1]}: it is another target's"
            )
        if self.model.dtype != table.dtype:
            raise ValueError(
                f"the DFlash model is in {self.model.dtype} and the target in {table.dtype}: load both in one precision"
            )
        generator = _of_transformers("DFlashTokenCandidateGenerator")(
            assistant_model=self.model,
            main_model_input_embeddings=base.get_input_embeddings(),
            main_model_output_embeddings=base.get_output_embeddings(),
            logits_processor=only_functions(context.processing.processors),
            generation_config=GenerationConfig(do_sample=context.sampling, max_length=context.rows.max_length),
        )
        return TransformersStatesRun(generator, context, layers)


class TransformersStatesRun(DrafterRun):
    """A Transformers generator during one call, which gets the target's states of the tokens committed since its last draft."""

    reads_target = True
    why_eager = "what drafts is a generator of Transformers'"

    def __init__(self, generator: CandidateGenerator, context: DraftContext, layers: dict[int, int], least: int = 1):
        """`layers`: maps the index under which the generator looks for states to their layer, numbered as in `HiddenStateHook`.

        `least`: tokens whose states it needs at first; Transformers' MTP rolls back as many as it has layers, whether they exist or not.
        """
        self.generator, self.vocabulary = generator, context.vocabulary
        self.sampling, self.clock = context.sampling, context.clock
        self.hook, self.indices = HiddenStateHook(context.target, list(layers.values())), list(layers)
        compiled = context.compiled_target
        self.compiled = compiled if compiled is not None and compiled.keep_states(self.hook.layers) else None
        # Tokens whose states are unknown: to the generator the text begins after them.
        self.begin = context.held[0] if context.held else 0
        self.least, self.known = least, self.begin  # tokens whose states the target has provided
        # States not yet passed to the generator, (1, n, layers · H) each.
        self.new: list[torch.Tensor] = []

    @property
    def taps(self) -> Sequence[HiddenStateHook]:
        return [self.hook] if self.compiled is None else []

    def prompts_are_read(self, rows: Rows) -> None:
        self._collect(rows)

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        self._collect(rows)
        if not self.new or not limits[0] or self.known - self.begin < self.least:
            return certain_draft([[]], rows, limits, self.sampling)
        text = rows.token_ids()[0][None]
        with self.clock.time("draft"), randomness.everywhere(rows.row_id_list[0], text.device):
            candidates, logits = self._candidates(text)
        tokens = candidates[:, text.shape[1] :][:, : limits[0]].to(rows.ids.device)
        gamma = tokens.shape[1]
        probs = None
        if self.sampling and logits is not None and gamma:
            logits = logits[:, :gamma, : self.vocabulary].to(device=rows.ids.device, dtype=torch.float32)
            probs = logits.softmax(dim=-1)
        lengths = torch.tensor([gamma], device=rows.ids.device)
        return Draft(tokens, lengths, rows.row_ids, max(limits), self.sampling, probs)

    def _candidates(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        states = torch.cat(self.new, dim=1)
        parts = dict(zip(self.indices, states.chunk(len(self.indices), dim=-1), strict=True))
        self.new = []
        places = torch.arange(self.begin, text.shape[1], device=text.device)[None]
        found, logits = self.generator.get_candidates(
            text[:, self.begin :],
            model_kwargs={"position_ids": places, "attention_mask": torch.ones_like(places)},
            model_outputs=SimpleNamespace(hidden_states=parts),
            is_first_iteration=False,
            n_last_matches=states.shape[1] - 1,
        )
        return torch.cat([text[:, : self.begin], found], dim=1), logits

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        self._collect(rows)

    def _collect(self, rows: Rows) -> None:
        states, held = (self.compiled or self.hook).take_states(), rows.cached_lengths()[0]
        if states is not None and held > self.known:
            self.new.append(states[:, : held - self.known])
            self.known = held


def _one_row(context: DraftContext, what: str) -> None:
    rows = len(context.rows.row_id_list)
    if rows > 1:
        raise ValueError(f"{what} drafts for one row at a time; this batch has {rows}: pass prompts one by one")


def _last(base: PreTrainedModel) -> int:
    """Return the layer that Transformers returns as `hidden_states[-1]`: the head's input, except for models whose config says otherwise."""
    tied = getattr(base.config.get_text_config(decoder=True), "tie_last_hidden_states", None)
    return len(blocks_of(base) or ()) if tied is False else NORMED


def _of_transformers(name: str) -> type[CandidateGenerator]:
    found = getattr(candidate_generator, name, None)
    if found is None:
        raise ValueError(f"Transformers {transformers.__version__} has no {name}: install a newer one")
    return found


Place: TypeAlias = tuple[torch.device, torch.dtype]
# By target: the device and dtype of its weights, and the generator in its state before a call, for which a checkpoint is read.
_generators: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Place, CandidateGenerator]]" = (
    weakref.WeakKeyDictionary()
)
_LOADING = threading.Lock()


def _mtp_of(base: PreTrainedModel) -> CandidateGenerator:
    """Return a target's generator in its state before a call, with its layers loaded. Raises: `ValueError`, one line, if that fails."""
    weight = base.get_input_embeddings().weight
    key = weight.device, weight.dtype
    with _LOADING:
        if base not in _generators or _generators[base][0] != key:
            make = _of_transformers("MTPCandidateGenerator")
            try:
                made = make(main_model=base, generation_config=GenerationConfig(), model_kwargs={})
            except (OSError, KeyError, RuntimeError, SafetensorError) as error:
                raise ValueError(
                    f"the MTP layers of {shown(base.config.name_or_path)} cannot be read ({one_line(error, 200)}): pass assistant_model=… in "
                    "place of MTP"
                ) from error
            of_target = set(map(id, base.parameters()))
            # They are loaded in the config's precision, which is not that of a target cast to another.
            for parameter in made.mtp_model.parameters():
                if parameter.is_floating_point() and id(parameter) not in of_target:
                    parameter.data = parameter.data.to(weight.dtype)
            _generators[base] = key, made
        return _generators[base][1]


register_drafter(
    "mtp",
    MTPDrafter,
    paper="2404.19737",
    summary="The multi-token prediction layers of the target's own checkpoint, through Transformers; one row at a time.",
)
