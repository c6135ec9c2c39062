"""Functions of all jobs that read models: decoding settings, the record of a run, and continuing prompts in a batch."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..artifacts.conditions import check_sampling, select_sampling
from ..artifacts.identity import ModelIdentity, tokenizer_hash, versions, weights_hash
from ..drafters.hidden_state import DraftModel, HiddenStateDrafter
from ..models.introspection import dtype_of, end_tokens
from ..validation import MOST, check_int


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Decoding settings while a job reads models, named as in `generate`. Base class of the jobs' settings."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("seed", self.seed, 0, MOST)
        check_sampling(asdict(self))

    def decoding(self) -> dict[str, object]:
        """Return the settings that affect the models' distributions."""
        return select_sampling(asdict(self))


def describe_run(
    settings: Mapping[str, object],
    models: Mapping[str, DraftModel | None],
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[object],
    source: str = "",
    unit: str = "prompts",
) -> dict[str, object]:
    """Return the record of a run: everything that determines its result, which must be equal in a resumed run.

    Args:
        models: by role; None for one behind a server. texts: JSON values, one per prompt.
        unit: the name of the texts in the record.
    """
    facts: dict[str, object] = {"settings": settings}
    for role, model in models.items():
        facts[role] = None if model is None else ModelIdentity.of(model).to_dict()
        facts[f"{role}_weights"] = None if model is None else weights_hash(model)
        facts[f"{role}_dtype"] = None if model is None else dtype_of(model)
    return facts | {
        "tokenizer_hash": tokenizer_hash(tokenizer),
        unit: len(texts),
        f"{unit}_sha256": hashlib.sha256(json.dumps(list(texts), default=str).encode()).hexdigest(),
        "source": source,
        "versions": versions(),
    }


def recorded_weights(facts: Mapping[str, object]) -> dict[str, str]:
    """Return `HeadConfig.model_weights` from the record of a run; records of older versions have none."""
    weights = {role: (facts.get(f"{role}_dtype"), facts.get(f"{role}_weights")) for role in ("target", "draft")}
    return {role: ":".join(map(str, pair)) for role, pair in weights.items() if None not in pair}


def check_models(facts: Mapping[str, Any], models: Mapping[str, DraftModel], what: str, instead: str) -> None:
    """Refuse models, by role, that are not those in the record of a run; warn of another id or precision.

    `what`: the data that the run made; `instead`: what to do about it. Raises: `ValueError`, one line.
    """
    weights = recorded_weights(facts)
    for role, model in models.items():
        ModelIdentity.from_dict(facts[role]).check(model, role, what, instead, weights.get(role, ""), exact=True)


def continue_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    new_tokens: int,
    decoding: Mapping[str, object],
    runner: object = None,
    ends: bool = True,
) -> list[list[int]]:
    """Continue prompts of token ids in one batch, padded on the left. `runner`: decodes in place of `generate`.

    Returns: each row's new tokens up to its first end token, at which rows end unless `ends` is False.
    """
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=target.device)
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        pad_token_id=pad,
        eos_token_id=target.generation_config.eos_token_id if ends else None,
        disable_compile=True,
        **decoding,
    )
    out = type(target).generate(target, ids, attention_mask=mask, generation_config=config, custom_generate=runner)
    rows = (out if isinstance(out, torch.Tensor) else out.sequences)[:, width:].tolist()
    end_ids = end_tokens(target.generation_config)
    return [row[: next((i + 1 for i, token in enumerate(row) if token in end_ids), len(row))] for row in rows]


def refuse_blank(prompts: Sequence[str]) -> None:
    """Refuse an empty list of prompts, and blank prompts."""
    if not prompts:
        raise ValueError("nothing to collect from: the list of prompts is empty")
    if not all(prompt.strip() for prompt in prompts):
        raise ValueError("a prompt is blank: every prompt needs some text")


def refuse_drafter(what: str, draft: DraftModel) -> None:
    """Refuse a drafter: heads on its states lost most answers (docs/how-to/choose-a-draft.md)."""
    if isinstance(draft, HiddenStateDrafter):
        raise ValueError(f"{what} needs a draft model, and {draft.kind} is none: use svip or sv with it")
