"""The form of what is saved and shared: a folder with a JSON file, tensors with their SHA-256 in it where there are any, and a card."""

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from typing_extensions import Self

from ..validation import one_line, shown
from .cards import save_card
from .files import JSONObject, format_json, new_folder, read_bytes, read_object
from .hub import AGAIN, fetch, upload


class Artifact:
    """The base class of policies, heads and profiles: `save_pretrained` and `push_to_hub`. A subclass has `write` and `card`."""

    kind: ClassVar[str]

    def write(self, folder: Path) -> None:
        """Write the files without the card. Raises: `ValueError`, one line, if they could not be read back."""
        raise NotImplementedError

    def card(self) -> ModelCard:
        """Return README.md."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the files and README.md into a folder, all or nothing. A README.md that is there stays."""
        with new_folder(save_directory) as folder:
            self.write(folder)
            save_card(self.card(), folder, Path(save_directory))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Upload the files of `save_pretrained`; return the commit's URL."""
        message = commit_message or f"Upload {self.kind} with hf_lossy_assist"
        with tempfile.TemporaryDirectory() as folder:
            self.write(Path(folder))
            save_card(self.card(), Path(folder), Path(folder))
            return upload(Path(folder), repo_id, message, private=private, token=token, revision=revision)


class TensorArtifact(Artifact):
    """The base class of heads and profiles, each of a JSON file and a safetensors file.

    A subclass names the two files and the JSON's entry with the SHA-256, and has `facts`, `tensors`, `card` and `build`.
    """

    facts_file: ClassVar[str]
    tensors_file: ClassVar[str]
    checksum: ClassVar[str]
    source: str | None  # where it was loaded from or saved to: its name in a policy's JSON form

    def facts(self) -> JSONObject:
        """Return the facts, without the SHA-256."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        raise NotImplementedError

    @classmethod
    def build(cls, facts: JSONObject, tensors: Mapping[str, torch.Tensor], where: str) -> Self:
        """Make one of the content of the two files; `where` names them in warnings."""
        raise NotImplementedError

    def write(self, folder: Path) -> None:
        data = safetensors.torch.save(self.tensors())
        facts = self.facts() | {self.checksum: hashlib.sha256(data).hexdigest()}
        (folder / self.tensors_file).write_bytes(data)
        (folder / self.facts_file).write_text(format_json(facts), encoding="utf-8")
        self.read(folder)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the two files and README.md into a folder, all or nothing. A README.md that is there stays."""
        super().save_pretrained(save_directory)
        self.source = str(save_directory)

    @classmethod
    def from_pretrained(cls, source: str | Path, *, subfolder: str = "", **kwargs: Any) -> Self:
        """Load from a folder or from the Hub (`org/name`, `org/name@revision`).

        `kwargs`: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`. Raises: `ValueError`,
        one line, for files that are missing, damaged or not safetensors; `huggingface_hub`'s errors for the repository.
        """
        names = [str(Path(subfolder, name)) for name in (cls.facts_file, cls.tensors_file)]
        artifact = cls.read(fetch(str(source), names, **kwargs) / subfolder)
        artifact.source = str(source)
        if not isinstance(artifact, cls):
            raise ValueError(f"{source} holds a {type(artifact).__name__}, not a {cls.__name__}")
        return artifact

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return what the two files of a folder hold."""
        facts_file, tensors_file = folder / cls.facts_file, folder / cls.tensors_file
        facts, data = read_object(facts_file), read_bytes(tensors_file)
        if hashlib.sha256(data).hexdigest() != facts.pop(cls.checksum, None):
            raise ValueError(
                f"{tensors_file} is not the file that {facts_file.name} was saved with as a {cls.kind} (SHA-256 differs): save it "
                f"again, or download it again ({AGAIN})"
            )
        try:
            artifact = cls.build(facts, safetensors.torch.load(data), str(facts_file))
        except (KeyError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
            reason = shown(error.args[0]) + " is missing or unknown" if isinstance(error, KeyError) else error
            raise ValueError(f"{facts_file} and {tensors_file.name}: {one_line(reason, 300)}") from None
        artifact.source = str(folder)
        return artifact
