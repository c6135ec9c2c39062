"""What a target has at the places of the texts that it writes, kept while it writes them: reading them again would take as long once more."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...models.hidden_state_hook import HiddenStateHook


class Heard:
    """Inside `with heard:` each forward of `generate` leaves its states and its likeliest next tokens here.

    Of a prompt the states of all places are kept, and the likeliest tokens behind its last one: a drafter learns answers alone.
    """

    def __init__(self, target: Any, reader: HiddenStateHook, likely: int, steps: int, tell: Callable[[float], None]):
        """`steps`: most forwards there can be, of which `tell` gets the share that is done."""
        self._target, self._reader, self._likely, self._most, self._tell = target, reader, likely, steps, tell
        self._states: list[torch.Tensor] = []  # (B, Q, layers · H) of each forward, bfloat16
        self._tokens: list[torch.Tensor] = []  # (B, likely) behind the last place of each forward
        self._probs: list[torch.Tensor] = []
        self._handle: Any = None

    def __enter__(self) -> "Heard":
        self._reader.__enter__()
        self._handle = self._target.register_forward_hook(self._keep)
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.remove()
        self._reader.__exit__(*error)

    def _keep(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        states = self._reader.take()
        assert states is not None, "the target has just run"
        logits = output.logits[:, -1].float()
        top = logits.topk(min(self._likely, logits.shape[-1]), dim=-1)
        self._states.append(states.to(torch.bfloat16).cpu())
        self._tokens.append(top.indices.int().cpu())
        self._probs.append((top.values - logits.logsumexp(dim=-1, keepdim=True)).exp().half().cpu())
        self._tell(len(self._states) / self._most)

    def take(self, texts: Sequence[tuple[list[int], int]], width: int) -> list[dict[str, torch.Tensor]]:
        """Of each text (its ids, and how many are the prompt's): `states` (T, layers · H), `likely` (T, likely) and `probs` (T, likely).

        `width`: of the padded prompts. Places whose numbers nobody knows have zeros: the last one, which no forward read, and of `likely` and
        `probs` the prompt's but its last.
        """
        states = torch.cat(self._states, dim=1)
        tokens, probs = (
            torch.stack(self._tokens, dim=1),
            torch.stack(self._probs, dim=1),
        )  # place i: behind width − 1 + i
        out = []
        for row, (text, prompt) in enumerate(texts):
            there = len(text) - 1  # places that a forward read
            first = width - prompt
            answered = there - prompt + 1
            part = {
                "states": states.new_zeros(len(text), states.shape[-1]),
                "likely": tokens.new_zeros(len(text), tokens.shape[-1]),
                "probs": probs.new_zeros(len(text), probs.shape[-1]),
            }
            part["states"][:there] = states[row, first : first + there]
            part["likely"][prompt - 1 : there] = tokens[row, :answered]
            part["probs"][prompt - 1 : there] = probs[row, :answered]
            out.append(part)
        return out


@torch.no_grad()
def states_of(reader: HiddenStateHook, target: Any, ids: torch.Tensor) -> torch.Tensor:
    """The target's states at each place of a text `ids` (T,), worked out again: (T, layers · H) bfloat16."""
    with reader:
        target(ids[None].to(target.device), use_cache=False)
        states = reader.take()
    assert states is not None, "the target has just run"
    return states[0].to(torch.bfloat16).cpu()
