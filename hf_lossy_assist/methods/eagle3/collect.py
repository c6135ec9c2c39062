"""Collect training data for an EAGLE-3 drafter: texts written by the target. Training reads its states with one forward a text.

The network learns to predict this target, so the target itself answers the prompts ("EAGLE-3", §4, huggingface.co/papers/2503.01840).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafters.networks.eagle_network import default_layers
from ...models.hidden_state_hook import HiddenStateHook
from ...models.introspection import base_of, blocks_of, dtype_of
from ...training.jobs import SamplingSettings, continue_prompts, describe_run, refuse_blank
from ...training.processes import Models, Processes
from ...training.run_folder import RunFolder, Tell, name_units
from ...validation import MOST_NEW_TOKENS, MOST_ROWS, check_int


RECORD, SHARDS = "eagle3.json", "safetensors"


@dataclass(frozen=True)
class TextSettings(SamplingSettings):
    """Settings that determine all values in the data. A resumed run must have the same.

    Args:
        new_tokens: most tokens of an answer. batch_size: prompts at a time.
        layers: layers whose states the drafter reads, see `Eagle3Config.target_layers`; None: three, chosen by the number of the target's blocks.
    """

    new_tokens: int = 256
    layers: tuple[int, ...] | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("new_tokens", self.new_tokens, 2, MOST_NEW_TOKENS)
        check_int("batch_size", self.batch_size, 1, MOST_ROWS)
        for layer in self.layers or ():
            check_int("layers", layer, 0)


DEFAULTS = TextSettings()


def collect(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    out: str | Path,
    settings: TextSettings = DEFAULTS,
    *,
    resume: bool = False,
    source: str = "",
    processes: Processes | None = None,
) -> Path:
    """Let `target` answer `prompts`, and store the answers in the folder `out`.

    Each batch of prompts is a separate file; a run that was killed and resumed gives the same files. `processes` share the batches; None: those
    that `accelerate launch` started.

    Returns: `out`. Raises: `ValueError`, one line, for prompts or models that cannot be used, or settings that differ from those of the unfinished
    run.
    """
    refuse_blank(prompts)
    layers = settings.layers or default_layers(len(blocks_of(base_of(target)) or ()))
    HiddenStateHook(target, layers)  # refuses layers that the target does not have
    decided = asdict(settings) | {"layers": list(layers)}
    facts = describe_run(decided, {"target": target}, tokenizer, prompts, source) | {"dtype": dtype_of(target)}
    processes = Processes.started() if processes is None else processes

    def make(models: Models, number: int, tell: Tell) -> bytes:
        model, _, words = models
        chosen = prompts[number * settings.batch_size : (number + 1) * settings.batch_size]
        return safetensors.torch.save(answer(model, words, chosen, settings))

    count = -(-len(prompts) // settings.batch_size)
    with RunFolder.opened(out, RECORD, facts, resume=resume, processes=processes) as run:
        run.write_units(name_units(count, SHARDS), make, (target, None, tokenizer), settings.seed)
        processes.on_first(lambda: run.part.rename(run.out))
    return run.out


def answer(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], settings: TextSettings
) -> dict[str, torch.Tensor]:
    """Return the content of one file: the prompts with their answers, end tokens included, concatenated, and their lengths."""
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    answers = continue_prompts(target, tokenizer, ids, settings.new_tokens, settings.decoding())
    texts = [prompt + new for prompt, new in zip(ids, answers, strict=True)]
    return {
        "ids": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "prompts": torch.tensor([len(prompt) for prompt in ids], dtype=torch.int32),
    }
