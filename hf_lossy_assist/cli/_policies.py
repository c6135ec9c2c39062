"""`--policy` and the options that modify it, read into a function that completes the policy once the models are loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import hf_lossy_assist as hla

from ..registry import Method, Names, find_method, list_entries
from ..validation import LONGEST_DRAFT
from . import _models, _options


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ._models import Draft, Part

Finish = Callable[
    ["PreTrainedModel", "Draft", "PreTrainedTokenizerBase"], "hla.LossyPolicy | None"
]  # takes target, draft and tokenizer


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """`--policy` and the options that modify it. A method's recipe determines which of them it takes."""

    policy: Annotated[
        str, f"method, rule or stop by name, JSON, file, folder or Hub id; `{_options.TARGET}` for no draft"
    ] = "strict"
    head: Annotated[
        str | None, "head for sprinter, autojudge or specdec: a folder or Hub id (default: the demo's)"
    ] = None
    threshold: Annotated[float | None, "decision threshold of the head (default: the head's, or the method's)"] = None
    window: Annotated[int | None, "draft length for autojudge (default: 32)"] = None
    profile: Annotated[str | None, "profile for sv: a folder or Hub id (default: the demo's)"] = None
    companion: _options.Companion = None
    gamma: Annotated[int | None, (1, LONGEST_DRAFT), "draft length for sv (default: the profile's)"] = None
    drafter: Annotated[
        str | None,
        "what drafts instead of the assistant: suffix, composite, auto, auto+FOLDER, …, or JSON with its name",
    ] = None
    compile_rounds: Annotated[bool, "--compile", "compile the rounds; the first texts wait for it"] = False
    fallback: Annotated[bool, "--fallback", "stop drafting while it does not pay"] = False

    def check(self) -> None:
        """Refuse an option that this policy does not take."""
        for name in ("head", "threshold", "window", "profile", "companion", "gamma"):
            takers = [m.name for m in list_entries("method") if name in m.parameters]
            if getattr(self, name) is not None and self.policy not in takers:
                raise ValueError(f"--{name} is for --policy {' or '.join(takers)}, not {self.policy!r}")
        if self.fallback and self.policy == _options.TARGET:
            raise ValueError("--fallback switches drafting off, and --policy target has none: leave it out")

    def read(self, demo_models: bool) -> tuple[Finish, list["Part"]]:
        """Load heads and profiles; return them with a function that completes the policy once the models are loaded (a companion).

        Args:
            demo_models: the demo's models are used, so its head, profile and companion are the defaults.

        Raises: `ValueError`, one line, for missing options and for files that cannot be loaded.
        """
        self.check()
        if self.policy == _options.TARGET:
            return lambda *models: None, []
        if self.policy in Names("method") and find_method(self.policy).needs:
            return self._read_method(find_method(self.policy), demo_models)
        policy = self._read_text()
        return lambda *models: self._add_fallback(policy), [*policy.saved().values()]

    def _read_method(self, found: Method, demo_models: bool) -> tuple[Finish, list["Part"]]:
        from ..policy.parse import make_named_policy

        for need in found.needs:
            if getattr(self, need) is None and not demo_models:
                made_by = "hf-lossy profile" if "profile" in found.needs else "hf-lossy fit"
                raise ValueError(
                    f"--policy {found.name} needs --{need} for models of your own: a folder or org/name ({made_by})"
                )
        beside: dict[str, Part] = {}
        if "head" in found.needs:
            beside["head"] = hla.demo.head(found.name) if self.head is None else hla.Head.from_pretrained(self.head)
        if "profile" in found.needs:
            beside["profile"] = (
                hla.demo.profile() if self.profile is None else hla.Profile.from_pretrained(self.profile)
            )
        settings = {"threshold": self.threshold, "window": self.window, "gamma": self.gamma}
        settings = {name: value for name, value in settings.items() if value is not None}
        if "companion" not in found.needs:
            policy = make_named_policy(found.name, beside, **settings)
            return lambda *models: self._add_fallback(policy), [*beside.values()]

        def finish(
            target: "PreTrainedModel", draft: "Draft", tokenizer: "PreTrainedTokenizerBase"
        ) -> "hla.LossyPolicy | None":
            companion = _models.load_companion(self.companion, target, draft, tokenizer)
            return self._add_fallback(make_named_policy(found.name, {**beside, "companion": companion}, **settings))

        return finish, [*beside.values()]

    def _read_text(self) -> "hla.LossyPolicy":
        from ..policy.parse import is_short_form

        text = self.policy
        on_the_hub = text.count("/") == 1 and not text.endswith(".json") and not text.lstrip().startswith("{")
        if on_the_hub and not is_short_form(text) and not Path(text).exists():
            return hla.LossyPolicy.from_pretrained(text)
        return hla.as_policy(text)

    def _add_fallback(self, policy: "hla.LossyPolicy") -> "hla.LossyPolicy":
        return policy.with_fallback() if self.fallback else policy
