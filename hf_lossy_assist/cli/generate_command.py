"""`hf-lossy generate`: continue prompts with the help of a draft model."""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import hf_lossy_assist as hla

from .. import artifacts, models
from ..artifacts.files import check_file
from ..registry import Method, Names, find_method, list_entries
from ..tasks.prompts import PromptText, read_texts
from ..terminal import Bar, show, show_json, streamer
from ..training.processes import Processes
from ..validation import LONGEST_DRAFT, MOST, MOST_NEW_TOKENS, MOST_ROWS
from . import _models, _options, _printing


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ._models import Draft, Part

DEMO_PROBLEMS = 3
Finish = Callable[
    ["PreTrainedModel", "Draft", "PreTrainedTokenizerBase"], "hla.LossyPolicy | None"
]  # takes target, draft and tokenizer


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """`--policy` and the options that modify it. A method's recipe determines which of them it takes."""

    policy: Annotated[
        str, f"method, rule or stop by name, JSON, file, folder or Hub id; `{_options.TARGET}` for no draft"
    ] = "strict"
    head: Annotated[
        str | None, "head for sprinter, autojudge or specdec: a folder or Hub id (default: the demo's)"
    ] = None
    threshold: Annotated[float | None, "decision threshold of the head (default: the head's, or the method's)"] = None
    window: Annotated[int | None, "draft length for autojudge (default: 32)"] = None
    profile: Annotated[str | None, "profile for sv: a folder or Hub id (default: the demo's)"] = None
    companion: _options.Companion = None
    gamma: Annotated[int | None, (1, LONGEST_DRAFT), "draft length for sv (default: the profile's)"] = None
    drafter: Annotated[
        str | None,
        "what drafts instead of the assistant: suffix, composite, auto, auto+FOLDER, …, or JSON with its name",
    ] = None
    compile_rounds: Annotated[bool, "--compile", "compile the rounds; the first texts wait for it"] = False
    fallback: Annotated[bool, "--fallback", "stop drafting while it does not pay"] = False

    def check(self) -> None:
        """Refuse an option that this policy does not take."""
        for name in ("head", "threshold", "window", "profile", "companion", "gamma"):
            takers = [m.name for m in list_entries("method") if name in m.parameters]
            if getattr(self, name) is not None and self.policy not in takers:
                raise ValueError(f"--{name} is for --policy {' or '.join(takers)}, not {self.policy!r}")
        if self.fallback and self.policy == _options.TARGET:
            raise ValueError("--fallback switches drafting off, and --policy target has none: leave it out")

    def read(self, demo_models: bool) -> tuple[Finish, list["Part"]]:
        """Load heads and profiles; return them with a function that completes the policy once the models are loaded (a companion).

        Args:
            demo_models: the demo's models are used, so its head, profile and companion are the defaults.

        Raises: `ValueError`, one line, for missing options and for files that cannot be loaded.
        """
        self.check()
        if self.policy == _options.TARGET:
            return lambda *models: None, []
        if self.policy in Names("method") and find_method(self.policy).needs:
            return self._read_method(find_method(self.policy), demo_models)
        policy = self._read_text()
        return lambda *models: self._add_fallback(policy), [*_models.find_parts(policy)]

    def _read_method(self, found: Method, demo_models: bool) -> tuple[Finish, list["Part"]]:
        from ..policy.parse import make_named_policy

        for need in found.needs:
            if getattr(self, need) is None and not demo_models:
                made_by = "hf-lossy profile" if "profile" in found.needs else "hf-lossy fit"
                raise ValueError(
                    f"--policy {found.name} needs --{need} for models of your own: a folder or org/name ({made_by})"
                )
        beside: dict[str, Part] = {}
        if "head" in found.needs:
            beside["head"] = hla.demo.head(found.name) if self.head is None else hla.Head.from_pretrained(self.head)
        if "profile" in found.needs:
            beside["profile"] = (
                hla.demo.profile() if self.profile is None else hla.Profile.from_pretrained(self.profile)
            )
        settings = {"threshold": self.threshold, "window": self.window, "gamma": self.gamma}
        settings = {name: value for name, value in settings.items() if value is not None}
        if "companion" not in found.needs:
            policy = make_named_policy(found.name, beside, **settings)
            return lambda *models: self._add_fallback(policy), [*beside.values()]

        def finish(
            target: "PreTrainedModel", draft: "Draft", tokenizer: "PreTrainedTokenizerBase"
        ) -> "hla.LossyPolicy | None":
            companion = _models.load_companion(self.companion, target, draft, tokenizer)
            return self._add_fallback(make_named_policy(found.name, {**beside, "companion": companion}, **settings))

        return finish, [*beside.values()]

    def _read_text(self) -> "hla.LossyPolicy":
        from ..policy.parse import is_short_form

        text = self.policy
        on_the_hub = text.count("/") == 1 and not text.endswith(".json") and not text.lstrip().startswith("{")
        if on_the_hub and not is_short_form(text) and not Path(text).exists():
            return hla.LossyPolicy.from_pretrained(text)
        return hla.as_policy(text)

    def _add_fallback(self, policy: "hla.LossyPolicy") -> "hla.LossyPolicy":
        return policy.with_fallback() if self.fallback else policy


@_options.command
def generate_command(
    *,
    model: _options.Model = None,
    assistant: _options.Assistant = None,
    options: PolicyOptions,
    prompt: Annotated[list[str] | None, "a prompt; repeatable (default: a few demo problems)"] = None,
    prompts: _options.PromptsFile = None,
    limit: Annotated[int | None, (1, MOST), "most prompts (default: all; of the demo 3, or one batch)"] = None,
    max_new_tokens: Annotated[int, (1, MOST_NEW_TOKENS), "most new tokens of each text"] = 128,
    sampling: _options.SamplingOptions,
    batch_size: Annotated[int, (1, MOST_ROWS), "texts that are written at a time"] = 1,
    loading: _options.LoadOptions,
    chat: _options.Chat = False,
    stream: Annotated[bool, "--stream", "print each text as it is written (batch size 1)"] = False,
    html: Annotated[Path | None, "write the texts as a page, each token with its source"] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Continue prompts with the help of a draft model, and report how much it helped.

    Examples:

      hf-lossy generate --policy svip

      hf-lossy generate --model M --assistant D --prompts questions.jsonl --chat --policy svip --fallback --batch-size 8

      hf-lossy generate --policy sprinter --head head --threshold 0.7

      hf-lossy generate --model M --assistant auto --policy strict --prompts questions.jsonl
    """
    sampling.check_ranges(": leave --do-sample out for greedy decoding")
    if html is not None:
        _options.require_extra("train", "jinja2", "matplotlib")
        check_file("--html", html)
    if stream and (as_json or batch_size > 1):
        raise ValueError("--stream shows one text at a time: leave out --json and --batch-size")
    policy, drafter = options.policy, _models.read_drafter(options.drafter, options.policy, model, assistant)
    finish, parts = options.read(demo_models=model is None)
    auto = assistant == "auto"
    models = _options.ModelOptions(model=model, assistant=None if auto else assistant)
    if drafter is None:
        _models.check_parts(models, parts)
    read, problems = _read_texts(prompt, prompts, model, sampling.seed, limit, max(DEMO_PROBLEMS, batch_size))
    texts, limits = [text.prompt for text in read], [text.limits or {} for text in read]
    if any(limits) and batch_size > 1 and (stream or policy == _options.TARGET or options.compile_rounds):
        raise ValueError(
            "--prompts: a prompt has limits of its own, and a batch of fixed rows has one for all: pass --batch-size 1"
        )
    target, draft, tokenizer = _models.load_models(models, loading)
    chosen = finish(target, draft, tokenizer)
    if drafter is not None and not (drafter.needs_assistant or drafter.takes_assistant):
        draft = None
    settings = {"max_new_tokens": max_new_tokens} | artifacts.conditions.select_sampling(asdict(sampling))
    if chosen is not None:  # else plain `generate` of the target, whatever policy its files contain
        hla.enable(target)
        # Including the tokenizer, since heads and profiles refuse one that they were not made with.
        drafting = {
            "assistant_model": assistant if auto else draft,
            "drafter": drafter,
            "lossy_policy": chosen,
            "tokenizer": tokenizer,
        }
        settings |= {name: value for name, value in drafting.items() if value is not None}
        settings |= {"cache_implementation": "static"} if options.compile_rounds else {}
    prompted = _models.with_template(tokenizer, texts) if chat else texts
    written = _write(target, tokenizer, prompted, limits, settings, sampling.seed, batch_size, stream)
    if not Processes.started().first:
        return
    if html is not None:
        _printing.write_page(html, written.outputs, tokenizer, policy)
    _models.warn_of_other_decoding(parts, sampling.do_sample)
    _remark_on_companion(chosen, batch_size)
    if as_json:
        assisted = chosen and (auto or draft is not None)
        facts: dict[str, object] = {
            "model": model or "demo/target",
            "assistant": (assistant or "demo/draft") if assisted else None,
        }
        if options.drafter is not None:
            facts["drafter"] = options.drafter
        facts["policy"] = policy if chosen is None else chosen.to_dict() or "strict"
        show_json(_printing.json_report(written, tokenizer, facts))
        return
    _printing.show_outputs(written.outputs, tokenizer, problems, streamed=stream)
    _printing.show_report(written, policy)


def _read_texts(
    prompt: list[str] | None, prompts: Path | None, model: str | None, seed: int, limit: int | None, usual: int
) -> tuple[list[PromptText], "list[hla.demo.Problem]"]:
    """Read the prompts and, if they are the demo's, their problems; usual: number of demo problems without a limit."""
    if prompt and prompts:
        raise ValueError("--prompt and --prompts are two sources: pass one of them")
    texts = [PromptText(text) for text in prompt or []][:limit] or (read_texts(prompts, limit) if prompts else [])
    problems = [] if texts or model is not None else hla.demo.problems(usual if limit is None else limit, seed)
    texts = texts or [PromptText(p.prompt) for p in problems]
    if not texts:
        raise ValueError("nothing to continue: pass --prompt or --prompts with --model")
    if not all(text.prompt.strip() for text in texts):
        raise ValueError("a prompt is empty: every prompt needs some text")
    return texts, problems


def _write(
    target: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: list[str],
    limits: list[dict[str, object]],
    settings: dict[str, Any],
    seed: int,
    rows: int,
    stream: bool,
) -> _printing.GeneratedTexts:
    """Continue each text, `rows` at a time. `limits`: those of each text alone; settings: arguments of `generate`."""
    import torch

    torch.manual_seed(seed)
    if stream or "lossy_policy" not in settings or "cache_implementation" in settings:
        return _in_batches(target, tokenizer, texts, limits, settings, rows, stream)  # compiled rounds keep their rows
    return _in_flight(target, texts, limits, settings, seed, rows)


def _in_flight(
    target: "PreTrainedModel",
    texts: list[str],
    limits: list[dict[str, object]],
    settings: dict[str, Any],
    seed: int,
    rows: int,
) -> _printing.GeneratedTexts:
    """Continue `rows` texts at a time; a finished text makes room for the next."""
    processes = Processes.started()
    numbers = processes.share(range(len(texts)))
    outputs: dict[int, _printing.GeneratedText] = {}
    began, ends = time.perf_counter(), models.introspection.end_tokens(target.generation_config)
    few = len(numbers) <= rows
    with Bar(len(numbers), "writing", "prompts", quiet=few or not processes.first) as bar:
        share = [{"prompt": texts[number], **limits[number]} for number in numbers]
        many = hla.generate_many(target, share, max_rows=rows, seed=seed, numbers=numbers, **settings)
        for done, result in enumerate(many, 1):
            cut = not set(result.token_ids[-1:]) & ends
            outputs[result.index] = _printing.GeneratedText(
                texts[result.index], result.token_ids, result.speculation, cut
            )
            bar.to(done)
    outputs = {number: output for part in processes.all(outputs) for number, output in part.items()}
    seconds = time.perf_counter() - began
    stats = [part for part in processes.all(many.speculation) if part is not None]
    return _printing.GeneratedTexts(
        [outputs[number] for number in sorted(outputs)], seconds, hla.SpeculationStats.merge(stats)
    )


def _in_batches(
    target: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: list[str],
    limits: list[dict[str, object]],
    settings: dict[str, Any],
    rows: int,
    stream: bool,
) -> _printing.GeneratedTexts:
    """Continue `rows` texts per call, which ends with the longest of them."""
    import torch

    outputs: list[_printing.GeneratedText] = []
    calls, seconds, ends = [], 0.0, models.introspection.end_tokens(target.generation_config)
    with Bar(len(texts), "writing", "prompts", quiet=stream or len(texts) <= rows) as bar:
        for start in range(0, len(texts), rows):
            batch = texts[start : start + rows]
            inputs = tokenizer(batch, return_tensors="pt", padding=True).to(target.device)
            inputs.pop("token_type_ids", None)
            if stream:
                inputs["streamer"] = streamer(tokenizer, skip_prompt=True)
            began = time.perf_counter()
            of_one = dict(limits[start])  # with batch size 1; otherwise there are none
            if "stop_strings" in of_one:
                of_one["tokenizer"] = tokenizer
            seed = of_one.pop("seed", None)
            with nullcontext() if seed is None else torch.random.fork_rng():  # so that later texts do not depend on it
                if seed is not None:
                    torch.manual_seed(seed)
                out = target.generate(**inputs, **settings | of_one, return_dict_in_generate=True)
            seconds += time.perf_counter() - began
            stats = getattr(out, "speculation", None)
            calls += [stats] if stats is not None else []
            new = out.sequences[:, inputs["input_ids"].shape[1] :]
            for i, padded in enumerate(new.tolist()):
                row = None if stats is None else replace(stats, rows=[stats.rows[i]])
                length = next((j + 1 for j, token in enumerate(padded) if token in ends), len(padded))
                ids = padded[: length if row is None else row.num_new_tokens]
                outputs.append(_printing.GeneratedText(batch[i], ids, row, not set(ids[-1:]) & ends))
            bar.to(start + len(batch))
    return _printing.GeneratedTexts(outputs, seconds, hla.SpeculationStats.merge(calls) if calls else None)


def _remark_on_companion(policy: "hla.LossyPolicy | None", rows: int) -> None:
    """Print a remark if `sv` does not use its companion because the profile expects no gain with this number of rows."""
    verify = None if policy is None else policy.filter
    profile = getattr(verify, "profile", None)
    if profile is not None and getattr(verify, "fallback", False) and not profile.worthwhile(rows):
        show(
            f"remark: sv is strict acceptance here: its profile expects no gain from a companion at batch size {rows} (hf-lossy profile)",
            file=sys.stderr,
        )
