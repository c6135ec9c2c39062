"""`Runner`: a policy and a draft as the decoding loop that Transformers' `generate` calls with everything prepared."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..artifacts.conditions import read_sampling
from ..artifacts.features import FeatureTap
from ..batch.positions import Positions
from ..batch.processing import Processing
from ..batch.randomness import Randomness, check_generator
from ..batch.rows import Rows
from ..drafters.base import DraftContext, Drafter, apart, as_drafter
from ..engine.call import Call
from ..engine.loop import decode
from ..models.compat import CACHE
from ..models.identity import same_ids
from ..models.in_step import Steps
from ..models.introspection import base_of, device_of, has_fixed_rows, vocabulary_of
from ..models.led import Ranks
from ..models.probe import refuse_by_length
from ..policy.parse import as_policy
from ..stats.clock import Clock
from ..stats.speculation import SpeculationStats
from ..stops import DraftStop
from ..validation import check_int, shown
from .asked import Asked
from .certified import warn_of_doubts
from .compiling import COMPILED, Compiling
from .draft_checks import refuse_draft, refuse_missing
from .draft_stop import DRAFT_SETTINGS, draft_stop
from .drafting import CANDIDATES, DraftWith, Prepared, start_drafter
from .inputs import hidden, mask_name, rowwise
from .kinds import kind_of
from .modes import in_the_right_mode, read_prompts
from .output import cuts_outputs, output_of, padding_of
from .pairs import refuse_helpers, refuse_models, warn_of_models
from .sight import show
from .spread import agree, among_ranks, followed, led, refuse_spread
from .target import target_of
from .unsupported import Settings, refuse_modes


class Runner:
    """A policy and a draft as `custom_generate=` callable: `model.generate(**inputs, custom_generate=Runner("svip", draft))`.

    `generate` hands its settings to a callable, but not its `assistant_model`, `streamer`, `tokenizer` and `assistant_tokenizer`, which
    are without effect there: they are arguments here.

    Args:
        policy: whatever `lossy_policy=` accepts.
        assistant (`PreTrainedModel` or `Drafter`, *optional*): the draft model, or a drafter in its place.
        streamer, tokenizer, assistant_tokenizer: what `generate` would be given.
        settings (`dict`, *optional*): `num_assistant_tokens`, `num_assistant_tokens_schedule`, `assistant_confidence_threshold`,
            `cache_implementation`, `compile_config`, `disable_compile`.
        generator: where random numbers come from: one generator, or one for each row of the call; by default torch's global one.
        drafter: what drafts, in place of the assistant alone: a `Drafter`, or its name or JSON form.
        cache_given: the caller passes a cache, which must be the cache that is filled, even if it is empty yet.
    """

    shares = True  # a draft of the target's first blocks drafts on the target's cache
    reads_wholly = False  # drafters on the target's states draft in the first round, too

    def __init__(
        self,
        policy: Any,
        assistant: Any = None,
        *,
        streamer: Any = None,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        settings: dict[str, Any] | None = None,
        cache_given: bool = False,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        drafter: Drafter | str | Mapping[str, Any] | None = None,
    ):
        self.policy, self.streamer = as_policy(policy), streamer
        assistant, drafter = apart(assistant, drafter)
        # As Transformers has it, torch.compile(model).generate runs the model inside, and so does a draft.
        self.assistant = getattr(assistant, "_orig_mod", assistant)
        self.tokenizer, self.assistant_tokenizer = tokenizer, assistant_tokenizer
        known = (*DRAFT_SETTINGS, *COMPILED)
        if settings is not None and not (isinstance(settings, dict) and settings.keys() <= set(known)):
            raise TypeError(f"Runner: settings: expected a dict of {', '.join(known)}, got {shown(settings)}")
        self.settings = dict(settings or {})
        self.given_as: str | None = CACHE if cache_given else None  # by which name the caller passes a cache
        self.compiling = Compiling.asked({name: self.settings.pop(name, None) for name in COMPILED})
        self.generator = check_generator(generator)
        self.drafter = as_drafter(drafter)
        self.generator_settings: dict[str, Any] = {}
        self.ranks: Ranks | Steps | None = None  # of the call's target
        self.reads_call, self.called = True, False  # reads_call False: `enable` has read the call's settings for it
        self.passed: Mapping[str, Any] | None = None  # what the caller passed to `generate`, where that is known
        self._other: bool | None = None
        self.reports: list[SpeculationStats] = []  # of calls whose outputs are cut into rows

    # -- what to draft with -------------------------------------------------------------------------------------------

    def _own(self) -> Asked:
        return Asked(self.settings, self.generator_settings)

    def validate(self, model: Any, asked: Asked | None = None) -> None:
        """Refuse draft models and settings that cannot work, in one line each. `asked`: a call's settings, else the runner's own."""
        asked = asked or self._own()
        refuse_by_length(model)
        refuse_models(model, self.assistant)
        refuse_spread("assistant", self.assistant)
        refuse_spread("early exit's target", model if asked.candidates.get("assistant_early_exit") else None)
        refuse_helpers(self.streamer, tokenizer=self.tokenizer, assistant_tokenizer=self.assistant_tokenizer)
        given = self._draft_with(asked)
        refuse_draft(model, given, self.policy)
        stop = self.draft_stop(asked)
        check_int(f"{type(stop).__name__}.longest", stop.longest, 1)
        refuse_missing(model, given, self.policy)
        drafts = (
            self.drafter if self.assistant is None and self.drafter is not None and self.drafter.gives_probs else None
        )
        self.policy.check(model, self.assistant if drafts is None else drafts, self.tokenizer, stop.longest)

    def _draft_with(self, asked: Asked) -> DraftWith:
        lookup, exit_ = (asked.candidates.get(name) for name in CANDIDATES)
        return DraftWith(
            self.assistant, self.drafter, lookup, exit_, self.other_tokenizer(), self.tokenizer, self.assistant_tokenizer
        )  # fmt: skip

    def other_tokenizer(self) -> bool:
        """True when both tokenizers were given and give other ids to the same tokens, or have other tokens."""
        if self.tokenizer is None or self.assistant_tokenizer is None:
            return False
        if self._other is None:
            self._other = not same_ids(self.tokenizer, self.assistant_tokenizer)
        return self._other

    def draft_stop(self, asked: Asked) -> DraftStop:
        """The stop of a call: the call's settings win, then the policy's stop, then the draft's generation config."""
        return draft_stop(
            self.policy, self.assistant, asked.settings, asked.candidates.get("prompt_lookup_num_tokens")
        )

    # -- the call -----------------------------------------------------------------------------------------------------

    @among_ranks
    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: torch.Tensor | None = None,
        num_assistant_tokens: Any = None,
        num_assistant_tokens_schedule: Any = None,
        assistant_confidence_threshold: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by `generate` with everything prepared; returns what `generate` returns.

        The draft's settings have names of their own here, so that `generate` hands them on as they were given, and not among its defaults.
        """
        self.called = True
        given = num_assistant_tokens, num_assistant_tokens_schedule, assistant_confidence_threshold
        at_call, configs = dict(zip(DRAFT_SETTINGS, given, strict=True)), (generation_config, model.generation_config)
        asked = self._own().beside(at_call, *configs) if self.reads_call else self._own()
        self.validate(model, asked)
        # Again: not every call comes through `enable`.
        refuse_modes({}, Settings({}, *configs))
        warn_of_models(model, self.assistant)
        self.policy.rule.check_mode(bool(generation_config.do_sample))
        self.policy.filter.check_decoding(read_sampling(generation_config))
        draft = self.assistant if self.drafter is None else self.drafter if hasattr(self.drafter, "identity") else None
        most = generation_config.max_length - input_ids.shape[1]
        warn_of_doubts(self.policy, {"target": model, "draft": draft}, generation_config, most)
        pads, columns = hidden(input_ids, model_kwargs.get(mask_name(model)), mask_name(model))
        vocabulary = vocabulary_of(model)
        clock, stop = Clock(input_ids.device), self.draft_stop(asked).start(input_ids.shape[0])
        rows = Rows(input_ids, pads, stopping_criteria, generation_config.max_length, columns)
        sampling = bool(generation_config.do_sample)
        processing = Processing(logits_processor, len(rows.index), sampling)

        kind = self.policy, stop.settings, processing, sampling
        compilation, sizes = self.compiling.of_call(generation_config, model, self.assistant, kind, rows)
        pair = None
        if self.assistant is not None:
            where = input_ids.device, model.dtype, compilation is not None
            pair = model, self.assistant, kind_of(self.policy, self.drafter, generation_config, *where)
            stop.pair(*pair)
        if not model.config.is_encoder_decoder:
            show(model, rows, input_ids, model_kwargs, self.passed)
        agree(ranks := self.ranks, rows, self.policy)
        target = target_of(model, rows, model_kwargs, compilation, self.given_as, ranks)
        if isinstance(ranks, Ranks) and not ranks.leads:
            return followed(target, ranks, model, self.streamer)

        def decode() -> Any:
            for name, head in self.policy.heads().items():  # here: in inference mode it would be made untrainable
                on_draft = name.startswith("stop") and self.assistant is not None
                head.to(device_of(self.assistant) if on_draft else input_ids.device)
            rule, spec = self.policy.rule, self.policy.rule.features
            context = DraftContext(model, rows, stop, processing, vocabulary, sampling, clock, target.lengths[:], spec)
            shared = target if self.shares else None
            made = Prepared(context, generation_config, inputs_tensor, model_kwargs, compilation, shared)
            drafter = start_drafter(self._draft_with(asked), made)
            companion = self.policy.filter.companion_for(base_of(model))
            refuse_spread("companion", companion)
            if companion is not None or rule.needs_draft_probs:
                drafter.keep_probs()
            # Tables of positions count in the target's own token ids.
            drafts = self.assistant if drafter.gives_probs else None
            positions = Positions(base_of(model), base_of(drafts), companion)
            wants = generation_config.return_dict_in_generate
            rows.keeps_scores = bool(wants and generation_config.output_scores)
            call = Call(
                rows=rows, target=target, drafter=drafter, stop=stop, rule=rule.start(rows.texts()), policy=self.policy,
                processing=processing, randomness=Randomness(self.generator, len(rows.index)), clock=clock, positions=positions,
                vocabulary=vocabulary, sampling=sampling, pair=pair,
                companion=None if companion is None else rowwise(companion, model, rows, vocabulary),
                tap=FeatureTap(model, spec) if spec is not None and spec.reads("target") else None,
                streamer=self.streamer, compiled=compilation is not None, sizes=sizes,
                fixed_rows=len(rows.index) > 1 and any(has_fixed_rows(its) for its in (model, self.assistant, companion) if its is not None),
                keep_scores=rows.keeps_scores,
                keep_logits=bool(wants and generation_config.output_logits),
            )  # fmt: skip
            return self.finish(call, model, input_ids, generation_config, model_kwargs)

        return led(target, decode)

    def finish(
        self, call: Call, model: Any, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> Any:
        """Decode a call that is ready; what `generate` returns."""
        with closing(call):
            with in_the_right_mode(call, model, self.assistant):
                read_prompts(call, self.reads_wholly and call.drafter.reads_target)
                stats = self.decode(call)
            self.reports += [stats] if cuts_outputs(model) else []
            sequences = call.rows.sequences(input_ids, padding_of(config))
            if self.streamer is not None:
                self.streamer.end()
            if not config.return_dict_in_generate:
                return sequences
            most = max([len(input_ids), *(len(its.rows) for its in self.reports)])
            cache = call.target.export(most, model_kwargs.get(mask_name(model)))
            return output_of(call, model, sequences, sequences.shape[1] - input_ids.shape[1], cache, stats)

    def decode(self, call: Call) -> SpeculationStats:
        """The rounds themselves; a subclass may walk otherwise."""
        return decode(call)
