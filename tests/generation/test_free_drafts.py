"""`assistant_model="auto"`: the free draft that is fastest on the call's prompts drafts from then on, and the text is the target's. The clock counts blocks,
so that no machine decides which draft that is.
"""

import time
import warnings

import pytest
import torch
from support import small, tiny

import hf_lossy_assist as hla


SETTINGS = {"max_new_tokens": 16, "do_sample": False}
LONG = hla.AutoAssistant(seconds=5e4, new_tokens=12)


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by one for each block of a model that runs, of the target's or of a copy's."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def watch(target):
        def tick(*_):
            now[0] += 1

        for block in target.model.layers:
            block.register_forward_pre_hook(tick)
        return target

    watch.now = now
    return watch


def shallow():
    """A target whose last layers change little."""
    target = small.llama(layers=6)
    with torch.no_grad():
        for block in target.model.layers[2:]:
            for weight in (block.self_attn.o_proj.weight, block.mlp.down_proj.weight):
                weight.mul_(1e-3)
    return hla.enable(target)


def notices(found):
    return [str(warning.message) for warning in found if "assistant_model" in str(warning.message)]


def test_the_fastest_draft_is_taken_and_told_once(clock):
    target = clock(shallow())
    expected = target.generate(**small.ragged(), **SETTINGS)
    given = {"assistant_model": LONG, "lossy_policy": "strict", "return_dict_in_generate": True}
    with pytest.warns(UserWarning, match="assistant_model") as found:
        out = target.generate(**small.ragged(), **SETTINGS, **given)
    (line,) = notices(found)
    assert line.startswith('assistant_model="auto" takes 2 of 6 layers: ') and "\n" not in line
    for other in ("the target alone: ", "suffix: ", "int8: "):
        assert other in line
    assert "to skip the trials: assistant_model=hla.early_exit(target, 2), num_assistant_tokens=" in line
    assert out.sequences.equal(expected) and out.speculation.draft_acceptance_rate > 0.8
    began = clock.now[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = target.generate(**small.ragged(), **SETTINGS, **given)
    assert again.sequences.equal(expected)
    assert clock.now[0] - began < 6 * 16, "no trial, and fewer blocks than the target alone"


def test_nothing_is_taken_where_nothing_pays(clock):
    target = clock(hla.enable(small.llama(layers=3)))
    expected = target.generate(**small.one(), **SETTINGS)
    with pytest.warns(UserWarning, match=r"takes the target alone: .*to skip the trials: no assistant_model$"):
        out = target.generate(**small.one(), **SETTINGS, assistant_model=LONG, lossy_policy="svip", return_dict_in_generate=True)  # fmt: skip
    assert out.sequences.equal(expected) and out.speculation.summary()["num_draft_tokens"] == 0


def test_a_budget_is_an_end(clock):
    """Two blocks' time: the target alone has written something, and nothing else is tried."""
    target = clock(shallow())
    with pytest.warns(UserWarning, match=r"takes the target alone: .*suffix: no time left.*int8: no time left"):
        target.generate(
            **small.one(), **SETTINGS, assistant_model=hla.AutoAssistant(seconds=8.0), lossy_policy="strict"
        )
    assert clock.now[0] < 300


@pytest.mark.full
def test_random_numbers_are_those_of_a_call_that_names_the_draft(clock):
    target = clock(shallow())
    settings = {"max_new_tokens": 12, "do_sample": True, "lossy_policy": "strict"}
    texts = []
    with pytest.warns(UserWarning, match="takes 2 of 6 layers") as found:
        for _ in range(2):  # with the trials, and without
            torch.manual_seed(5)
            texts.append(target.generate(**small.ragged(), assistant_model=LONG, **settings))
    gamma = int(notices(found)[0].rpartition("=")[2])
    torch.manual_seed(5)
    texts.append(target.generate(**small.ragged(), assistant_model=hla.early_exit(target, 2), num_assistant_tokens=gamma, **settings))  # fmt: skip
    assert texts[0].equal(texts[1]) and texts[1].equal(texts[2])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:assistant_model")
def test_many_prompts_and_standing_policies(clock):
    target = clock(shallow())
    prompts = [small.one(width, seed=width)["input_ids"][0].tolist() for width in (5, 9, 3)]
    expected = [target.generate(torch.tensor([prompt]), **SETTINGS)[0, len(prompt) :].tolist() for prompt in prompts]
    found = hla.generate_many(target, prompts, assistant_model=LONG, max_rows=2, **SETTINGS)
    assert [result.token_ids for result in sorted(found, key=lambda result: result.index)] == expected
    other = clock(shallow())
    with hla.using(other, LONG, strict=True):
        for prompt, text in zip(prompts, expected, strict=True):
            assert other.generate(torch.tensor([prompt]), **SETTINGS)[0, len(prompt) :].tolist() == text
    assert hla.reports(other)[-1].summary()["num_draft_tokens"]


WRONG = {
    "a budget of none": (lambda: hla.AutoAssistant(seconds=0), ValueError, r"AutoAssistant\.seconds: expected a number above 0"),
    "a budget as text": (lambda: hla.AutoAssistant(seconds="20"), TypeError, r"AutoAssistant\.seconds: expected a number"),
    "no tokens": (lambda: hla.AutoAssistant(new_tokens=1), ValueError, r"AutoAssistant\.new_tokens: expected"),
    "two ways": ({"drafter": hla.SuffixDrafter()}, ValueError, "chooses what drafts: leave drafter out"),
    "a window": ({"draft_window": 8}, ValueError, "leave draft_window out"),
    "no policy": ({"lossy_policy": None}, ValueError, 'assistant_model="auto" is for this package\'s loop'),
    "another word": ({"assistant_model": "automatic"}, TypeError, "expected a loaded Transformers model"),
    "what the call itself may not": ({"num_beams": 3}, ValueError, "num_beams"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_uses(given, kind, message):
    target = hla.enable(tiny.shared("llama"))
    with pytest.raises(kind, match=message) as error:
        made = {} if callable(given) and given() else given
        target.generate(**tiny.prompts((5,)), **{"assistant_model": "auto", "lossy_policy": "strict", "max_new_tokens": 2} | made)  # fmt: skip
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:assistant_model")
def test_models_that_cannot_lend_layers():
    """A model with convolution states has neither exits nor copies to judge; its text is the target's."""
    target = hla.enable(tiny.shared("lfm2"))
    expected = tiny.greedy(target, tiny.prompts((9,)), max_new_tokens=8)
    out = tiny.assisted(target, tiny.prompts((9,)), "auto", max_new_tokens=8)
    assert out.sequences.equal(expected)


def test_a_target_of_one_layer_has_a_copy_tried(clock):
    """No layer can be left out of it."""
    target = clock(hla.enable(small.llama(layers=1)))
    with pytest.warns(UserWarning, match="assistant_model") as found:
        target.generate(**small.ragged(), **SETTINGS, assistant_model=LONG, lossy_policy="strict")
    (line,) = notices(found)
    assert "int8: " in line and "layers" not in line
