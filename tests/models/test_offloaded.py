"""The demo's target with layers in main memory and on disk, as `device_map` puts them there: the same tokens."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_lossy_assist as hla
from hf_lossy_assist import demo


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*this policy is lossy"),
    pytest.mark.filterwarnings("ignore:the head.s .* may differ"),
]
FOLDER = demo.FOLDER / "target"


WHOLE = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
PLACES = dict.fromkeys(WHOLE, "cpu") | {f"model.layers.{n}": "cpu" if n < 6 else "disk" for n in range(12)}


POLICIES = {
    "svip": lambda: "svip",
    "sv": lambda: hla.LossyPolicy(stop=hla.Constant(4), filter=hla.Staged(demo.load().companion)),
    "sprinter": lambda: hla.Sprinter(demo.head(), 0.5),
    "autojudge": lambda: hla.AutoJudge(demo.head("autojudge"), window=8),
}


@pytest.mark.full
def test_tokens_are_those_of_the_whole_model(tmp_path):
    whole, draft, _, tokenizer = demo.load()
    target = AutoModelForCausalLM.from_pretrained(
        FOLDER, device_map=PLACES, offload_folder=tmp_path, dtype=torch.float32
    )
    assert target.get_parameter("model.layers.11.mlp.up_proj.weight").device.type == "meta", "it is on disk"
    prompts = [problem.prompt for problem in demo.problems(3, seed=2)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    for name, policy in POLICIES.items():
        for sampling in (False, True):
            texts = []
            for model in (target, whole):
                generator = torch.Generator().manual_seed(3)
                call = {"lossy_policy": policy(), "do_sample": sampling, "max_new_tokens": 24, "generator": generator}
                texts.append(hla.enable(model).generate(**inputs, assistant_model=draft, **call))
            assert torch.equal(*texts), (name, sampling)
