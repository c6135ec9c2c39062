"""Collect training data for an EAGLE-3 drafter: texts written by the target, its hidden states, and its likeliest tokens.

The network learns to predict this target, so the target itself answers the prompts ("EAGLE-3", §4, huggingface.co/papers/2503.01840).
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
from ...models.introspection import base_of, blocks_of, dtype_of
from ...training.jobs import SamplingSettings, continue_prompts, describe_run, refuse_blank
from ...training.processes import Models, Processes
from ...training.run_folder import RunFolder, Tell, name_units
from ...validation import MOST_NEW_TOKENS, MOST_ROWS, check_flag, check_int


RECORD, SHARDS = "eagle3.json", "safetensors"
MOST_LIKELY = 1024  # most tokens per position whose probabilities can be stored


@dataclass(frozen=True)
class TextSettings(SamplingSettings):
    """Settings that determine all values in the data. A resumed run must have the same.

    Args:
        new_tokens: most tokens of an answer. batch_size: prompts at a time.
        layers: layers whose states the drafter reads, see `Eagle3Config.target_layers`; None: three, chosen by the number of the target's blocks.
        likely: number of likeliest tokens at each position whose probabilities the drafter learns.
        states: store the states on disk, 2 bytes per value; False: the target recomputes them whenever `fit` reads them.
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
    processes: Processes | None = None,
) -> Path:
    """Let `target` answer `prompts`, and store the answers with its states in the folder `out`.

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
        hook = HiddenStateHook(model, layers)
        chosen = prompts[number * settings.batch_size : (number + 1) * settings.batch_size]
        return safetensors.torch.save(answer(model, words, chosen, settings, hook, tell))

    count = -(-len(prompts) // settings.batch_size)
    with RunFolder.opened(out, RECORD, facts, resume=resume, processes=processes) as run:
        run.write_units(name_units(count, SHARDS), make, (target, None, tokenizer), settings.seed)
        processes.on_first(lambda: run.part.rename(run.out))
    return run.out


def answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    settings: TextSettings,
    hook: HiddenStateHook,
    tell: Tell,
) -> dict[str, torch.Tensor]:
    """Return the content of one file: the prompts with their answers, end tokens included, concatenated, and what was recorded."""
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
    """Records, inside `with recorder:`, the states and likeliest next tokens of each forward of `generate`.

    For a prompt it records the states of all positions, but the likeliest tokens after its last one only: a drafter learns only answers.
    """

    def __init__(self, target: PreTrainedModel, hook: HiddenStateHook, likely: int, steps: int, tell: Tell):
        """Take `steps`: the most forwards; `tell` is called with the share of them that is done."""
        self._target, self._hook, self._likely, self._most, self._tell = target, hook, likely, steps, tell
        self._states: list[torch.Tensor] = []  # (B, Q, layers · H) of each forward, bfloat16
        self._tokens: list[torch.Tensor] = []  # (B, likely) after the last position of each forward
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
        """Return for each text, whose first `prompts` tokens are its prompt's, `states` (T, layers · H), `likely` and `probs` (T, likely).

        Positions that were not recorded are zeros: the last one, and in `likely` and `probs` those of the prompt except its last.
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
