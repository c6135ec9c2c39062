"""Collect training data for an EAGLE-3 drafter: texts of the target, whose states training reads.

The network learns to predict this target, so the target itself answers the prompts ("EAGLE-3", §4, huggingface.co/papers/2503.01840).
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import safetensors.torch
import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...artifacts.files import write_bytes
from ...drafters.networks.eagle_network import default_layers
from ...models.hidden_state_hook import HiddenStateHook
from ...models.introspection import base_of, blocks_of, end_tokens
from ...setting_fields import check_bounds
from ...terminal import show
from ...training.jobs import SamplingSettings, check_models, continue_prompts, describe_run, refuse_blank
from ...training.processes import Models, Processes
from ...training.run_folder import RunFolder, Tell, name_units, name_unreadable, open_dataset
from ...validation import MOST_NEW_TOKENS, MOST_ROWS
from ..drafter_settings import LIKELY


RECORD, SHARDS = "eagle3.json", "safetensors"
ROOM = 1 << 30  # bytes of the disk that stored states leave free


@dataclass(frozen=True)
class TextSettings(SamplingSettings):
    """Settings that determine all values in the data. A resumed run must have the same."""

    new_tokens: Annotated[int, (2, MOST_NEW_TOKENS), "most tokens of an answer"] = 256
    # Layers whose states the drafter reads, see `Eagle3Config.target_layers`; None: three, chosen by the number of the target's blocks.
    layers: tuple[int, ...] | None = None
    batch_size: Annotated[int, (1, MOST_ROWS), "prompts at a time"] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self)


DEFAULTS = TextSettings()


def collect_texts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    out: str | Path,
    settings: TextSettings = DEFAULTS,
    *,
    resume: bool = False,
    source: str = "",
    processes: Processes | None = None,
    written: Sequence[str] = (),
) -> Path:
    """Let `target` answer `prompts`, and store the answers in the folder `out`.

    `written`: answers that it wrote before, one a prompt, up to the first end token. If none has one, those of fewer than `settings.new_tokens`
    tokens have ended.

    Each batch of prompts is a file; a run that was killed and resumed writes the same. `processes` share the batches; None: those that
    `accelerate launch` started.

    Returns: `out`. Raises: `ValueError`, one line, for prompts or models that cannot be used, or other settings than the unfinished run's.
    """
    refuse_blank(prompts)
    if not all(written):
        raise ValueError(f"prompt {list(written).index('') + 1} has no answer of the target, a `continuation`")
    end, ends = tokenizer.eos_token, end_tokens(target.generation_config)
    if tokenizer.eos_token_id in ends and not any(end in text for text in written):
        written = [text + end for text in written]
    layers = settings.layers or default_layers(len(blocks_of(base_of(target)) or ()))
    HiddenStateHook(target, layers)  # refuses layers that the target does not have
    decided = asdict(settings) | {"layers": list(layers)}
    pairs = list(zip(prompts, written, strict=True)) if written else prompts
    facts = describe_run(decided, {"target": target}, tokenizer, pairs, source)
    processes = Processes.started() if processes is None else processes

    def make(models: Models, index: int, tell: Tell) -> bytes:
        model, _, words = models
        chosen = slice(index * settings.batch_size, (index + 1) * settings.batch_size)
        return safetensors.torch.save(answer(model, words, prompts[chosen], settings, written[chosen]))

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
    written: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """Return one file: prompts with answers, end tokens included, concatenated, and lengths."""
    ids, limit = [tokenizer(prompt)["input_ids"] for prompt in prompts], settings.new_tokens
    if written:
        ends = end_tokens(target.generation_config)
        answers = []
        for begin, prompt, text in zip(ids, prompts, written, strict=True):
            tokens = tokenizer(prompt + text)["input_ids"]  # a space may be put before each text
            if tokens[: len(begin)] != begin:
                tokens = begin + tokenizer(text, add_special_tokens=False)["input_ids"]
            new = tokens[len(begin) :][:limit]
            answers.append(new[: next((n for n, token in enumerate(new, 1) if token in ends), limit)])
    else:
        answers = continue_prompts(target, tokenizer, ids, limit, settings.decoding())
    texts = [prompt + new for prompt, new in zip(ids, answers, strict=True)]
    return {
        "ids": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "prompts": torch.tensor([len(prompt) for prompt in ids], dtype=torch.int32),
    }


@dataclass(frozen=True)
class TextBatch:
    """Texts of one batch, padded on the right."""

    ids: torch.Tensor  # (B, T) int64
    states: torch.Tensor  # (B, T, layers · H)
    likely: torch.Tensor  # (B, T, k) int64: ids of the likeliest tokens after each position
    probs: torch.Tensor  # (B, T, k) float32: their probabilities; 0 after a text's end
    lengths: torch.Tensor  # (B,)
    prompts: torch.Tensor  # (B,) length of each prompt


class TextDataset:
    """The texts of a folder, in memory; the target's states and probabilities are computed on demand."""

    def __init__(self, folder: str | Path, target: PreTrainedModel, likely: int = LIKELY):
        """Take the `target` that wrote them. `likely`: tokens at each position whose probabilities are read.

        Raises: `ValueError`, one line, for another model or damaged files.
        """
        self.folder = Path(folder)
        self.facts = open_dataset(self.folder, RECORD, "hf-lossy collect --for eagle3")
        self.settings = self.facts["settings"]
        check_models(self.facts, {"target": target}, str(self.folder), "collect again")
        self.target, self.layers = target, tuple(self.settings["layers"])
        self.ids: list[torch.Tensor] = []
        self.prompts: list[int] = []
        for name in name_units(-(-self.facts["prompts"] // self.settings["batch_size"]), SHARDS):
            file = self.folder / name
            with name_unreadable(file), safe_open(str(file), framework="pt") as data:
                tensors = {name: data.get_tensor(name) for name in ("ids", "lengths", "prompts")}
            self.ids += tensors["ids"].long().split(tensors["lengths"].tolist())
            self.prompts += tensors["prompts"].tolist()
        self.likely, self._hook = likely, HiddenStateHook(target, self.layers)
        self.store: Path | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def count_answered(self, indices: Sequence[int]) -> int:
        """Return how many tokens of these texts the target wrote."""
        return sum(len(self.ids[index]) - self.prompts[index] for index in indices)

    def count_ended(self) -> int:
        """Return how many answers have an end token."""
        ends = end_tokens(self.target.generation_config)
        return sum(int(ids[-1]) in ends for ids in self.ids)

    def batch(self, indices: Sequence[int], longest: int) -> TextBatch:
        """Return these texts, cut to their first `longest` tokens."""
        texts = [self._read(index, min(len(self.ids[index]), longest)) for index in indices]

        def pad(name: str) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence([text[name] for text in texts], batch_first=True)

        lengths = torch.tensor([len(text["ids"]) for text in texts])
        prompts = torch.tensor([self.prompts[index] for index in indices])
        return TextBatch(pad("ids"), pad("states"), pad("likely"), pad("probs"), lengths, prompts)

    def store_in(self, folder: Path, longest: int) -> None:
        """Store what is read of each text in `folder`, for later epochs and a resumed run, if the disk has room."""
        tokens = sum(min(len(ids), longest) for ids in self.ids)
        needed = tokens * sum(tensor[0].nbytes for tensor in self._read(0, 2).values())
        folder.mkdir(parents=True, exist_ok=True)
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if shutil.disk_usage(folder).free + stored > needed + ROOM:
            self.store = folder
        else:
            show(f"states are read again in each epoch: the disk lacks room for their {needed / 1e9:.1f} GB")

    @torch.no_grad()
    def _read(self, index: int, length: int) -> dict[str, torch.Tensor]:
        """Return the first `length` tokens of a text, with the target's states in bfloat16 and likeliest next tokens."""
        ids, file = self.ids[index][:length], None if self.store is None else self.store / f"{index}.safetensors"
        if file is not None and file.exists():
            with name_unreadable(file):
                stored = safetensors.torch.load_file(file)
            if stored["ids"][:length].equal(ids):  # not another job's
                return {name: tensor[:length] for name, tensor in stored.items()}
        with self._hook:
            logits = self.target(ids[None].to(self.target.device), use_cache=False).logits[0].float()
            states = self._hook.take_states()
        assert states is not None, "the target has just run"
        probs, tokens = logits.softmax(dim=-1).topk(min(self.likely, logits.shape[-1]))
        # Copies, since a row of a tensor would be stored whole.
        read = {"ids": ids.clone(), "states": states[0].bfloat16(), "likely": tokens, "probs": probs}
        if file is not None:
            write_bytes(file, safetensors.torch.save(read))
        return read
