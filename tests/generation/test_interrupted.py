"""An error or an interrupt at any place of a call: the caller's cache then goes on to the text of a fresh call."""

import copy
from contextlib import contextmanager

import pytest
import torch
from support import eagle, small, tiny
from transformers import DynamicCache, StaticCache

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE


GREEDY = {"max_new_tokens": 10, "do_sample": False}
WIDTH, HELD = 12, 7  # tokens of the prompt, and those that the cache holds already
NEVER = small.llama(9)  # drafts tokens that are all rejected
TARGETS = {
    "llama": small.llama,
    "sliding window": lambda: tiny.build("mistral"),  # 8 tokens
}
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
    "static": lambda target: filled(StaticCache(target.config, max_cache_len=80), target),
}


class Raised(BaseException):
    """An interrupt: nothing catches it by mistake."""


def filled(cache, target):
    with torch.no_grad():
        target(prompt()[:, :HELD], use_cache=True, **{CACHE: cache})
    return cache


def prompt():
    return small.one(WIDTH, seed=4)["input_ids"] % 90 + 4


class Raising:
    """A processor that raises when a text has so many tokens."""

    def __init__(self, kind, length):
        self.kind, self.length = kind, length

    def __call__(self, ids, scores):
        if ids.shape[1] >= self.length:
            raise self.kind
        return scores


class RaisingCriterion(Raising):
    def __call__(self, ids, scores, **kwargs):
        super().__call__(ids, scores)
        return torch.zeros(len(ids), dtype=torch.bool)


class RaisingStreamer(small.Listener):
    def __init__(self, kind, length):
        super().__init__()
        self.kind, self.length = kind, length

    def put(self, value):
        super().put(value)
        if len(self.heard) >= self.length:
            raise self.kind

    def end(self):
        raise self.kind


@contextmanager
def raising_forward(module, kind, number):
    """Raise in the module's forward of that number, between two blocks of the model."""
    seen = []

    def raise_(*args):
        seen.append(1)
        if len(seen) >= number:
            raise kind

    hook = module.register_forward_pre_hook(raise_)
    try:
        yield {}
    finally:
        hook.remove()


@contextmanager
def raising_function(name, kind, number):
    function = (RaisingCriterion if name == "stopping_criteria" else Raising)(kind, WIDTH + number)
    yield {name: RaisingStreamer(kind, WIDTH + number) if name == "streamer" else [function]}


def blocks(model):
    return model.model.layers


PLACES = {
    "processor": lambda target, draft: lambda *at: raising_function("logits_processor", *at),
    "criterion": lambda target, draft: lambda *at: raising_function("stopping_criteria", *at),
    "streamer": lambda target, draft: lambda *at: raising_function("streamer", *at),
    "forward": lambda target, draft: lambda *at: raising_forward(blocks(target)[1].mlp, *at),
    "draft's forward": lambda target, draft: lambda *at: raising_forward(blocks(draft)[0].mlp, *at),
}


def interrupt(call, place, kind, number):
    """Return whether the call was interrupted at this place, or came to its end."""
    with place(kind, number) as given:
        try:
            call(**given)
        except kind:
            return True
    return False


def check(way, policy_of, cache_of, place, make, numbers):
    """Interrupt calls at these places, and go on: the same call again, other tokens, and those of the text with a new message."""
    target = hla.enable(TARGETS[make]())
    given = DRAFTS[way](target)
    draft = given.get("assistant_model")
    draft = draft if isinstance(draft, torch.nn.Module) else target
    policy = {"lossy_policy": "strict"}
    text, count = target.generate(prompt(), **GREEDY), 0
    others = small.one(12, seed=9)["input_ids"] % 90 + 4
    texts = [prompt(), torch.cat([prompt(), others[:, :2]], 1), torch.cat([prompt(), others], 1), text]
    texts += [torch.cat([text[:, : WIDTH + n], others[:, :more]], 1) for n, more in ((1, 3), (3, 12), (5, 3))]
    expected = [target.generate(each, **GREEDY) for each in texts]
    if policy_of == "standing":
        hla.enable(target, **given, strict=True)
        given, policy = {}, {}
    for number in numbers:
        kind = (RuntimeError, KeyboardInterrupt, Raised)[number % 3]
        cache = CACHES[cache_of](target)

        def call(cache=cache, **more):
            target.generate(prompt(), **GREEDY, **given, **policy, **more, **{CACHE: cache})

        if not interrupt(call, PLACES[place](target, draft), kind, number):
            continue
        for ids, whole in zip(texts, expected, strict=True):
            for again in (given | policy, {}):
                same = copy.deepcopy(cache)
                assert torch.equal(target.generate(ids, **GREEDY, **again, **{CACHE: same}), whole), (
                    number,
                    ids.shape,
                )
                count += 1
    return count


@pytest.mark.parametrize("place", ["processor", "criterion", "streamer", "forward"])
@pytest.mark.parametrize("way", ["draft model", "lookup", "EAGLE-3", "early exit"])
def test_goes_on_right(way, place):
    assert check(way, "argument", "filled", place, "llama", (2, 4))


@pytest.mark.nightly(every=40)
@pytest.mark.parametrize("make", TARGETS)
@pytest.mark.parametrize("cache_of", CACHES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy_of", ["argument", "standing"])
@pytest.mark.parametrize("way", DRAFTS)
def test_everywhere(way, policy_of, place, cache_of, make):
    if make == "sliding window" and cache_of == "static":
        pytest.skip("its static cache cannot be rolled back, and is refused")
    assert check(way, policy_of, cache_of, place, make, (2, 3, 5))
