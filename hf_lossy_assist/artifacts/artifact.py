"""The form of what is saved and shared: facts in a JSON file, tensors in a safetensors file with its SHA-256 in the facts, a card."""

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
from .files import check_readable, format_json, new_folder
from .hub import AGAIN, fetch, upload
from .json_io import JSONObject, read_object


class Artifact:
    """The base class of heads and profiles: `save_pretrained`, `push_to_hub` and `from_pretrained`.

    A subclass names its two files and the facts' entry with the SHA-256, and has `facts`, `tensors`, `card` and `build`.
    """

    kind: ClassVar[str]
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

    def card(self) -> ModelCard:
        """Return README.md."""
        raise NotImplementedError

    @classmethod
    def build(cls, facts: JSONObject, tensors: Mapping[str, torch.Tensor], where: str) -> Self:
        """Make one of checked files; errors name `where`."""
        raise NotImplementedError

    def write(self, folder: Path) -> None:
        """Write the two files without a card. Raises: `ValueError`, one line, if `read` would refuse them."""
        data = safetensors.torch.save(self.tensors())
        with check_readable(f"this {self.kind}", folder):
            facts = self.facts() | {self.checksum: hashlib.sha256(data).hexdigest()}
            (folder / self.tensors_file).write_bytes(data)
            (folder / self.facts_file).write_text(format_json(facts), encoding="utf-8")
            self.read(folder / self.facts_file, folder / self.tensors_file)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the two files and README.md into a folder, all or nothing. A user's README.md there is kept."""
        with new_folder(save_directory) as folder:
            self.write(folder)
            save_card(self.card(), folder, Path(save_directory))
        self.source = str(save_directory)

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
        with tempfile.TemporaryDirectory() as made:
            self.write(Path(made))
            save_card(self.card(), Path(made), Path(made))
            return upload(Path(made), repo_id, message, private=private, token=token, revision=revision)

    @classmethod
    def from_pretrained(cls, source: str | Path, **kwargs: Any) -> Self:
        """Load from a folder or from the Hub (`org/name`, `org/name@revision`).

        `kwargs`: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, `subfolder`. Raises: `ValueError`,
        one line, for files that are missing, damaged or not safetensors; `huggingface_hub`'s errors for the repository.
        """
        made = cls.read(*fetch(str(source), (cls.facts_file, cls.tensors_file), **kwargs))
        made.source = str(source)
        if not isinstance(made, cls):
            raise ValueError(f"{source} holds a {type(made).__name__}, not a {cls.__name__}")
        return made

    @classmethod
    def read(cls, facts_file: Path, tensors_file: Path) -> Self:
        """Return what the two files hold."""
        facts = read_object(facts_file, f"the facts of a {cls.kind}")
        if cls.checksum not in facts:
            raise ValueError(f"{facts_file} is not that of a {cls.kind}: it has no entry {cls.checksum}")
        data = tensors_file.read_bytes()
        if hashlib.sha256(data).hexdigest() != facts.pop(cls.checksum):
            raise ValueError(
                f"{tensors_file} is not the file that {facts_file.name} was saved with (SHA-256 differs): save it again, or download it "
                f"again ({AGAIN})"
            )
        try:
            return cls.build(facts, safetensors.torch.load(data), str(facts_file))
        except (KeyError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
            reason = shown(error.args[0]) + " is missing or unknown" if isinstance(error, KeyError) else error
            raise ValueError(f"{facts_file} and {tensors_file.name}: {one_line(reason, 300)}") from None
