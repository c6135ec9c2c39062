"""An error or an interrupt at any place of a call: the caller's cache then goes on to the text of a fresh call."""

import copy
import itertools
from contextlib import contextmanager, suppress
from functools import cache, partial

import pytest
import torch
from support import eagle, small, tiny
from support.pairs import cover_pairs
from transformers import DynamicCache

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE


GREEDY = {"max_new_tokens": 10, "do_sample": False}
WIDTH, HELD = 12, 7  # tokens of the prompt, and those that the cache holds already
NEVER = small.llama(9)  # drafts tokens that are all rejected
TARGETS = {"llama": small.llama, "sliding window": lambda: tiny.build("mistral")}  # of 8 tokens
DRAFTS = {
    "draft model": lambda target: {"assistant_model": small.near(target, 0.3)},
    "rejected draft": lambda target: {"assistant_model": NEVER},
    "lookup": lambda target: {"prompt_lookup_num_tokens": 3},
    "EAGLE-3": lambda target: {"assistant_model": eagle.drafter(target)},
    "early exit": lambda target: {"assistant_early_exit": 1},
}
CACHES = {
    "filled": lambda target: filled(DynamicCache(config=target.config), target),
    "empty": lambda target: DynamicCache(config=target.config),
    "without config": lambda target: DynamicCache(),
}


def filled(cache, target):
    with torch.no_grad():
        target(prompt()[:, :HELD], use_cache=True, **{CACHE: cache})
    return cache


def prompt():
    return small.one(WIDTH, seed=4)["input_ids"] % 90 + 4


class Raising(small.Listener):
    """A processor, a criterion and a streamer that raises when a text has so many tokens."""

    def __init__(self, kind, length):
        super().__init__()
        self.kind, self.length = kind, length

    def __call__(self, ids, scores, **kwargs):
        if ids.shape[1] >= self.length:
            raise self.kind
        return scores

    def put(self, value):
        super().put(value)
        if len(self.heard) >= self.length:
            raise self.kind

    def end(self):
        raise self.kind


@contextmanager
def raising_forward(module, kind, number):
    """Raise in the module's forward of that number, between two blocks of the model."""
    left = iter(range(number - 1))

    def raise_(*args):
        if next(left, None) is None:
            raise kind

    hook = module.register_forward_pre_hook(raise_)
    try:
        yield {}
    finally:
        hook.remove()


@contextmanager
def raising_function(name, kind, number):
    made = Raising(kind, WIDTH + number)

    def criterion(ids, scores, **kwargs):
        made(ids, scores)
        return torch.zeros(len(ids), dtype=torch.bool)

    yield {name: {"streamer": made, "logits_processor": [made], "stopping_criteria": [criterion]}[name]}


PLACES = {
    "processor": lambda target, draft: partial(raising_function, "logits_processor"),
    "criterion": lambda target, draft: partial(raising_function, "stopping_criteria"),
    "streamer": lambda target, draft: partial(raising_function, "streamer"),
    "forward": lambda target, draft: partial(raising_forward, target.model.layers[1].mlp),
    "draft's forward": lambda target, draft: partial(raising_forward, draft.model.layers[0].mlp),
}


@cache
def texts_of(make):
    """Texts that go on behind an interrupted call (the same prompt, other tokens, the text with a new message), and what `generate` writes."""
    target, others = TARGETS[make](), small.one(12, seed=9)["input_ids"] % 90 + 4
    text = target.generate(prompt(), **GREEDY)
    texts = [prompt(), torch.cat([prompt(), others], 1), torch.cat([text[:, : WIDTH + 3], others[:, :3]], 1), text]
    return [(each, target.generate(each, **GREEDY)) for each in texts]


AXES = {"way": DRAFTS, "policy_of": ("argument", "standing"), "place": PLACES, "cache_of": CACHES, "make": TARGETS}
ROWS = cover_pairs(AXES, lambda row: True)


@pytest.mark.full
@pytest.mark.nightly(every=2)
@pytest.mark.parametrize("row", [pytest.param(row, id=", ".join(row.values())) for row in ROWS])
def test_goes_on_right(row):
    """Interrupted at the second place of its kind, or at the fifth."""
    way, policy_of, place, cache_of, make = row.values()
    target = hla.enable(TARGETS[make]())
    given = DRAFTS[way](target)
    draft = given.get("assistant_model")
    draft = draft if isinstance(draft, torch.nn.Module) else target
    policy = {"lossy_policy": "strict"}
    count = 0
    if policy_of == "standing":
        hla.enable(target, **given, strict=True)
        given, policy = {}, {}
    for number, kind in ((2, RuntimeError), (5, KeyboardInterrupt)):
        cache = CACHES[cache_of](target)
        with PLACES[place](target, draft)(kind, number) as more, suppress(kind):
            target.generate(prompt(), **GREEDY, **given, **policy, **more, **{CACHE: cache})
            continue  # it came to its end
        for (ids, whole), again in itertools.product(texts_of(make), (given | policy, {})):
            same = {CACHE: copy.deepcopy(cache)}
            assert torch.equal(target.generate(ids, **GREEDY, **again, **same), whole), (number, ids.shape)
            count += 1
    assert count
