"""What `collect` wrote, read back: texts, and what the target had at each of their places."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open

from ...models.hidden_state_hook import HiddenStateHook
from ...models.identity import ModelIdentity, check_weights, dtype_of
from ...training.finished import check_entries
from ...training.resumable import compute_key, name_shard, read_part, read_record
from ...validation import check_int, shown
from .collect import RECORD, SHARDS, CollectSettings
from .heard import states_of


def _check_ids(tensors: dict[str, torch.Tensor], vocabulary: int, where: Path) -> None:
    """Refuse ids that the target does not have, and texts that are not as long as the file says."""
    for name in ("ids", "likely"):
        values = tensors[name]
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < vocabulary:
            raise ValueError(
                f"{where}: {name} has token ids from {int(values.min())} to {int(values.max())}, and the target has 0 to {vocabulary - 1}: "
                "collect again"
            )
    lengths, prompts = tensors["lengths"], tensors["prompts"]
    if int(lengths.sum()) != len(tensors["ids"]) or not ((prompts >= 1) & (prompts <= lengths)).all():
        raise ValueError(f"{where}: the lengths of its texts are not those of their tokens: collect again")


@dataclass(frozen=True)
class Batch:
    """Texts of one batch, padded on the right."""

    ids: torch.Tensor  # (B, T) int64
    states: torch.Tensor  # (B, T, layers · H)
    likely: torch.Tensor  # (B, T, k) int64: ids of the likeliest tokens behind each place
    probs: torch.Tensor  # (B, T, k) float32: their probabilities; 0 behind a text's end
    lengths: torch.Tensor  # (B,)
    prompts: torch.Tensor  # (B,) how many tokens are the prompt's


def facts_of(folder: Path) -> dict[str, Any]:
    """What a collection says of itself. Raises: `ValueError`, one line, where a folder is none, unfinished or changed."""
    record = folder / RECORD
    if not record.is_file():
        unfinished = Path(f"{folder}.partial").is_dir()
        hint = f" ({folder}.partial is unfinished: hf-lossy collect --resume)" if unfinished else ""
        raise ValueError(f"{folder} is no data of hf-lossy collect --for eagle3: no {RECORD} in it{hint}")
    facts = read_record(record)
    check_entries(
        facts, {"settings": dict, "target": dict, "target_weights": str, "tokenizer_hash": str, "dtype": str, "prompts": int, "prompts_sha256": str, "source": str}, record
    )  # fmt: skip
    try:
        settings = CollectSettings(**facts["settings"] | {"layers": tuple(facts["settings"].get("layers") or ())})
        check_int("prompts", facts["prompts"], 1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{record}: {error}: collect again") from None
    if not settings.layers:
        raise ValueError(f"{record} does not say which layers' states it is about: collect again")
    return facts


def target_of(folder: str | Path) -> str:
    """The name of the target that wrote what is in a folder. Raises: as `facts_of`."""
    return ModelIdentity.from_dict(facts_of(Path(folder))["target"]).id


class Texts:
    """The texts of a folder; of each one its tokens are in memory, and the rest is read from the file, or worked out by the target, when needed."""

    def __init__(self, folder: str | Path, target: Any):
        """`target`: the model that wrote them. Raises: `ValueError`, one line, for another model or damaged files."""
        self.folder = Path(folder)
        self.facts = facts_of(self.folder)
        self.settings, key = self.facts["settings"], compute_key(self.folder / RECORD)
        recorded, here = ModelIdentity.from_dict(self.facts["target"]), ModelIdentity.of(target)
        if (conflict := recorded.conflict(here)) is not None:
            raise ValueError(f"{self.folder} was collected with the target {recorded}, and this is {here}: {conflict}")
        self._doubt(target)
        self.target, self.layers = target, tuple(self.settings["layers"])
        self._places: list[tuple[Path, int]] = []  # file and first token of each text
        self.ids: list[torch.Tensor] = []
        self.prompts: list[int] = []
        for number in range(-(-self.facts["prompts"] // self.settings["batch_size"])):
            file = self.folder / name_shard(number, SHARDS)
            data = read_part(file, key)
            if data is None:
                raise ValueError(f"{file} is missing: collect again")
            tensors = safetensors.torch.load(data)
            _check_ids(tensors, recorded.vocab_size, file)
            start = 0
            for ids, prompt in zip(
                tensors["ids"].split(tensors["lengths"].tolist()), tensors["prompts"].tolist(), strict=True
            ):
                self._places.append((file, start))
                self.ids.append(ids.long())
                self.prompts.append(prompt)
                start += len(ids)
        self._reader = None if self.settings["states"] else HiddenStateHook(target, self.layers)

    def _doubt(self, target: Any) -> None:
        """Refuse a target with other weights in the same precision, whose states and words these are not; warn of one in another precision."""
        there, own = self.facts["dtype"], dtype_of(target)
        made, instead = f"{self.folder} was collected", "use the same, or collect again"
        if check_weights(self.facts["target_weights"], there, target, "target", made, instead):
            return
        warnings.warn(
            f"{self.folder} was collected in {shown(there, 30)} and the target here computes in {shown(own)}: whether their weights are the same cannot be "
            "seen, and its answers may be others",
            stacklevel=3,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def answered(self, numbers: Sequence[int]) -> int:
        """Tokens that the target wrote in these texts."""
        return sum(len(self.ids[number]) - self.prompts[number] for number in numbers)

    def counts(self, vocabulary: int) -> torch.Tensor:
        """How often the target wrote each token, (vocabulary,)."""
        out = torch.zeros(vocabulary, dtype=torch.long)
        for ids, prompt in zip(self.ids, self.prompts, strict=True):
            out += torch.bincount(ids[prompt:], minlength=vocabulary)
        return out

    def batch(self, numbers: Sequence[int], longest: int) -> Batch:
        """These texts, of each the first `longest` tokens."""
        found = [self._read(number, min(len(self.ids[number]), longest)) for number in numbers]

        def padded(name: str) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence([its[name] for its in found], batch_first=True)

        return Batch(
            padded("ids"), padded("states"), padded("likely").long(), padded("probs").float(),
            torch.tensor([len(its["ids"]) for its in found]), torch.tensor([self.prompts[number] for number in numbers]),
        )  # fmt: skip

    def _read(self, number: int, length: int) -> dict[str, torch.Tensor]:
        file, start = self._places[number]
        names = ("likely", "probs") if self._reader is not None else ("states", "likely", "probs")
        with safe_open(str(file), framework="pt") as tensors:
            out = {name: tensors.get_slice(name)[start : start + length] for name in names}
        out["ids"] = self.ids[number][:length]
        if self._reader is not None:
            out["states"] = states_of(self._reader, self.target, out["ids"])
        return out
