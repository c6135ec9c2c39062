"""Tiny random models that see, with pictures of random numbers, ready for `generate`."""

from functools import cache

import supported_models
import tiny_models
import tiny_vision
import torch

import hf_lossy_assist as hla


# The first seed whose reference text varies, and depends on the picture.
SEEDS = {"gemma3": 1, "mistral3": 1, "glm4v": 1}
NEW = 12
SETTINGS = supported_models.SETTINGS | {"max_new_tokens": NEW}


@cache
def model_of(name):
    """An enabled model, shared by the tests of a file."""
    seed = SEEDS.get(name, 0)
    return hla.enable(tiny_models.tiny_model(name, "image-text", "sdpa", seed, **tiny_vision.SEEN[name].changes))


@cache
def draft_of(name):
    """A noisy copy, which sees what the target sees."""
    return supported_models.drafts(model_of(name))["often"]


def prompts_of(name, counts):
    """Random text with `counts[b]` pictures in row b."""
    return tiny_vision.prompts(tiny_vision.SEEN[name], counts, SEEDS.get(name, 0))


def written(name, inputs, **settings):
    """Return the text that Transformers writes alone."""
    return model_of(name).generate(**inputs, **(SETTINGS | settings))


def assisted(name, inputs, **settings):
    """The same with a policy, "strict" unless told otherwise."""
    return model_of(name).generate(**inputs, **(SETTINGS | {"lossy_policy": "strict"} | settings))


def reads_images(name, inputs):
    """Whether the text depends on the pictures."""
    other = inputs | {"pixel_values": -inputs["pixel_values"]}
    return not torch.equal(written(name, inputs).sequences, written(name, other).sequences)
