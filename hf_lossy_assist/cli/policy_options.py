"""`--policy` and the options beside it. Which option goes with which method follows from the parameters of its recipe."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_lossy_assist as hla

from ..registry import Method, Names
from ..registry import find_method as method
from ..registry import list_entries as entries
from ..validation import LONGEST_DRAFT, check_int
from .made_with import parts_in
from .options import TARGET, load_companion


# (target, draft, tokenizer, the companion where none is named) → policy
Finish = Callable[[Any, Any, Any, "str | None"], "hla.LossyPolicy | None"]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The options as they were typed; each but `policy` and `fallback` is a parameter of some method's recipe."""

    policy: str
    head: str | None = None
    threshold: float | None = None
    window: int | None = None
    profile: str | None = None
    companion: str | None = None
    gamma: int | None = None
    fallback: bool = False

    def check(self) -> None:
        """Refuse an option that this policy has no use for."""
        check_int("--gamma", 1 if self.gamma is None else self.gamma, 1, LONGEST_DRAFT)
        for name in ("head", "threshold", "window", "profile", "companion", "gamma"):
            takers = [m.name for m in entries("method") if name in m.parameters]
            if getattr(self, name) is not None and self.policy not in takers:
                raise ValueError(f"--{name} is for --policy {' or '.join(takers)}, not {self.policy!r}")
        if self.fallback and self.policy == TARGET:
            raise ValueError("--fallback switches drafting off, and --policy target has none: leave it out")

    def read(self, demo_models: bool) -> tuple[Finish, list[Any]]:
        """Load heads and profiles, and give them beside what is left, which needs the models: a companion.

        Args:
            demo_models: the demo's models run, so its head, profile and companion stand in for those that are not named.

        Raises: `ValueError`, one line, for what is missing and for what cannot be loaded.
        """
        self.check()
        if self.policy == TARGET:
            return lambda *models: None, []
        if self.policy in Names("method") and method(self.policy).needs:
            return self._of_method(method(self.policy), demo_models)
        policy = self._of_text()
        return lambda *models: self._finished(policy), [*parts_in(policy)]

    def _of_method(self, found: Method, demo_models: bool) -> tuple[Finish, list[Any]]:
        from ..policy.parse import make_named_policy as of_name

        for need in found.needs:
            if getattr(self, need) is None and not demo_models:
                made_by = "hf-lossy profile" if "profile" in found.needs else "hf-lossy fit"
                raise ValueError(
                    f"--policy {found.name} needs --{need} for models of your own: a folder or org/name ({made_by})"
                )
        beside: dict[str, Any] = {}
        if "head" in found.needs:
            beside["head"] = hla.demo.head(found.name) if self.head is None else hla.Head.from_pretrained(self.head)
        if "profile" in found.needs:
            beside["profile"] = (
                hla.demo.profile() if self.profile is None else hla.Profile.from_pretrained(self.profile)
            )
        given = {"threshold": self.threshold, "window": self.window, "gamma": self.gamma}
        settings = {name: value for name, value in given.items() if value is not None}
        if "companion" not in found.needs:
            policy = of_name(found.name, beside, **settings)
            return lambda *models: self._finished(policy), [*beside.values()]

        def finish(target: Any, draft: Any, tokenizer: Any, usual: str | None) -> "hla.LossyPolicy | None":
            companion = load_companion(self.companion or usual, target, draft, tokenizer)
            return self._finished(of_name(found.name, {**beside, "companion": companion}, **settings))

        return finish, [*beside.values()]

    def _of_text(self) -> "hla.LossyPolicy":
        from ..policy.short_form import is_short_form

        text = self.policy
        on_the_hub = text.count("/") == 1 and not text.endswith(".json") and not text.lstrip().startswith("{")
        if on_the_hub and not is_short_form(text) and not Path(text).exists():
            return hla.LossyPolicy.from_pretrained(text)
        return hla.as_policy(text)

    def _finished(self, policy: "hla.LossyPolicy") -> "hla.LossyPolicy":
        return policy.with_fallback() if self.fallback else policy
