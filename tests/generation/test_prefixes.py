"""Common beginnings of prompts: of several families, bounded, and never another model's."""

import pytest
import torch
from support import small
from support.many import SETTINGS, alone, count_read, enabled_pair, prompts, together
from support.serving import serving
from support.tiny import lora, peft_warns

import hf_lossy_assist as hla
from hf_lossy_assist.generation import scheduler as module
from hf_lossy_assist.generation.preparation import Preparation
from hf_lossy_assist.generation.scheduler import Scheduler
from hf_lossy_assist.models import prefix_cache
from hf_lossy_assist.models.prefix_cache import PrefixCache


@pytest.fixture
def read(monkeypatch):
    """The tokens that prompts cost, of each block."""
    return count_read(monkeypatch)


def families(count=3, members=4, length=60):
    """Prompts of several families, in turns."""
    begins = [small.one(length, seed=100 + n)["input_ids"][0].tolist() for n in range(count)]
    ends = prompts(tuple(range(3, 3 + members)))
    return [begin + end for end in ends for begin in begins]


def write(pair, texts, prefixes=None, tokens=None, rows=3, target=None):
    settings = SETTINGS | {"assistant_model": pair[1], "drafter": None}
    preparation = Preparation(target or pair[0], hla.as_policy("strict"), None, 0, settings)
    scheduler = Scheduler(preparation, rows, tokens, prefixes)
    waiting, found = [preparation.request(n, text) for n, text in enumerate(texts)], {}
    while waiting or scheduler.going:
        while waiting and scheduler.admit(waiting[0]):
            waiting.pop(0)
        found |= {result.index: result.token_ids for result in scheduler.step()}
    return [found[n] for n in range(len(texts))]


def test_each_family_reads_its_beginning_once(read):
    pair, texts = enabled_pair(), families()
    assert write(pair, texts) == [alone(pair[0], text, **SETTINGS) for text in texts]
    assert sum(read) == 3 * 60 + sum(len(text) - 61 for text in texts)


def test_a_beginning_within_another_one_and_a_longer_one(read):
    """A conversation that goes on, and two prompts that differ within what is kept."""
    pair, whole = enabled_pair(), small.one(140, seed=7)["input_ids"][0].tolist()
    texts = [whole[:60], whole[:100], whole, whole[:80] + prompts((40,))[0], whole[:80] + prompts((40,))[0] + [9]]
    assert write(pair, texts, rows=1) == [alone(pair[0], text, **SETTINGS) for text in texts]
    assert sum(read) == 139 + 60 + 1, "of what is shared within a segment, fewer than 32 tokens are read again"


def test_what_was_not_used_for_the_longest_time_goes_first(read):
    pair, cache = enabled_pair(), PrefixCache(150)
    one, two, three = ([text] for text in families(members=1))
    for text in (one, two, one, three, one):
        write(pair, text, cache)
        assert cache.tokens <= 150
    assert read == [62, 62, 0, 62, 0], "the second family went, as the first had been used since"
    write(pair, two, cache)
    assert read[-1] == 62
    long = small.one(400, seed=3)["input_ids"][0].tolist()
    for _ in range(2):
        assert write(pair, [long], cache) == [alone(pair[0], long, **SETTINGS)]
    assert read[-2:] == [399, 0] and cache.tokens == 399, "the latest prompt stays, however long it is"


def test_where_memory_runs_out_while_a_beginning_is_split_nothing_has_changed(read, monkeypatch):
    """Else tokens would count that nobody finds, and that cannot be forgotten."""
    pair, cache, whole = enabled_pair(), PrefixCache(), small.one(140, seed=7)["input_ids"][0].tolist()
    other, ran, original = whole[:50] + prompts((60,))[0], [], prefix_cache._cut
    write(pair, [whole], cache)

    def short_of_memory(*args):
        ran.append(args)
        if len(ran) == 3:  # the second part's first copy
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args)

    monkeypatch.setattr(prefix_cache, "_cut", short_of_memory)
    with pytest.warns(UserWarning, match="memory ran out"):
        assert write(pair, [other], cache) == [alone(pair[0], other, **SETTINGS)]
    assert len(ran) >= 3 and not cache.tokens


def test_beginnings_are_within_the_budget_of_tokens(read):
    pair, cache, texts = enabled_pair(), PrefixCache(), families()
    held, original = [], module.run_stages

    def watched(call, *args):
        held.append(cache.tokens + sum(call.rows.max_lengths))
        original(call, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_stages", watched)
        assert write(pair, texts, cache, tokens=420) == [alone(pair[0], text, **SETTINGS) for text in texts]
    assert max(held) <= 420 and cache.tokens
    assert sum(read) < sum(len(text) - 1 for text in texts), "some of the beginnings served"


def test_other_models_and_drafts_find_nothing(read):
    cache, [text] = PrefixCache(), families(1, 1)
    pair, (other, _) = enabled_pair(), enabled_pair()
    second = small.near(pair[0], 0.3)
    for models in (pair, (other, pair[1]), (pair[0], second)):
        assert write(models, [text], cache) == [alone(models[0], text, **SETTINGS)]
        assert read.pop() == len(text) - 1
    write(pair, [text], cache)
    assert read.pop() == 0


@peft_warns
def test_other_adapters_find_nothing(read):
    import peft

    model = lora(small.llama(), 1)
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model.add_adapter("second", config)
    target = hla.enable(model.double())
    pair, cache, [text] = (target, small.near(small.llama())), PrefixCache(), families(1, 1)
    written = []
    for name in ("default", "second", "default"):
        model.set_adapter(name)
        written += write(pair, [text], cache)
        assert written[-1] == alone(target, text, **SETTINGS)
    assert read == [len(text) - 1, len(text) - 1, 0] and written[0] != written[1]
    with model.disable_adapter():
        assert write(pair, [text], cache) == [alone(target, text, **SETTINGS)]
    assert read[-1] == len(text) - 1


def test_a_long_prompt_holds_no_running_text_up(read, monkeypatch):
    """It is read in pieces, a round of the others after each."""
    monkeypatch.setattr(module, "AHEAD", 40)
    pair, long = enabled_pair(), small.one(130, seed=3)["input_ids"][0].tolist()
    rounds, original = [], module.run_stages
    monkeypatch.setattr(module, "run_stages", lambda *args: (rounds.append(len(read)), original(*args))[1])
    settings = SETTINGS | {"eos_token_id": None, "max_new_tokens": 40}
    texts = [prompts()[0], long]
    expected = [alone(pair[0], text, **settings) for text in texts]
    assert together(pair, texts, hla.Constant(1), max_rows=2, **settings) == expected
    assert read == [8, 40, 40, 40, 9] and {1, 2, 3, 4, 5} <= set(rounds)


def test_the_server_keeps_beginnings_from_request_to_request(read):
    """Also where the next one has other sampling settings."""
    loaded = hla.demo.load()
    with serving((loaded.target, loaded.draft, loaded.tokenizer)) as server:
        prompt = "How many legs have six ants and two spiders? " * 6
        for temperature in (0.0, 1.0, 0.0):
            given = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": temperature, "seed": 1}
            server.client().completions.create(**given)
            assert server.free()
    assert read[0] >= 60 and read[1:] == [0, 0]
