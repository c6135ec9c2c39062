"""Collect what an EAGLE-3 drafter is trained on: texts that the target wrote, its hidden states there, and its likeliest tokens.

The network learns this target's words, so the target answers the prompts itself ("EAGLE-3", §4, huggingface.co/papers/2503.01840).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from ...drafters.networks.eagle_network import default_layers
from ...models.hidden_state_hook import HiddenStateHook
from ...models.identity import dtype_of
from ...models.introspection import base_of, blocks_of
from ...training.jobs import SamplingSettings, continue_prompts, describe_run, refuse_blank
from ...training.processes import Processes
from ...training.resumable import Tell, folders, name_shards, start_run, write_shards
from ...validation import MOST_NEW_TOKENS, MOST_ROWS, check_flag, check_int


RECORD, SHARDS = "eagle3.json", "safetensors"
MOST_LIKELY = 1024  # tokens of each place whose probabilities are written


@dataclass(frozen=True)
class TextSettings(SamplingSettings):
    """Settings that decide every number of the data. A resumed run must have the same.

    Args:
        new_tokens: most tokens of an answer. batch_size: prompts at a time.
        layers: whose states the drafter reads, as in `Eagle3Config.target_layers`; None: three, by the number of the target's blocks.
        likely: the drafter learns the probabilities of so many of the likeliest tokens of each place.
        states: keep the states on disk, 2 bytes a number; False: `fit` has the target compute them again each time.
    """

    new_tokens: int = 256
    layers: tuple[int, ...] | None = None
    likely: int = 32
    states: bool = True
    batch_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("new_tokens", self.new_tokens, 2, MOST_NEW_TOKENS)
        check_int("likely", self.likely, 1, MOST_LIKELY)
        check_int("batch_size", self.batch_size, 1, MOST_ROWS)
        check_flag("states", self.states)
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
) -> Path:
    """Have `target` answer `prompts`, and keep the answers with its states in the folder `out`.

    Each batch of prompts is a file of its own; a run that was killed and resumed gives the same files. Under `accelerate launch` the
    processes share the batches.

    Returns: `out`. Raises: `ValueError`, one line, for prompts or models that cannot be used, or settings that differ from those of the
    unfinished run.
    """
    refuse_blank(prompts)
    out, part = folders(out)
    layers = settings.layers or default_layers(len(blocks_of(base_of(target)) or ()))
    hook = HiddenStateHook(target, layers)  # which refuses layers that the target does not have
    decided = asdict(settings) | {"layers": list(layers)}
    facts = describe_run(decided, {"target": target}, tokenizer, prompts, source) | {"dtype": dtype_of(target)}
    processes = Processes.started()

    def make(number: int, tell: Tell) -> bytes:
        chosen = prompts[number * settings.batch_size : (number + 1) * settings.batch_size]
        return safetensors.torch.save(answer(target, tokenizer, chosen, settings, hook, tell))

    count = -(-len(prompts) // settings.batch_size)
    with start_run(out, part, facts, RECORD, resume=resume, processes=processes) as unfinished:
        if unfinished:
            write_shards(part / RECORD, name_shards(count, SHARDS), make, processes, settings.seed, target.device)
            processes.on_first(lambda: part.rename(out))
    return out


def answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    settings: TextSettings,
    hook: HiddenStateHook,
    tell: Tell,
) -> dict[str, torch.Tensor]:
    """Return the content of one file: the prompts with their answers, end tokens included, one after the other, and what was recorded."""
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    with TargetRecorder(target, hook, settings.likely, settings.new_tokens, tell) as recorder:
        answers = continue_prompts(target, tokenizer, ids, settings.new_tokens, settings.decoding())
    texts = [prompt + new for prompt, new in zip(ids, answers, strict=True)]
    parts = recorder.take(texts, list(map(len, ids)))
    names = [name for name in parts[0] if settings.states or name != "states"]
    return {
        "ids": torch.cat([torch.tensor(text, dtype=torch.int32) for text in texts]),
        "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "prompts": torch.tensor([len(prompt) for prompt in ids], dtype=torch.int32),
        **{name: torch.cat([part[name] for part in parts]) for name in names},
    }


class TargetRecorder:
    """Inside `with recorder:` each forward of `generate` leaves its states and its likeliest next tokens here.

    Of a prompt the states of all places are recorded, and the likeliest tokens after its last one: a drafter learns answers alone.
    """

    def __init__(self, target: PreTrainedModel, hook: HiddenStateHook, likely: int, steps: int, tell: Tell):
        """Take `steps`: most forwards there can be, of which `tell` gets the share that is done."""
        self._target, self._hook, self._likely, self._most, self._tell = target, hook, likely, steps, tell
        self._states: list[torch.Tensor] = []  # (B, Q, layers · H) of each forward, bfloat16
        self._tokens: list[torch.Tensor] = []  # (B, likely) after the last place of each forward
        self._probs: list[torch.Tensor] = []
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> "TargetRecorder":
        self._hook.__enter__()
        self._handle = self._target.register_forward_hook(self._record)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._handle is not None, "entered"
        self._handle.remove()
        self._hook.__exit__(*error)

    def _record(self, module: torch.nn.Module, args: object, output: ModelOutput) -> None:
        states = self._hook.take_states()
        assert states is not None, "the target has just run"
        logits = output.logits[:, -1].float()
        top = logits.topk(min(self._likely, logits.shape[-1]), dim=-1)
        self._states.append(states.to(torch.bfloat16).cpu())
        self._tokens.append(top.indices.int().cpu())
        self._probs.append((top.values - logits.logsumexp(dim=-1, keepdim=True)).exp().half().cpu())
        self._tell(len(self._states) / self._most)

    def take(self, texts: Sequence[list[int]], prompts: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return of each text, whose first `prompts` tokens were given, `states` (T, layers · H), `likely` and `probs` (T, likely).

        Places without a forward have zeros: the last one, and in `likely` and `probs` the prompt's but its last.
        """
        states = torch.cat(self._states, dim=1)
        tokens, probs = torch.stack(self._tokens, dim=1), torch.stack(self._probs, dim=1)
        out = []
        for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            read, first = len(text) - 1, max(prompts) - prompt
            part = {
                "states": states.new_zeros(len(text), states.shape[-1]),
                "likely": tokens.new_zeros(len(text), tokens.shape[-1]),
                "probs": probs.new_zeros(len(text), probs.shape[-1]),
            }
            part["states"][:read] = states[row, first : first + read]
            part["likely"][prompt - 1 : read] = tokens[row, : read - prompt + 1]
            part["probs"][prompt - 1 : read] = probs[row, : read - prompt + 1]
            out.append(part)
        return out
