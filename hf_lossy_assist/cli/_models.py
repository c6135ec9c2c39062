"""The models that options name: target, what drafts for it, companion; their tokenizer's chat template, and a server in a model's place."""

import difflib
import json
import os
import sys
from pathlib import Path
from typing import Any

import hf_lossy_assist as hla

from ..tasks.prompts import PromptText, read_texts
from ..terminal import show
from ..validation import one_line, shown
from ._options import DEMO, INT8, TARGET, LoadOptions, check_pair
from ._provenance import ModelNames, absolute


# Settings that commands take by options, which would win over `--set`.
OPTIONS = {
    name: f"--{name.replace('_', '-')}" for name in ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p")
}


def load(
    model: str | None, assistant: str | None, dtype: str, device: str, overrides: list[str] | None = None
) -> tuple[Any, Any, Any]:
    """Target, draft and tokenizer as the options name them; the demo's where both are None. `overrides`: `--set`."""
    import torch

    from ..models.int8 import quantised
    from ..models.loading import load_model, load_tokenizer

    if device == "auto":  # under `accelerate launch` each process has its own
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, INT8: torch.float32}
    if dtype not in kinds:
        raise ValueError(f"--dtype: expected {', '.join(kinds)}, got {dtype!r}")
    if device.partition(":")[0] == "meta":
        raise ValueError(
            f"--device {device!r} holds no weights, so nothing can run there: expected cpu, cuda, cuda:1, …"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    if dtype == INT8 and not device.startswith("cpu"):
        raise ValueError(f"--dtype {INT8} computes on the CPU alone, and --device is {device}: pass --device cpu")
    if model is None and assistant is None:
        models = hla.demo.load(kinds[dtype], device)
        target, draft = (quantised(m) if dtype == INT8 else m for m in (models.target, models.draft))
        override(target, overrides)
        return target, draft, models.tokenizer

    def read(source: str | None) -> Any:
        if source is None:
            return None
        model = load_model(source, dtype=kinds[dtype]).to(device).eval()
        return quantised(model) if dtype == INT8 else model

    source = model or str(hla.demo.FOLDER / "target")
    tokenizer = load_tokenizer(source, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if assistant is not None:
        _check_tokenizers(tokenizer, source, assistant)
        if absolute(assistant) == absolute(source):
            show(
                "remark: --assistant is --model, and a draft that costs what the target costs gains nothing: pass a smaller model",
                file=sys.stderr,
            )
    target, draft = read(source), read(assistant)
    override(target, overrides)
    return target, draft, tokenizer


def _check_tokenizers(tokenizer: Any, model: str, assistant: str) -> None:
    """Refuse a draft whose token ids mean other words, before weights are read. A draft without a tokenizer has the target's."""
    from ..models.identity import same_ids
    from ..models.loading import load_tokenizer

    try:
        other = load_tokenizer(assistant)
    except OSError:  # it has none, or there is no such model, which loading it says
        return
    if not same_ids(tokenizer, other):
        raise ValueError(
            f"--assistant {one_line(assistant)} has another tokenizer than --model {one_line(model)}: token ids mean other words; pass a draft "
            "of the target's family"
        )


def load_models(names: ModelNames, options: LoadOptions) -> tuple[Any, Any, Any]:
    """Load the target, what drafts for it, and the tokenizer. Raises: `ValueError`, one line, for a drafter of another target."""
    if names.drafter is None:
        return load(names.model, names.assistant, options.dtype, options.device, options.overrides)
    drafter = trained(names.drafter)
    target, _, tokenizer = load(names.model, None, options.dtype, options.device, options.overrides)
    if options.dtype == INT8:
        drafter = drafter.int8()
    drafter.check(target)
    return target, drafter, tokenizer


def check_compiled(compiled: bool, names: ModelNames) -> None:
    """Rounds of a drafter on the target's states are eager: hooks read the states."""
    if compiled and names.drafter is not None:
        raise ValueError(
            "--compile: rounds that read the target's hidden states are not compiled: leave it out beside --drafter"
        )


def is_trained(given: str) -> bool:
    """Whether `--drafter` names files, and no registered drafter."""
    return given == DEMO or (
        not given.lstrip().startswith("{") and (os.sep in given or "/" in given or Path(given).is_dir())
    )


def trained(given: str) -> Any:
    """The trained drafter that `--drafter` names. Raises: `ValueError`, one line, for other drafters; what loading raises."""
    from ..drafters.io import load_drafter

    if not is_trained(given):
        raise ValueError(
            f"--drafter {given}: expected a trained drafter's folder, its Hub id or `{DEMO}`; other drafters are for hf-lossy generate"
        )
    return hla.demo.drafter() if given == DEMO else load_drafter(given)


def read_drafter(given: str | None, policy: str, model: str | None, assistant: str | None) -> "hla.Drafter | None":
    """`--drafter`: a registered drafter's name, JSON with the name and parameters, or a trained drafter's folder or Hub id.

    Raises: one line where it does not fit the rest.
    """
    from ..artifacts.json_io import parse_json as parse
    from ..drafters.base import as_drafter

    drafter: hla.Drafter | None = None
    if given is not None and is_trained(given):
        drafter = trained(given)
    elif given is not None:
        drafter = as_drafter(parse(given, "--drafter") if given.lstrip().startswith("{") else given)
    if policy == TARGET:
        if drafter is not None:
            raise ValueError(f"--drafter drafts, and --policy {TARGET} has no draft: leave one of them out")
    elif drafter is None or drafter.needs_assistant:
        check_pair(model, assistant)
    elif assistant is not None:
        raise ValueError(f"--drafter {given} drafts without a model: leave --assistant out")
    return drafter


def load_companion(companion: str | None, target: Any, draft: Any, tokenizer: Any) -> Any:
    """`--companion`, in the target's precision and place; the demo's where it is None."""
    from ..models.identity import same_ids
    from ..models.int8 import int8

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


def override(target: Any, given: list[str] | None) -> None:
    """Write each NAME=VALUE into the target's generation config; a VALUE is JSON, or else a text.

    Raises: `ValueError`, one line, for an unknown name, one that has an option of its own, and a value that Transformers refuses.
    """
    config = target.generation_config
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set: expected NAME=VALUE such as num_beams=1, got {shown(text)}")
        if name in OPTIONS:
            raise ValueError(f"--set {name}: the command decides it: pass {OPTIONS[name]}")
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
            config.update(**{name: parsed})
        except (TypeError, ValueError) as error:
            raise ValueError(f"--set {shown(text)}: {one_line(error)}") from None


def open_endpoint(role: str, url: str | None, model: str | None, timeout: float) -> Any:
    """Connect to the server of --ROLE-url and --ROLE-model, role "target" or "judge"; it has answered once."""
    from ..tasks.endpoint import Endpoint

    if url is None or model is None:
        raise ValueError(
            f"this needs --{role}-url and --{role}-model: an OpenAI-compatible server and a model's name there"
        )
    endpoint = Endpoint(url, model, timeout=timeout)
    try:
        endpoint.check()
    except BaseException:
        endpoint.close()
        raise
    return endpoint


def with_template(tokenizer: Any, prompts: list[str]) -> list[str]:
    """Prompts in the tokenizer's chat template, without the begin token that the tokenizer will add itself."""
    try:
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
            for p in prompts
        ]
    except Exception as error:  # the template is a program of the model's, and may raise whatever it likes
        raise ValueError(
            f"--chat: the tokenizer's chat template failed ({type(error).__name__}: {one_line(error)}): leave --chat out, or use "
            "another tokenizer"
        ) from None
    begin = tokenizer.bos_token
    if begin and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        texts = [text.removeprefix(begin) for text in texts]
    return texts


def texts_of(prompts: str, limit: int | None, demo_limit: int, seed: int) -> tuple[list[PromptText], str]:
    """Read `--prompts`, and say what records call them. The demo's: problems that neither the models were trained on nor a test uses."""
    if prompts != DEMO:
        return read_texts(prompts, limit), Path(prompts).name
    problems = hla.demo.problems(demo_limit if limit is None else limit, seed, "calibration")
    return [PromptText(p.prompt, p.solution) for p in problems], demo_source(seed)


def demo_source(seed: int) -> str:
    """Name the demo problems for records."""
    return f"the demo task, calibration problems of seed {seed}"
