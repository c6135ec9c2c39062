"""Arguments that Transformers would refuse somewhere within its own frames are refused in one line of this package;
what a caller's own code raises, and what says that memory is out, stays as it is."""

import pytest
import torch
from support import small
from support.refusals import refused
from transformers import GenerationConfig, LogitsProcessorList

from hf_lossy_assist import enable
from hf_lossy_assist.generation.speculative import one_line_errors


@pytest.fixture(scope="module")
def target():
    return enable(small.llama())


def call(target, **settings):
    given = {
        **small.one(),
        "assistant_model": target,
        "lossy_policy": "strict",
        "max_new_tokens": 4,
        "do_sample": False,
    }
    return target.generate(**given | settings)


WRONG = {
    "bad_words_ids": [[97]],  # behind the vocabulary: known to the processor alone, at its first call
    "sequence_bias": torch.zeros(2, 2),
    "prefix_allowed_tokens_fn": lambda row, ids: [],
    "logits_processor": torch.zeros(2, 2),
    "repetition_penalty": 10**400,
    "early_stopping": "x\ny",
}


@pytest.mark.parametrize("by_config", [False, True])
def test_a_wrong_setting_is_one_line(target, by_config):
    for name, value in WRONG.items():
        settings = {name: value}
        if by_config and hasattr(GenerationConfig(), name):
            settings = {"generation_config": GenerationConfig()}
            setattr(settings["generation_config"], name, value)
        with pytest.raises((TypeError, ValueError)) as error:
            call(target, **settings)
        assert len(str(error.value)) <= 400 and str(error.value).isprintable(), name


def test_texts_to_stop_at_that_cannot_be_looked_for(target):
    plain = small.tokenizer(["hello"])  # without the word by which Transformers measures tokens
    refused(lambda: call(target, stop_strings=["hello"], tokenizer=plain), "^stop_strings: .*stopping_criteria=…$")
    for none in ([], ""):
        refused(
            lambda none=none: call(target, stop_strings=none, tokenizer=small.tokenizer()), "^stop_strings: expected"
        )


def test_a_setting_that_cannot_be_copied(target):
    nested: list = []
    for _ in range(3000):
        nested = [nested]
    config = GenerationConfig()
    config.cache_config = nested
    refused(lambda: call(target, generation_config=config), "generate cannot run with these arguments: RecursionError")


def test_what_a_callers_processor_raises_stays(target):
    def processor(ids, scores):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        call(target, logits_processor=LogitsProcessorList([processor]))


def test_errors_that_are_no_refusals_stay():
    for kind in (torch.OutOfMemoryError, UserWarning, OSError, KeyboardInterrupt):
        with pytest.raises(kind), one_line_errors(begun=lambda: False):
            raise kind("x")


def test_a_wrong_mask_is_one_line(target):
    ones = torch.ones(1, 9, dtype=torch.long)
    for mask in (ones * 2, ones - 2 * (torch.arange(9) == 3), ones * float("nan")):
        refused(lambda mask=mask: call(target, attention_mask=mask), "^attention_mask: expected 1 for a token")


def test_a_wrong_token_of_an_encoder_decoder_is_one_line():
    begin = torch.tensor([[0, 2**40]])
    refused(lambda: call(enable(small.t5()), decoder_input_ids=begin), "^decoder_input_ids: token 1099511627776 is")
