"""`Runner`: a policy and a draft as the decoding loop that Transformers' `generate` calls after its preparation."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ..artifacts.conditions import read_sampling
from ..artifacts.features import FeatureTap
from ..artifacts.identity import same_ids
from ..batch.callers_code import begun
from ..batch.logits_processing import Processing
from ..batch.randomness import Randomness, check_generator
from ..batch.rows import Rows
from ..batch.suffix_memory import Hints
from ..drafters.base import DraftContext, Drafter, as_drafter, split_assistant_and_drafter
from ..engine.call import Call, PositionLimits
from ..engine.loop import decode
from ..models.cached_model import TargetModel
from ..models.compiled.compilation import COMPILE_SETTINGS, Compilation
from ..models.compiled.static_model import StaticRowModel
from ..models.distributed import (
    RankGroup,
    TensorParallelGroup,
    check_same_call,
    find_ranks,
    propagate_errors,
    refuse_spread,
    run_on_follower,
    run_on_leader,
)
from ..models.facts import CACHE
from ..models.introspection import base_of, device_of, has_fixed_rows, is_one_of_several, looking_once, vocabulary_of
from ..models.multimodal import EMBEDDINGS, is_multimodal
from ..policy.parse import as_policy
from ..stats.clock import Clock
from ..stats.speculation import SpeculationStats
from ..stops import DraftStop
from ..validation import check_int, shown
from .arguments import LABELS, Settings, refuse_modes, refuse_types
from .draft_settings import DRAFT_SETTINGS, DraftInputs, choose_draft, choose_stop, make_cost_key, with_search
from .model_checks import check_draft, refuse_models, warn_of_doubts, warn_of_models
from .model_factory import PreparedInputs, make_row_model, make_target, start_drafter
from .output import ReportInRows, make_output
from .prefill import call_context, checkpointing_disabled, read_prompts
from .prompt_layout import PromptLayout, attach_prompt


def cuts_outputs(model: PreTrainedModel) -> bool:
    """Return True for Whisper, whose `generate` makes a call per segment and splits the output's fields into rows."""
    return hasattr(type(model), "_postprocess_outputs")


def padding_id(config: GenerationConfig) -> int:
    """Return the padding token of a config that `generate` prepared."""
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


@dataclass(frozen=True)
class CheckedCall:
    """The parts of a call that are validated before its prompts.

    Args:
        draft, stop: what drafts, and when a draft ends.
        compilation: of the rounds; None: they run eagerly.
        ranks: the processes that share the target or its forwards; None: the target is whole.
        cache_name: the argument by which the caller passed a cache, or None.
        inputs: the arguments of `generate`, by name; None: the call came through `custom_generate`.
    """

    draft: DraftInputs
    stop: DraftStop
    compilation: Compilation | None
    ranks: RankGroup | None = None
    cache_name: str | None = None
    inputs: Mapping[str, object] | None = None


class Runner:
    """A policy and a draft as a `custom_generate=` callable: `model.generate(**inputs, custom_generate=Runner("svip",
    draft))`.

    `generate` passes no `assistant_model`, `streamer`, `tokenizer` or `assistant_tokenizer` on: pass them here.

    Args:
        policy: any value of `lossy_policy=`.
        assistant (`PreTrainedModel` or `Drafter`, *optional*): the draft model, or a drafter.
        streamer, tokenizer, assistant_tokenizer: as in `generate`.
        settings (`dict`, *optional*): `num_assistant_tokens`, `num_assistant_tokens_schedule`,
            `assistant_confidence_threshold`, `cache_implementation`, `compile_config`, `disable_compile`.
        generator: of random numbers: one, or one for each row of the call; by default torch's global one.
        drafter: a `Drafter`, its name or JSON form, to draft instead of the assistant alone.
        cache_given: the caller passes a cache, which must be filled even if it is still empty.
    """

    # A draft made of the target's first blocks uses the target's cache.
    shares = True
    hints: Hints | None = None  # documents that the texts will copy
    yields = False  # Transformers' `generate` takes over what is refused before the first token

    def __init__(
        self,
        policy: object,
        assistant: PreTrainedModel | None = None,
        *,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        settings: dict[str, object] | None = None,
        cache_given: bool = False,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        drafter: Drafter | str | Mapping[str, object] | None = None,
    ):
        self.policy, self.streamer = as_policy(policy), streamer
        assistant, drafter = split_assistant_and_drafter(assistant, drafter)
        # As in Transformers, torch.compile(model).generate runs the wrapped model; likewise for a draft.
        self.assistant = getattr(assistant, "_orig_mod", assistant)
        self.tokenizer, self.assistant_tokenizer = tokenizer, assistant_tokenizer
        names = (*DRAFT_SETTINGS, *COMPILE_SETTINGS)
        if settings is not None and not (isinstance(settings, dict) and settings.keys() <= set(names)):
            raise TypeError(f"Runner: settings: expected a dict of {', '.join(names)}, got {shown(settings)}")
        self.settings = {name: value for name, value in (settings or {}).items() if value is not None}
        self.cache_name: str | None = CACHE if cache_given else None
        self.generator, self.drafter = check_generator(generator), as_drafter(drafter)
        # For the single call that `enable` makes; None: check each call.
        self.checked: CheckedCall | None = None
        self.called = self.begun = False  # `begun`: the first round, too
        self.reports: list[SpeculationStats] = []  # of the call that `enable` makes, and of calls split into rows

    def validate(self, model: PreTrainedModel, settings: Settings | None = None, **facts: Any) -> CheckedCall:
        """Validate models and settings. Raises: `TypeError` or `ValueError`, one line.

        Args:
            settings: the call's; None: the runner's, completed by the model's generation config.
            facts: other fields of `CheckedCall`.
        """
        settings = settings or Settings(self.settings, model.generation_config, model.generation_config)
        assistant, drafter = choose_draft(model, self.assistant, self.drafter, settings)
        drafter = drafter if self.hints is None else with_search(drafter, assistant)
        refuse_models(model, assistant)
        if is_one_of_several():
            refuse_spread("assistant", assistant)
        both = self.tokenizer, self.assistant_tokenizer
        draft = DraftInputs(assistant, drafter, *both, None not in both and not same_ids(*both))
        check_draft(model, draft, self.policy)
        stop = choose_stop(self.policy, draft, settings)
        if type(stop.longest) is not int or stop.longest < 1:  # another package's
            check_int(f"{type(stop).__name__}.longest", stop.longest, 1)
        drafts = drafter.main if drafter is not None and drafter.gives_probs and not drafter.takes_assistant else None
        self.policy.check(model, drafts if assistant is None else assistant, self.tokenizer, stop.longest)
        wanted = {name: settings[name] for name in COMPILE_SETTINGS if settings[name] is not None}
        compilation = Compilation.requested(**wanted) if wanted else None
        return CheckedCall(draft, stop, compilation, **facts)

    def check_decoding(
        self, draft: DraftInputs, model: PreTrainedModel, config: GenerationConfig, new_tokens: int
    ) -> None:
        """Check the prepared config and warn about it, in every call: Whisper's config changes between calls."""
        if self.checked is None:
            refuse_modes(Settings({}, config, model.generation_config))
        warn_of_models(model, draft.assistant)
        self.policy.rule.check_mode(bool(config.do_sample))
        self.policy.filter.check_decoding(read_sampling(config))
        drafts = main if hasattr(main := getattr(draft.drafter, "main", None), "identity") else None
        models = {"target": model, "draft": draft.assistant if draft.drafter is None else drafts}
        warn_of_doubts(self.policy, models, config, new_tokens)

    # -- the call -----------------------------------------------------------------------------------------------------

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: torch.Tensor | None = None,
        num_assistant_tokens: object = None,
        num_assistant_tokens_schedule: object = None,
        assistant_confidence_threshold: object = None,
        **model_kwargs: Any,
    ) -> object:
        """Decode; called by `generate` after its preparation, which returns the result.

        The draft settings are named parameters, so that `generate` passes them on as given and not among its defaults.
        """
        self.called = True
        model_kwargs.pop(LABELS, None)
        model_kwargs["use_cache"] = True
        ranks = None if self.checked is None else self.checked.ranks
        if self.checked is None and is_one_of_several():
            ranks = find_ranks(model, None)
        with nullcontext() if ranks is None else propagate_errors(ranks), looking_once(model, self.assistant):
            checked = self.checked
            if checked is None:  # the call does not come through `enable`
                values = num_assistant_tokens, num_assistant_tokens_schedule, assistant_confidence_threshold
                at_call = {
                    name: value for name, value in zip(DRAFT_SETTINGS, values, strict=True) if value is not None
                }
                settings = Settings(self.settings | at_call, generation_config, model.generation_config)
                checked = self.validate(model, settings, ranks=ranks, cache_name=self.cache_name)
            new_tokens = generation_config.max_length - input_ids.shape[1]
            self.check_decoding(checked.draft, model, generation_config, new_tokens)
            layout = PromptLayout.of(model, input_ids, model_kwargs, generation_config)
            rows = layout.rows(stopping_criteria, generation_config.max_length, padding_id(generation_config))
            rows.memories = {} if self.hints is None else dict.fromkeys(rows.row_id_list, (self.hints,))
            if processors := layout.processors(model, logits_processor):
                processors = begun(processors, input_ids.shape[1], model, self.tokenizer)
            processing = Processing(processors, len(rows.row_id_list), bool(generation_config.do_sample), rows.unseen)
            processing.refuse_callers(self.policy.rule, self.yields)
            return self._run(
                checked, model, rows, processing, input_ids, generation_config, inputs_tensor, layout.inputs
            )

    def _run(
        self,
        checked: CheckedCall,
        model: PreTrainedModel,
        rows: Rows,
        processing: Processing,
        input_ids: torch.Tensor,
        config: GenerationConfig,
        inputs_tensor: torch.Tensor | None,
        model_kwargs: dict[str, Any],
    ) -> object:
        """Put the target on a cache for these rows and decode; on other ranks than the first, follow."""
        ranks = checked.ranks
        if not model.config.is_encoder_decoder:
            if is_multimodal(model) or EMBEDDINGS in model_kwargs:
                attach_prompt(model, rows, model_kwargs, checked.inputs)
            if rows.multimodal is None:
                refuse_types(model, model_kwargs.get("token_type_ids"))
        if ranks is not None:
            prompts = rows.ids[:, : rows.width].tolist(), rows.pads
            check_same_call(ranks, prompts, rows.max_length, str(self.policy))
        target = make_target(model, rows, model_kwargs, checked.compilation, checked.cache_name, ranks)
        if isinstance(ranks, TensorParallelGroup) and not ranks.leads:
            with torch.no_grad(), checkpointing_disabled(model, None):
                out = run_on_follower(target, ranks)
            if self.streamer is not None:
                self.streamer.end()
            return out

        def run() -> object:
            call = self._make_call(checked, model, target, rows, processing, config, inputs_tensor, model_kwargs)
            return self.finish(call, model, input_ids, config)

        return run() if ranks is None else run_on_leader(target, run)

    def _make_call(
        self,
        checked: CheckedCall,
        model: PreTrainedModel,
        target: TargetModel,
        rows: Rows,
        processing: Processing,
        config: GenerationConfig,
        inputs_tensor: torch.Tensor | None,
        model_kwargs: dict[str, Any],
    ) -> Call:
        """Start stop, filter, drafter and rule for these rows."""
        draft, sampling, rule, device = checked.draft, bool(config.do_sample), self.policy.rule, rows.ids.device
        for name, head in self.policy.heads().items():  # not in inference mode, which would make it untrainable
            on_draft = name.startswith("stop") and draft.assistant is not None
            head.to(device_of(draft.assistant) if on_draft else device)
        compiles = checked.compilation is not None
        key = make_cost_key(self.policy, draft.drafter, config, device, model.dtype, compiles)
        cost_key = key, type(checked.stop).__name__, checked.stop.longest
        stop = checked.stop.start(len(rows.row_id_list))
        pair = None if draft.assistant is None else (model, draft.assistant, key)
        if pair is not None:
            stop.pair(*pair)
        companion = self.policy.filter.companion_for(base_of(model))
        if is_one_of_several():
            refuse_spread("companion", companion)
        clock, vocabulary, spec = Clock(device), vocabulary_of(model), rule.features
        reads_probs = companion is not None or rule.needs_draft_probs
        context = DraftContext(
            model, rows, stop, processing, vocabulary, sampling, clock, target.lengths[:], spec, reads_probs
        )
        compiled = target if isinstance(target, StaticRowModel) else None
        context = replace(context, compiled_target=compiled, cost_key=cost_key)
        shared = target if self.shares else None
        inputs = PreparedInputs(context, inputs_tensor, model_kwargs, checked.compilation, shared)
        drafter = start_drafter(draft, inputs)
        same_ids_draft = draft.assistant if drafter.gives_probs else None  # position tables count the target's ids
        models = [member for member in (model, draft.assistant, companion) if member is not None]
        outputs = config.return_dict_in_generate
        rows.keeps_scores = bool(outputs and config.output_scores)
        return Call(
            rows=rows,
            target=target,
            drafter=drafter,
            stop=stop,
            rule=rule.start(rows.token_ids()),
            policy=self.policy,
            processing=processing,
            randomness=Randomness(self.generator, len(rows.row_id_list)),
            clock=clock,
            positions=PositionLimits(
                base_of(model), base_of(same_ids_draft), companion, shortest=1 + min(rows.cached_lengths())
            ),
            vocabulary=vocabulary,
            sampling=sampling,
            stop_context=pair,
            companion=None if companion is None else make_row_model(companion, model, rows, vocabulary),
            rule_tap=FeatureTap(model, spec) if spec is not None and spec.reads("target") else None,
            streamer=self.streamer,
            compiled=compiles,
            fixed_rows=len(rows.row_id_list) > 1 and any(map(has_fixed_rows, models)),
            keep_scores=rows.keeps_scores,
            keep_logits=bool(outputs and config.output_logits),
        )

    def finish(self, call: Call, model: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig) -> object:
        """Decode a prepared call; return the output of `generate`."""
        with call:
            with call_context(call, model):
                read_prompts(call, config.prefill_chunk_size)
                self.begun = True
                stats = self.decode(call)
            self.reports += [stats] if self.checked is not None or cuts_outputs(model) else []
            sequences = call.rows.sequences(input_ids, padding_id(config))
            if self.streamer is not None:
                self.streamer.end()
            cache, shows = None, config.return_dict_in_generate and config.use_cache is not False
            if shows or getattr(call.target, "passed", None) is not None:
                most = max([len(input_ids), *(len(stats.rows) for stats in self.reports)])
                cache = call.target.export(most, call.rows.mask)
            if not config.return_dict_in_generate:
                return sequences
            report = ReportInRows(stats) if cuts_outputs(model) else stats
            return make_output(call, model, sequences, sequences.shape[1] - input_ids.shape[1], cache, report)

    def decode(self, call: Call) -> SpeculationStats:
        """Run the rounds; subclasses may override it."""
        return decode(call)
