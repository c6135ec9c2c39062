"""Collect what SPRINTER's verifier is trained on: the draft's hidden state, the token it proposes, and p and q of that token.

Each prompt gives rows of four kinds in equal parts (Zhong et al., §3.2, huggingface.co/papers/2502.04557): the text goes on
from the original text, with the draft's tokens, with the target's, or with both interleaved as at inference. At every position of every
row the draft proposes one token, which is judged and, in some kinds, kept.

With `mix` it is what SpecDec++'s head is trained on (Huang et al., §3.2, huggingface.co/papers/2405.19715): rows of one kind, the draft's text with
that share of its tokens replaced by the target's, and of each proposed token its own state, which costs one draft step more.
"""

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ...drafters.states import StatesDrafter, refuse_models
from ...models.identity import ModelIdentity, tokenizer_hash, versions, weights_hash
from ...tasks.prompts import PromptText
from ...training.dataset import RECORD, assemble, make_schema
from ...training.processes import Processes
from ...training.resumable import Tell, folders, start_run, write_shards
from .collect_settings import DEFAULTS, CollectSettings
from .walk import Walk


def collect(
    target: Any, draft: Any, tokenizer: Any, texts: Sequence[PromptText], out: str | Path,
    settings: CollectSettings = DEFAULTS, *, resume: bool = False, source: str = "",
) -> Path:  # fmt: skip
    """Collect a dataset into the folder `out`.

    Each batch of prompts is a file of its own, written under a temporary name and renamed, with random numbers that depend on
    `settings.seed` and its place alone; so a run that was killed at any moment and resumed gives the same rows as one that
    was not. Under `accelerate launch` the processes share the batches among them.

    Args:
        target, draft: loaded decoder-only models with one tokenizer; the draft may be a drafter on the target's states.
        texts: prompts, with an original continuation where there is one.
        resume: go on with an unfinished collection of the same settings.
        source: where the prompts come from, for the data card.

    Returns: `out`, a folder that `datasets.load_from_disk` reads, with a data card.

    Raises: `ValueError`, one line, for models that cannot be used or settings that differ from those of the unfinished run.
    """
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()  # of `datasets`, one for each file
    if not texts:
        raise ValueError("nothing to collect from: the list of texts is empty")
    if not all(text.prompt.strip() for text in texts):
        raise ValueError("a prompt is blank: every prompt needs some text")
    out, part = folders(out)
    refuse_models("collecting", target, draft)
    if settings.places > 1 and not isinstance(draft, StatesDrafter):
        raise ValueError(
            f"places = {settings.places} is for drafters on the target's states, and a draft model has none: leave it at 1"
        )
    facts = _facts(target, draft, tokenizer, texts, settings, source)
    processes = Processes.started()

    def make(number: int, tell: Tell) -> bytes:
        first = number * settings.batch_size
        chosen = texts[first : first + settings.batch_size]
        rows = run_batch(
            target, draft, tokenizer, chosen, settings, first, lambda done: tell(done / settings.new_tokens)
        )
        data = io.BytesIO()
        Dataset.from_dict(rows, features=make_schema(facts["hidden_size"], settings.kinds)).to_parquet(data)
        return data.getvalue()

    count = -(-len(texts) // settings.batch_size)
    with start_run(out, part, facts, RECORD, resume=resume, processes=processes) as unfinished:
        if unfinished:
            write_shards(part / RECORD, count, "parquet", make, processes, settings.seed, target.device)
            processes.on_first(lambda: assemble(out, part, facts, count))
    return out


def run_batch(
    target: Any, draft: Any, tokenizer: Any, texts: Sequence[PromptText], settings: CollectSettings, first: int,
    tell: Callable[[int], None] = lambda positions: None,
) -> dict[str, list]:  # fmt: skip
    """All rows of some prompts, as columns. `first`: the number of the first prompt; `tell`: is given the positions done."""
    starts, forced = list[list[int]](), list[list[int] | None]()
    for text in texts:
        prompt = tokenizer(text.prompt)["input_ids"]
        cut, ending = len(prompt), []
        if text.continuation:
            ending = tokenizer(text.continuation, add_special_tokens=False)["input_ids"]
        else:  # no original continuation: the prompt's own end serves as one
            cut = max(len(prompt) // 2, len(prompt) - settings.new_tokens, 1)
            ending = prompt[cut:]
        if isinstance(draft, StatesDrafter) and cut < 2:
            raise ValueError(
                f"prompt {first + len(starts) // len(settings.kinds)} is too short: {draft.kind} drafts behind two tokens or more"
            )
        starts += [prompt[:cut] if kind == "original" else prompt for kind in settings.kinds]
        forced += [ending if kind == "original" else None for kind in settings.kinds]
    width = max(map(len, starts))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([[pad] * (width - len(s)) + s for s in starts], device=target.device)
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in starts], device=target.device)
    # `generate` prepares processors and stop conditions as it will when decoding, so p and q are decoding's own distributions.
    config = GenerationConfig(
        max_new_tokens=settings.new_tokens + 1, pad_token_id=pad, eos_token_id=target.generation_config.eos_token_id,
        **settings.decoding(),
    )  # fmt: skip
    walk = Walk(draft, settings, forced, tell)
    type(target).generate(target, ids, attention_mask=mask, generation_config=config, custom_generate=walk)

    order = sorted(range(len(walk.records)), key=lambda i: walk.records[i][:2])
    records = [walk.records[i] for i in order]
    columns = dict(
        zip(("row", "position", "token", "p", "q", "distance"), map(list, zip(*records, strict=True)), strict=True)
    )
    rows = columns.pop("row")
    return {
        "prompt": [first + row // len(settings.kinds) for row in rows],
        "kind": [row % len(settings.kinds) for row in rows],
        **columns,
        "features": [walk.features[i] for i in order],
    }


def _facts(
    target: Any, draft: Any, tokenizer: Any, texts: Sequence[PromptText], settings: CollectSettings, source: str
) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps([[t.prompt, t.continuation] for t in texts]).encode()).hexdigest()
    identity = ModelIdentity.of(draft)
    return {
        "settings": asdict(settings),
        "target": ModelIdentity.of(target).to_dict(),
        "draft": identity.to_dict(),
        "target_weights": weights_hash(target),
        "draft_weights": weights_hash(draft),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "dtypes": [str(target.dtype), str(draft.dtype)],
        "hidden_size": identity.hidden_size,
        "prompts": len(texts),
        "prompts_sha256": digest,
        "source": source,
        "versions": versions(),
    }
