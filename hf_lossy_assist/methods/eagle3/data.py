"""Read the data of `collect`: texts, and by the target's forwards its states and likeliest tokens at each position."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from ...artifacts.identity import ModelIdentity, check_weights
from ...artifacts.json_io import JSONObject
from ...models.hidden_state_hook import HiddenStateHook
from ...models.introspection import dtype_of
from ...training.run_folder import name_units, name_unreadable, open_dataset
from ...validation import shown
from .collect import RECORD, SHARDS, TextSettings


LIKELY = 32  # likeliest tokens at each position whose probabilities a drafter learns
FORMER = ("states", "likely")  # settings of earlier versions, whose data held the target's states


@dataclass(frozen=True)
class TextBatch:
    """Texts of one batch, padded on the right."""

    ids: torch.Tensor  # (B, T) int64
    states: torch.Tensor  # (B, T, layers · H)
    likely: torch.Tensor  # (B, T, k) int64: ids of the likeliest tokens after each position
    probs: torch.Tensor  # (B, T, k) float32: their probabilities; 0 after a text's end
    lengths: torch.Tensor  # (B,)
    prompts: torch.Tensor  # (B,) length of each prompt


def read_facts(folder: Path) -> JSONObject:
    """Read the record of a collection. Raises: `ValueError`, one line, for a folder that is none, unfinished or changed."""
    facts = open_dataset(folder, RECORD, "hf-lossy collect --for eagle3")
    with name_unreadable(folder):
        settings = {name: value for name, value in facts["settings"].items() if name not in FORMER}
        TextSettings(**settings | {"layers": tuple(settings["layers"])})
    return facts


def read_target(folder: str | Path) -> str:
    """Return the name of the target that wrote a collection. Raises: see `read_facts`."""
    return ModelIdentity.from_dict(read_facts(Path(folder))["target"]).id


class TextDataset:
    """The texts of a folder, in memory; the target's states and probabilities are computed on demand."""

    def __init__(self, folder: str | Path, target: PreTrainedModel, likely: int = LIKELY):
        """`target`: the model that wrote them. `likely`: tokens at each position whose probabilities are read. Raises: `ValueError`, one line, for another model or damaged files."""
        self.folder = Path(folder)
        self.facts = read_facts(self.folder)
        self.settings = self.facts["settings"]
        recorded = ModelIdentity.from_dict(self.facts["target"])
        self._check_target(recorded, target)
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

    def _check_target(self, recorded: ModelIdentity, target: PreTrainedModel) -> None:
        """Refuse another target, or other weights in the same precision; warn of another precision."""
        given, dtype, made = ModelIdentity.of(target), self.facts["dtype"], f"{self.folder} was collected"
        if (conflict := recorded.conflict(given)) is not None:
            raise ValueError(f"{made} with the target {recorded}, and this is {given}: {conflict}")
        instead = "use the same, or collect again"
        if not check_weights(self.facts["target_weights"], dtype, target, "target", made, instead):
            warnings.warn(
                f"{made} in {shown(dtype, 30)} and the target here computes in {shown(dtype_of(target))}: whether their weights are the same "
                "cannot be seen, and its answers may be others",
                stacklevel=3,
            )

    def __len__(self) -> int:
        return len(self.ids)

    def count_answered(self, numbers: Sequence[int]) -> int:
        """Return the number of tokens that the target wrote in these texts."""
        return sum(len(self.ids[number]) - self.prompts[number] for number in numbers)

    def batch(self, numbers: Sequence[int], longest: int) -> TextBatch:
        """Return these texts, cut to their first `longest` tokens."""
        found = [self._read(number, min(len(self.ids[number]), longest)) for number in numbers]

        def pad(name: str) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence([text[name] for text in found], batch_first=True)

        lengths = torch.tensor([len(text["ids"]) for text in found])
        prompts = torch.tensor([self.prompts[number] for number in numbers])
        return TextBatch(pad("ids"), pad("states"), pad("likely"), pad("probs"), lengths, prompts)

    @torch.no_grad()
    def _read(self, number: int, length: int) -> dict[str, torch.Tensor]:
        """Return the first `length` tokens of a text, with the target's states and likeliest next tokens by one forward."""
        ids = self.ids[number][:length]
        with self._hook:
            logits = self.target(ids[None].to(self.target.device), use_cache=False).logits[0].float()
            states = self._hook.take_states()
        assert states is not None, "the target has just run"
        probs, tokens = logits.softmax(dim=-1).topk(min(self.likely, logits.shape[-1]))
        return {"ids": ids, "states": states[0], "likely": tokens, "probs": probs}
