"""A new user's first mistakes, and the line that each prints.

Run `python tools/first_mistakes.py`. Nothing is downloaded: the models are random and tiny.
The first mistake's line is Transformers' own; nothing of Transformers is patched before `enable` is called.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from refused import refusal
from right_use import SIZES, VOCAB, draft, generate, ids, llama
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

import hf_lossy_assist as hla


@cache
def vlm() -> Any:
    eye = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**eye, image_size=8, patch_size=4)
    config = LlavaConfig(
        vision_config=vision,
        text_config=llama().config,
        image_token_index=VOCAB - 1,
        pad_token_id=SIZES["pad_token_id"],
    )
    return hla.enable(LlavaForConditionalGeneration(config).eval())


def forgotten() -> Any:
    return llama().generate(ids(), assistant_model=draft(), lossy_policy="svip", max_new_tokens=4)


def ends_with_an_image() -> Any:
    seen = ids().clone()
    seen[0, -4:] = VOCAB - 1
    return generate(vlm(), input_ids=seen, pixel_values=torch.zeros(1, 3, 8, 8))


# what was done: (how it is written, the call)
MISTAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    "forgot enable": ('model.generate(…, lossy_policy="svip")', forgotten),
    "wrong name": ('lossy_policy="svipp"', lambda: generate(lossy_policy="svipp")),
    "a rule's name where it needs a number": ('lossy_policy="top_k"', lambda: generate(lossy_policy="top_k")),
    "a method's name without its head": ('lossy_policy="sprinter"', lambda: generate(lossy_policy="sprinter")),
    "a class in place of an object": ("lossy_policy=hla.SVIP", lambda: generate(lossy_policy=hla.SVIP)),
    "a draft of another family": (
        "assistant_model=of_another_vocabulary",
        lambda: generate(assistant_model=llama(vocab=60)),
    ),
    "the draft's name in place of the draft": (
        'assistant_model="org/draft"',
        lambda: generate(assistant_model="org/draft"),
    ),
    "no draft at all": ("assistant_model left out", lambda: generate(assistant_model=...)),
    "a prompt that ends with its image": ("pixel_values=…", ends_with_an_image),
    "a folder's name misspelt": ('Head.from_pretrained("my_haed")', lambda: hla.Head.from_pretrained("my_haed")),
    "a policy's folder misspelt": ('lossy_policy="runs/my_polcy"', lambda: generate(lossy_policy="runs/my_polcy")),
    "prompt lookup with an adaptive stop": (
        'prompt_lookup_num_tokens=3, lossy_policy="svip"',
        lambda: generate(assistant_model=None, prompt_lookup_num_tokens=3, lossy_policy="svip"),
    ),
    "beams": ("num_beams=4", lambda: generate(num_beams=4)),
    "a list in place of a tensor": ("without return_tensors='pt'", lambda: generate(input_ids=[[4, 5, 6]])),
    "a setting misspelt": ("max_new_token=5", lambda: generate(max_new_token=5)),
}


def main() -> int:
    bad = 0
    for what, (written, call) in MISTAKES.items():
        error = refusal(call)
        lines = str(error).splitlines()
        bad += error is None or len(lines) != 1
        print(f"{what}: {written}\n    {type(error).__name__}: {' '.join(lines)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
