"""Many prompts in flight where memory runs out, and how much of it they take: no text is lost, none is another one."""

import pytest
import torch
from support import heads, small
from support.many import SETTINGS, alone, enabled_pair, prompts, together
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteria

import hf_lossy_assist as hla
from hf_lossy_assist.engine import loop
from hf_lossy_assist.generation import scheduler
from hf_lossy_assist.generation.scheduler import Scheduler
from hf_lossy_assist.models.facts import CACHE
from hf_lossy_assist.models.row_cache import SPARE, RowCache
from hf_lossy_assist.models.row_model import RowModel


@pytest.fixture(scope="module")
def pair():
    return enabled_pair()


def oom_once(monkeypatch, owner, name, when):
    """Memory runs out at the first call of `owner.name` for whose arguments `when` holds; returns the list of those calls."""
    original, ran = getattr(owner, name), []

    def short_of_memory(*args, **kwargs):
        if not ran and when(*args):
            ran.append(args)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, short_of_memory)
    return ran


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:generate_many. memory ran out")
@pytest.mark.parametrize("what", ["keys", "values"])
def test_memory_that_runs_out_while_storage_grows_loses_no_text(pair, monkeypatch, what):
    settings = SETTINGS | {"max_new_tokens": 400, "eos_token_id": None}
    expected = [alone(pair[0], prompt, **settings) for prompt in prompts()[:4]]
    ran = oom_once(monkeypatch, RowCache, "storage", lambda cache, place, like, written: place == (1, what) and 0 < written == like.shape[2] and len(like) == 4)  # fmt: skip
    assert together(pair, prompts()[:4], hla.Constant(3), max_rows=4, **settings) == expected and ran


@pytest.mark.filterwarnings("ignore:generate_many. memory ran out with (3|1) texts")
@pytest.mark.parametrize("what", ["reading prompts", "writing"])
def test_where_memory_runs_out_rows_are_halved(what):
    target, _ = pair = enabled_pair()
    rows = []

    def short_of_memory(model, args, kwargs):
        if what == "writing" and not kwargs[CACHE].get_seq_length():
            return
        rows.append(len(kwargs["input_ids"]))
        if rows[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    expected = [alone(target, prompt, **SETTINGS) for prompt in prompts()]
    target.register_forward_pre_hook(short_of_memory, with_kwargs=True)
    with pytest.warns(UserWarning, match="memory ran out with 7 texts at a time; goes on with 3"):
        assert together(pair, prompts(), max_rows=7) == expected
    assert 7 in rows and max(rows[rows.index(3) :]) == 3
    target.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match="goes on with 3"):
        together(pair, prompts())


@pytest.mark.full
@pytest.mark.parametrize("rows, which", [(2, "draft"), (3, "target")])
def test_where_a_text_cannot_be_added_running_ones_go_on(pair, monkeypatch, which, rows):
    """Memory runs out while its keys and values are copied to the others'."""
    expected = [alone(pair[0], prompt, **SETTINGS) for prompt in prompts()]
    model = pair[which == "draft"]
    ran = oom_once(monkeypatch, RowModel, "insert", lambda self, *_: self.model is model and self.lengths)
    with pytest.warns(UserWarning, match=f"memory ran out with {rows} texts at a time; goes on with 1"):
        assert together(pair, prompts(), max_rows=rows) == expected
    assert ran


def test_a_text_that_has_ended_when_memory_runs_out_is_not_lost(pair, monkeypatch):
    expected = [alone(pair[0], prompt, **SETTINGS) for prompt in prompts()]
    ran = oom_once(monkeypatch, loop, "roll_back", lambda call, *_: len(set(map(bool, call.rows.finished))) == 2)
    with pytest.warns(UserWarning, match="memory ran out"):
        assert together(pair, prompts(), max_rows=4) == expected
    assert ran


@pytest.mark.filterwarnings("ignore:generate_many. memory ran out")
def test_memory_that_runs_out_while_rows_leave_loses_no_text(pair, monkeypatch):
    """In the middle of a cache: some layers have the rows that stay, the others all."""
    expected = [alone(pair[0], prompt, **SETTINGS) for prompt in prompts()]

    def narrow_one_layer(cache, rows):
        first = cache.layers[0]
        first.keys, first.values = first.keys[rows], first.values[rows]
        return True

    ran = oom_once(monkeypatch, RowCache, "select", lambda *args: len(args[0].layers) > 1 and narrow_one_layer(*args))
    assert together(pair, prompts(), max_rows=6) == expected and ran


DRAWN = {"do_sample": True, "temperature": 1.3, "top_k": 0, "seed": 5}
COUNTED = hla.LossyPolicy(hla.Limited(hla.TopK(5), per_request=2))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:generate_many. memory ran out", "ignore:.*this policy is lossy")
@pytest.mark.parametrize("where", ["verify", "commit"])
def test_memory_that_runs_out_in_a_round_changes_no_text(pair, monkeypatch, where):
    """Neither its random numbers nor what a rule counts."""
    for policy, settings in ((hla.Constant(3), DRAWN), (COUNTED, {})):
        given = {"max_rows": 4, "eos_token_id": None} | settings
        expected, count = together(pair, prompts(), policy, **given), iter(range(1000))
        with monkeypatch.context() as patch:
            ran = oom_once(patch, loop, where, lambda *_, count=count: next(count) == 1)
            assert together(pair, prompts(), policy, **given) == expected and ran


@pytest.mark.filterwarnings("ignore:generate_many. memory ran out")
def test_no_hook_stays_where_memory_ran_out(monkeypatch):
    target, draft = hla.enable(heads.target()), heads.draft()
    texts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16], [20, 21]]
    count = iter(range(1000))
    ran = oom_once(monkeypatch, loop, "verify", lambda *_: next(count) == 1)
    policy = hla.HeadStop(heads.linear(), 0.4, 4)
    found = hla.generate_many(target, texts, assistant_model=draft, lossy_policy=policy, max_rows=4, do_sample=False, max_new_tokens=12)  # fmt: skip
    assert len(list(found)) == 4 and ran
    assert not any(module._forward_hooks for model in (target, draft) for module in model.modules())


@pytest.mark.filterwarnings("ignore:generate_many. memory ran out")
def test_what_is_held_for_other_prompts_goes_before_a_text_does(pair, monkeypatch):
    """One text at a time, and memory for it only where the prompt before it is not kept."""
    texts = [small.one(60, seed=n)["input_ids"][0].tolist() for n in range(3)]
    settings = SETTINGS | {"max_new_tokens": 20, "eos_token_id": None}
    expected = [alone(pair[0], prompt, **settings) for prompt in texts]
    many = hla.generate_many(pair[0], texts, assistant_model=pair[1], max_rows=1, **settings)
    original = loop.verify

    def short_of_memory(call, *args):
        if many._scheduler.prefixes.tokens and call.rows.lengths[0] > 70:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(call, *args)

    monkeypatch.setattr(loop, "verify", short_of_memory)
    assert {result.index: result.token_ids for result in many} == dict(enumerate(expected))


def test_reading_ahead_gives_way_before_running_texts(pair, monkeypatch):
    expected = [alone(pair[0], prompt, **SETTINGS) for prompt in prompts()]
    ran = oom_once(monkeypatch, scheduler, "read_some", lambda call, most: call.rows.lengths != [9, 3, 14])
    monkeypatch.setattr(Scheduler, "_restart", lambda self: pytest.fail("a running text was given up"))
    with pytest.warns(UserWarning, match="goes on without prompts that are read ahead"):
        assert together(pair, prompts(), max_rows=3) == expected
    assert ran


def test_each_text_has_its_total_length_and_its_end_tokens(pair):
    settings = SETTINGS | {"eos_token_id": None}
    given = {"stopping_criteria": [MaxLengthCriteria(16)]}
    expected = [alone(pair[0], prompt, **settings, **given) for prompt in prompts()]
    assert together(pair, prompts(), **settings, **given) == expected
    texts = prompts()[:4]
    whole = [alone(pair[0], prompt, **settings) for prompt in texts]
    ends = {len(prompt): ids[3 + i] for i, (prompt, ids) in enumerate(zip(texts, whole, strict=True))}

    def make_criteria(ids):
        return [EosTokenCriteria(ends[len(ids)])]

    expected = [alone(pair[0], prompt, **settings, stopping_criteria=make_criteria(prompt)) for prompt in texts]
    with pytest.warns(UserWarning, match="texts with other end tokens"):
        assert together(pair, texts, **settings, stopping_criteria=make_criteria) == expected


def test_storage_is_no_larger_than_the_longest_text_needs(pair, monkeypatch):
    """Also where a prompt that begins like the one before it is read beside one that does not."""
    first, other = (small.one(600, seed=n)["input_ids"][0].tolist() for n in (1, 2))
    like = first[:580] + small.one(20, seed=9)["input_ids"][0].tolist()
    seen, original = [], scheduler.run_stages

    def watched(call, *args):
        seen.extend(model.cache.capacity for model in call.models)
        original(call, *args)

    monkeypatch.setattr(scheduler, "run_stages", watched)
    together(pair, [first, like, other], hla.Constant(3), max_rows=3, max_new_tokens=24, eos_token_id=None)
    assert max(seen) <= 600 + 24 + SPARE


def test_prompts_read_ahead_are_within_max_tokens(pair, monkeypatch):
    texts = [small.one(n, seed=n)["input_ids"][0].tolist() for n in (5, 6, 7, 12, 15)]
    longest, ends = {5: 30, 6: 40, 7: 20, 12: 60, 15: 80}, {6: 20, 7: 9}

    class Early(StoppingCriteria):
        def __init__(self, length):
            self.length = length

        def __call__(self, ids, scores, **kwargs):
            return torch.tensor([ids.shape[1] >= self.length])

    def made(ids):
        return [MaxLengthCriteria(longest[len(ids)]), *[Early(ends[n]) for n in [len(ids)] if n in ends]]

    settings = SETTINGS | {"max_new_tokens": 90, "eos_token_id": None}
    many = hla.generate_many(pair[0], texts, assistant_model=pair[1], lossy_policy=hla.Constant(1), max_rows=8, max_tokens=100, stopping_criteria=made, **settings)  # fmt: skip
    held, original = [], scheduler.run_stages

    def watched(call, *args):
        running, block = many._scheduler.running.values(), many._scheduler.block
        held.append(sum(row.longest for row in running) + (0 if block is None else block.tokens))
        original(call, *args)

    monkeypatch.setattr(scheduler, "run_stages", watched)
    assert len(list(many)) == 5 and max(held) <= 100


def test_a_config_that_asks_for_what_belongs_to_one_call(pair):
    target, draft = enabled_pair()
    line, several = r"^num_return_sequences belongs to one call[^\n]*", {"num_return_sequences": 2, "do_sample": True}
    for given in ({"return_dict_in_generate": True, "output_scores": True}, several):
        config = GenerationConfig(max_new_tokens=4, **given)
        with pytest.raises(ValueError, match=r"^[^\n]*belongs to one call[^\n]*$"):
            hla.generate_many(target, prompts(), assistant_model=draft, generation_config=config)
    target.generation_config.update(**several)
    with pytest.raises(ValueError, match=f"{line}--set num_return_sequences=1$"):
        list(hla.generate_many(target, [[4, 5, 6]], assistant_model=draft, **SETTINGS))
    many = hla.generate_many(target, [[4, 5, 6]], assistant_model=draft, num_return_sequences=1, **SETTINGS)
    assert len(list(many)) == 1


def test_nothing_is_held_when_the_texts_are_over(pair):
    for leave in (lambda texts: list(texts), lambda texts: (next(texts), texts.close())):
        texts = hla.generate_many(pair[0], prompts(), assistant_model=pair[1], max_rows=3, **SETTINGS)
        leave(texts)
        many = texts._scheduler
        assert many.call is None and not many.prefixes.tokens and not many.going
        assert texts.speculation is not None
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    assert list(hla.generate_many(pair[0], [], assistant_model=pair[1], **SETTINGS)) == []
