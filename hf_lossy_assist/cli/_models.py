"""Load what options name: target, draft, companion, servers, prompts; compare heads with the run that uses them."""

import difflib
import json
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import hf_lossy_assist as hla

from .. import artifacts, server, tasks
from ..tasks.prompts import PromptText, read_texts
from ..terminal import show
from ..validation import DEMO, is_model, one_line, shown
from ._options import INT8, TARGET, DraftOptions, LoadOptions, ModelOptions, check_pair


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Draft: TypeAlias = PreTrainedModel | hla.Drafter | None
    Loaded: TypeAlias = tuple[PreTrainedModel, Draft, PreTrainedTokenizerBase]
    Part: TypeAlias = hla.Head | hla.Profile

DEMO_TARGETS = ("demo-target", "demo-target:int8")  # names of the demo's target in records
# Settings with an option of their own, which would override `--set`.
OPTIONS = {
    name: f"pass --{name.replace('_', '-')}"
    for name in ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p")
}
STOP_DECIDES = dict.fromkeys(
    ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    "pass a stop, such as --policy constant:gamma=5",
)


def load(
    model: str | None, assistant: str | None, dtype: str, device: str, overrides: list[str] | None = None
) -> "Loaded":
    """Load target, draft and tokenizer; the demo's if both names are None. `overrides`: `--set`."""
    if model is not None and assistant is not None and Path(assistant).resolve() == Path(model).resolve():
        show(
            "remark: --assistant is --model, and a draft that costs what the target costs gains nothing: pass a smaller model",
            file=sys.stderr,
        )
    check_placement(dtype, device)
    target, draft, tokenizer = server.named_drafters.load_pair(model, assistant, dtype, device)
    override(target, overrides)
    return target, draft, tokenizer


def check_placement(dtype: str, device: str) -> None:
    """Refuse a `--dtype` and a `--device` that cannot be used here. Raises: `ValueError`, one line."""
    check = artifacts.loading
    check.check_dtype(dtype, None if device == "auto" else check.check_device(device, "--device"), "--dtype")


def load_models(models: ModelOptions, options: LoadOptions) -> "Loaded":
    """Load the target, its draft and the tokenizer. Raises: `ValueError`, one line, for a drafter of another target."""
    if models.drafter is None:
        return load(models.model, models.assistant, options.dtype, options.device, options.overrides)
    drafter = server.named_drafters.load_trained(models.drafter)
    target, _, tokenizer = load(models.model, None, options.dtype, options.device, options.overrides)
    return target, server.named_drafters.fit_drafter(drafter, target, options.dtype), tokenizer


def load_drafts(
    models: DraftOptions, options: LoadOptions
) -> "tuple[PreTrainedModel, dict[str, PreTrainedModel | hla.Drafter], PreTrainedTokenizerBase]":
    """Load the target, its drafts by name and the tokenizer. Raises: `ValueError`, one line, for a draft of another target."""
    names = models.assistants or ([] if models.drafter else [DEMO])
    trained = None if models.drafter is None else server.named_drafters.load_trained(models.drafter)
    first = next((name for name in names if is_model(name)), None)
    target, draft, tokenizer = load(models.model, first, options.dtype, options.device, options.overrides)
    found: dict[str, PreTrainedModel | hla.Drafter] = {}
    for name in names:
        label = _shorten(name, found)
        if name in (first, DEMO):
            assert draft is not None
            found[label] = draft
            continue
        if is_model(name):
            server.named_drafters.check_tokenizers(tokenizer, str(models.model), name)
        found[label] = server.named_drafters.load_draft(name, target, options.dtype, str(target.device))
    if trained is not None:
        found[_shorten(f"{models.drafter}", found)] = server.named_drafters.fit_drafter(trained, target, options.dtype)
    return target, found, tokenizer


def _shorten(name: str, others: Collection[str]) -> str:
    """Return a draft's name without its path, unless another has it."""
    short = Path(name).name if Path(name).is_dir() else name
    return short if short not in others else name if name not in others else f"{name} (drafter)"


def read_drafter(given: str | None, policy: str, model: str | None, assistant: str | None) -> "hla.Drafter | None":
    """Read `--drafter`: a registered drafter's name, JSON with the name and parameters, or a trained drafter's folder or Hub id.

    Raises: `ValueError`, one line, if it does not match the other options.
    """
    drafter = None if given is None else server.named_drafters.read_drafter(given)
    if policy == TARGET:
        if drafter is not None:
            raise ValueError(f"--drafter drafts, and --policy {TARGET} has no draft: leave one of them out")
    elif drafter is None or drafter.needs_assistant:
        check_pair(model, assistant)
    elif assistant is not None and not drafter.takes_assistant:
        raise ValueError(f"--drafter {given} drafts without a model: leave --assistant out")
    return drafter


def load_served(models: ModelOptions, options: LoadOptions) -> "tuple[Loaded, hla.Drafter | None]":
    """Load what `hf-lossy serve` names: the models, and a drafter, if `--drafter` names one."""
    given = models.drafter
    over = given is not None and given.partition("+")[0] in ("auto", "composite")
    if given is None or (server.named_drafters.is_trained(given) and not over):
        models.check()
    check_placement(options.dtype, options.device)
    loaded, drafter = server.named_drafters.load_served(
        models.model, models.assistant, given, options.dtype, options.device
    )
    override(loaded[0], options.overrides)
    return loaded, drafter


def load_companion(
    companion: str | None, target: "PreTrainedModel", draft: "Draft", tokenizer: "PreTrainedTokenizerBase"
) -> "PreTrainedModel":
    """Load `--companion` in the target's precision and on its device; the demo's if it is None."""
    from ..artifacts.identity import same_ids
    from ..models.packed_linears import int8

    if companion is None:
        return hla.demo.load(target.dtype, target.device).companion
    if companion == INT8:
        if draft is None or isinstance(draft, hla.Drafter):
            raise ValueError(
                f"--companion {INT8} is the draft model in int8, and --drafter drafts without one: pass --assistant in its place"
            )
        return int8(draft)
    model, _, other = load(companion, None, str(target.dtype).removeprefix("torch."), str(target.device))
    if not same_ids(tokenizer, other):
        raise ValueError(f"--companion {companion} has another tokenizer than the target: token ids mean other words")
    return model


def override(target: "PreTrainedModel", given: list[str] | None) -> None:
    """Write each NAME=VALUE into the target's generation config; a VALUE is JSON, or else text.

    Raises: `ValueError` or `TypeError`, one line, for an unknown name, one that something else determines, and an invalid value.
    """
    config = target.generation_config
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set: expected NAME=VALUE such as num_beams=1, got {shown(text)}")
        if name in OPTIONS | STOP_DECIDES:
            by = "the command" if name in OPTIONS else "the policy"
            raise ValueError(f"--set {name}: {by} decides it: {(OPTIONS | STOP_DECIDES)[name]}")
        known = [other for other in vars(config) if not other.startswith("_")]
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "see transformers.GenerationConfig"
            raise ValueError(f"--set: there is no setting {shown(name)}: {hint}")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        try:
            if name == "pad_token_id" and isinstance(parsed, list):
                raise TypeError(f"{name}: expected one token id, got {shown(parsed)}")
            config.update(**{name: parsed})
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"--set {shown(text)}: {one_line(error)}") from None


def open_endpoint(role: str, url: str | None, model: str | None, timeout: float) -> "tasks.endpoint.Endpoint":
    """Connect to the server of --ROLE-url and --ROLE-model, with role "target" or "judge"."""
    if url is None or model is None:
        raise ValueError(
            f"this needs --{role}-url and --{role}-model: an OpenAI-compatible server and a model's name there"
        )
    return tasks.endpoint.Endpoint(url, model, timeout=timeout)


def with_template(tokenizer: "PreTrainedTokenizerBase", prompts: list[str]) -> list[str]:
    """Apply the tokenizer's chat template to prompts, without the begin token that the tokenizer will add."""
    try:
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
            for p in prompts
        ]
    except Exception as error:  # the template is the model's program, and may raise any error
        raise ValueError(
            f"--chat: the tokenizer's chat template failed ({type(error).__name__}: {one_line(error)}): leave --chat out, or use "
            "another tokenizer"
        ) from None
    begin = tokenizer.bos_token
    if begin and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        texts = [text.removeprefix(begin) for text in texts]
    return texts


def read_prompt_texts(prompts: str, limit: int | None, demo_limit: int, seed: int) -> tuple[list[PromptText], str]:
    """Read `--prompts`, and their name for records. The demo's are problems used neither in training the models nor in tests."""
    if prompts != DEMO:
        return read_texts(prompts, limit), Path(prompts).name
    problems = hla.demo.problems(demo_limit if limit is None else limit, seed, "calibration")
    return [PromptText(p.prompt, p.solution) for p in problems], name_demo_source(seed)


def name_demo_source(seed: int) -> str:
    """Return the name of the demo problems in records."""
    return f"the demo task, calibration problems of seed {seed}"


def check_parts(models: ModelOptions | DraftOptions, parts: Iterable["Part"]) -> None:
    """Refuse heads and profiles for models other than the demo's if no option names a model."""
    for part in parts if models.demo else ():
        record = part if isinstance(part, hla.Profile) else part.config
        check_made_for(part.source, *(None if model is None else model.id for model in (record.target, record.draft)))


def check_made_for(name: str | None, target: str | None, draft: str | None) -> None:
    """Refuse an artifact for models other than the demo's, since models named in a record are not loaded automatically."""
    if target not in (None, *DEMO_TARGETS):
        pair = "pass --model and --assistant, or --drafter"
        raise ValueError(f"{name} was made for the models {one_line(target)} and {one_line(draft)}: {pair}")
