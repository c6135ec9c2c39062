"""What a draft step costs beside a step of the target, measured."""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from ...drafters.hidden_state import HiddenStateDrafter
from ...models.compat import CACHE, cache_of
from ...models.introspection import base_of, vocabulary_of


WARM_UP = 3  # a prefill and two steps


@torch.no_grad()
def measured_ratio(target: Any, draft: Any, prompt: torch.Tensor, repeats: int = 12) -> float:
    """Median seconds of a cached one-token forward of the draft ÷ that of the target, taken in turn."""
    seconds: dict[str, list[float]] = {"target": [], "draft": []}
    limit = len(prompt) + repeats + WARM_UP
    of_draft = (
        _drafted(draft, target, prompt, limit) if isinstance(draft, HiddenStateDrafter) else _steps(draft, prompt)
    )
    steps = {"target": _steps(target, prompt), "draft": of_draft}
    for _ in range(repeats + WARM_UP):
        for name, each in steps.items():
            began = time.perf_counter()
            next(each)
            seconds[name].append(time.perf_counter() - began)
    return median(seconds["draft"][WARM_UP:]) / median(seconds["target"][WARM_UP:])


def _steps(model: Any, prompt: torch.Tensor) -> Iterator[None]:
    """The prompt's forward, then one token a step, without end."""
    base, cache, ids = base_of(model), None, prompt
    while True:
        tokens = ids[None].to(base.get_input_embeddings().weight.device)
        out = base(input_ids=tokens, **{CACHE: cache}, use_cache=True)
        out.logits[0, -1, 0].item()  # waits for the device
        cache, ids = cache_of(out), prompt[-1:]
        yield


def _drafted(drafter: HiddenStateDrafter, target: Any, prompt: torch.Tensor, limit: int) -> Iterator[None]:
    """The same of a drafter on the target's states, up to `limit` tokens."""
    base = base_of(target)
    ids, reader = prompt[None].to(base.get_input_embeddings().weight.device), drafter.hook(target)
    with reader:
        base(input_ids=ids[:, :-1], use_cache=False)
        states = reader.take()
    assert states is not None, "the target has just run"
    model = drafter.make_model(target, 1, limit, vocabulary_of(target))
    model.learn(states, [len(prompt) - 1])
    feed = ids[:, 1:]
    while True:
        model.feed(feed, [feed.shape[1]], keep=1)[0, -1, 0].item()
        feed = ids[:, -1:]
        yield
