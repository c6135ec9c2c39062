"""Collect what an EAGLE-3 drafter is trained on: texts that the target wrote, its hidden states there, and what it held likely.

The network learns to say what this target says, so the target answers the prompts itself ("EAGLE-3", §4, huggingface.co/papers/2503.01840).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import GenerationConfig

from ...artifacts.conditions import check_sampling, select_sampling
from ...drafters.networks.eagle_network import default_layers
from ...models.hidden_state_hook import HiddenStateHook
from ...models.identity import ModelIdentity, dtype_of, tokenizer_hash, versions, weights_hash
from ...models.introspection import base_of, blocks_of
from ...training.processes import Processes
from ...training.resumable import Tell, folders, start_run, write_shards
from ...validation import MOST_NEW_TOKENS, MOST_ROWS, check_flag, check_int
from .heard import Heard


RECORD, SHARDS = "eagle3.json", "safetensors"
MOST_LIKELY = 1024  # tokens of each place whose probabilities are kept


@dataclass(frozen=True)
class CollectSettings:
    """What decides every number of the data. A resumed run must have the same.

    Args:
        new_tokens: most tokens of an answer.
        layers: whose states the drafter reads, as in `Eagle3Config.target_layers`; None: three, by the number of the target's blocks.
        likely: of each place, the probabilities of so many of the likeliest tokens are what the drafter learns.
        states: keep the states on disk, 2 bytes a number; False: `fit` has the target work them out again each time.
        do_sample, temperature, top_k, top_p: how the target answers.
        batch_size: prompts at a time. seed: of sampling.
    """

    new_tokens: int = 256
    layers: tuple[int, ...] | None = None
    likely: int = 32
    states: bool = True
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("new_tokens", self.new_tokens, 2, MOST_NEW_TOKENS)
        check_int("likely", self.likely, 1, MOST_LIKELY)
        check_int("batch_size", self.batch_size, 1, MOST_ROWS)
        check_int("seed", self.seed, 0)
        check_flag("states", self.states)
        for layer in self.layers or ():
            check_int("layers", layer, 0)
        check_sampling(self)


DEFAULTS = CollectSettings()


def collect(
    target: Any, tokenizer: Any, prompts: Sequence[str], out: str | Path, settings: CollectSettings = DEFAULTS, *,
    resume: bool = False, source: str = "",
) -> Path:  # fmt: skip
    """Have `target` answer `prompts`, and keep the answers with its states in the folder `out`.

    Each batch of prompts is a file of its own; a run that was killed and resumed gives the same files. Under `accelerate launch` the
    processes share the batches.

    Returns: `out`. Raises: `ValueError`, one line, for prompts or models that cannot be used, or settings that differ from those of the
    unfinished run.
    """
    if not prompts:
        raise ValueError("nothing to collect from: the list of prompts is empty")
    if not all(prompt.strip() for prompt in prompts):
        raise ValueError("a prompt is blank: every prompt needs some text")
    out, part = folders(out)
    layers = settings.layers or default_layers(len(blocks_of(base_of(target)) or ()))
    reader = HiddenStateHook(target, layers)  # which refuses layers that the target does not have
    facts = _facts(target, tokenizer, prompts, settings, layers, source)
    processes = Processes.started()

    def make(number: int, tell: Tell) -> bytes:
        first = number * settings.batch_size
        heard = Heard(target, reader, settings.likely, settings.new_tokens, tell)
        return safetensors.torch.save(
            answers(target, tokenizer, prompts[first : first + settings.batch_size], settings, heard)
        )

    count = -(-len(prompts) // settings.batch_size)
    with start_run(out, part, facts, RECORD, resume=resume, processes=processes) as unfinished:
        if unfinished:
            write_shards(part / RECORD, count, SHARDS, make, processes, settings.seed, target.device)
            processes.on_first(lambda: part.rename(out))
    return out


def answers(
    target: Any, tokenizer: Any, prompts: Sequence[str], settings: CollectSettings, heard: Heard
) -> dict[str, torch.Tensor]:
    """What one file holds: each prompt's text, its end token with it, one behind the other, and what the target had at their places."""
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    width, device = max(map(len, ids)), target.device
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in ids], device=device)
    padded = torch.tensor([[pad] * (width - len(text)) + text for text in ids], device=device)
    ends = target.generation_config.eos_token_id
    config = GenerationConfig(
        max_new_tokens=settings.new_tokens, pad_token_id=pad, eos_token_id=ends, disable_compile=True,
        **select_sampling(asdict(settings)),
    )  # fmt: skip
    with heard:
        new = type(target).generate(target, padded, attention_mask=mask, generation_config=config)[:, width:].tolist()
    last = set([ends] if isinstance(ends, int) else ends or ())
    texts = []
    for prompt, answer in zip(ids, new, strict=True):
        end = next((place + 1 for place, token in enumerate(answer) if token in last), len(answer))
        texts.append((prompt + answer[:end], len(prompt)))
    parts = heard.take(texts, width)
    if not settings.states:
        for part in parts:
            del part["states"]
    return {
        "ids": torch.cat([torch.tensor(text, dtype=torch.int32) for text, _ in texts]),
        "lengths": torch.tensor([len(text) for text, _ in texts], dtype=torch.int32),
        "prompts": torch.tensor([prompt for _, prompt in texts], dtype=torch.int32),
        **{name: torch.cat([its[name] for its in parts]) for name in parts[0]},
    }


def _facts(
    target: Any, tokenizer: Any, prompts: Sequence[str], settings: CollectSettings, layers: Sequence[int], source: str
) -> dict[str, Any]:
    return {
        "settings": asdict(settings) | {"layers": list(layers)},
        "target": ModelIdentity.of(target).to_dict(),
        "target_weights": weights_hash(target),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "dtype": dtype_of(target),
        "prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest(),
        "source": source,
        "versions": versions(),
    }
