"""Weights that change under an open `generate_many`, a running server, between calls and compiled: no text is of keys of the old ones."""

import copy

import pytest
import torch
from support import changes, small
from support.serving import serving
from support.tiny import lora, peft_warns
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.identity import weights_hash_once
from hf_lossy_assist.models.introspection import weights_version


pytestmark = [pytest.mark.full, peft_warns]
GREEDY = {"max_new_tokens": 8, "do_sample": False}
OTHER = small.llama(5)
COMMON = small.one(48, seed=2)["input_ids"][0].tolist()


def layer(model):
    return base(model).model.layers[0]


def in_place(model):
    with torch.no_grad():
        layer(model).self_attn.q_proj.weight.mul_(-1)


def loaded(model):
    names = dict(model.named_parameters())
    others = {name: tensor.to(names[name].dtype) for name, tensor in OTHER.state_dict().items() if name in names}
    model.load_state_dict(others, strict=False)


def stepped(model):
    weights = list(model.parameters())
    for weight in weights:
        weight.requires_grad_(True)
    model(input_ids=torch.tensor([COMMON]), labels=torch.tensor([COMMON])).loss.backward()
    torch.optim.SGD(weights, 0.5).step()
    model.zero_grad()


def base(model):
    return getattr(getattr(model, "base_model", None), "model", model)


def adapted(seed):
    """A model with two adapters; of those that seeds make, files are written to be swapped in."""
    import peft

    model = small.llama()
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    model.add_adapter("second", config)
    return model.double().eval()


def swapped(model, tmp_path):
    from peft.utils.hotswap import hotswap_adapter

    adapted(11).save_pretrained(tmp_path / "other", selected_adapters=["default"])
    hotswap_adapter(model, str(tmp_path / "other"), "default")


def switched(model):
    model.set_adapter("second" if model.active_adapter == "default" else "default")


def rescaled(model):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= -3


WAYS = {
    "load_state_dict": (small.llama, loaded),
    "in place": (small.llama, in_place),
    ".data": (small.llama, lambda model: layer(model).self_attn.k_proj.weight.data.mul_(-1)),
    "optimizer": (small.llama, stepped),
    "module replaced": (small.llama, lambda model: base(model).model.layers.__setitem__(0, copy.deepcopy(OTHER.model.layers[0]))),
    "activation replaced": (small.llama, lambda model: setattr(layer(model).mlp, "act_fn", torch.nn.Tanh())),
    "dtype": (small.llama, lambda model: changes.weights_in_place(model.float())),
    "hotswap": (lambda: adapted(1), swapped),
    "taken out": (lambda: adapted(1), lambda model: model.base_model.disable_adapter_layers()),
    "merged": (lambda: adapted(1), lambda model: model.merge_adapter(["second"])),
    "unloaded": (lambda: adapted(1), lambda model: model.unload()),
    "switched": (lambda: adapted(1), switched),
    "rescaled": (lambda: adapted(1), rescaled),
}  # fmt: skip
QUICK = {"load_state_dict", "in place", ".data", "optimizer", "hotswap"}


@pytest.fixture(params=[pytest.param(way, marks=[pytest.mark.nightly] * (way not in QUICK)) for way in WAYS])
def way(request, tmp_path):
    make, change = WAYS[request.param]
    model = hla.enable(make())
    return model, (lambda: change(model, tmp_path) if request.param == "hotswap" else change(model))


def alone(model, prompt, limit=8):
    """The text of a copy of the weights of now, in Transformers' loop."""
    plain = hla.disable(copy.deepcopy(model))
    text = plain.generate(input_ids=torch.tensor([prompt]), max_new_tokens=limit, do_sample=False)
    return text[0, len(prompt) :].tolist()


def prompts(common, count=6):
    begins = [COMMON if common else COMMON[n : n + 9] for n in range(count)]
    return [begin + small.one(3 + n, seed=n)["input_ids"][0].tolist() for n, begin in enumerate(begins)]


@pytest.mark.parametrize("rows, common, drafter", [(1, True, None), (3, False, None), (3, True, "suffix")])
def test_open_generate_many(way, rows, common, drafter):
    """Each text that comes after the change is that of the new weights."""
    (model, change), texts = way, prompts(common)
    limits = [2 + 7 * n for n in range(len(texts))]  # so that no other text ends in the first one's last round
    draft = {"drafter": drafter} if drafter else {"assistant_model": small.near(small.llama())}
    requests = [{"prompt": text, "max_new_tokens": limit} for text, limit in zip(texts, limits, strict=True)]
    results = hla.generate_many(model, requests, lossy_policy=hla.Constant(2), max_rows=rows, do_sample=False, **draft)
    first, old = next(results), [alone(model, *pair) for pair in zip(texts, limits, strict=True)]
    assert first.token_ids == old[first.index]
    change()
    new = [alone(model, *pair) for pair in zip(texts, limits, strict=True)]
    assert new != old, "the change changes nothing"
    rest = {result.index: result.token_ids for result in results}
    assert rest.keys() | {first.index} == set(range(6))
    assert rest == {index: new[index] for index in rest}


def test_running_server(way):
    """Requests after the change get the new text; one in flight ends first."""
    model, change = way
    tokenizer, text = small.tokenizer(), " ".join(small.words()[n % 80] for n in range(40))
    with serving((model, small.near(small.llama()), tokenizer), ("strict",)) as server:
        client = server.client()

        def written(stream=False, tokens=8):
            given = {"model": "demo", "prompt": text, "max_tokens": tokens, "temperature": 0, "stream": stream}
            return client.completions.create(**given)

        def expected():
            ids = alone(model, tokenizer(text)["input_ids"])
            return tokenizer.decode(ids, skip_special_tokens=True)

        for _ in range(2):
            assert written().choices[0].text.split() == (old := expected()).split()
        change()
        new = expected()
        assert new != old, "the change changes nothing"
        for _ in range(2):
            assert written().choices[0].text.split() == new.split()
        running = iter(written(stream=True, tokens=40))
        next(running)
        changes.weights_in_place(base(model))
        assert written().choices[0].text.split() == expected().split()
        assert len(list(running)) > 1


DRAFT = {"assistant_model": small.near(small.llama())}
EAGER = DRAFT, {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}, {"drafter": "suffix"}
COMPILED = ({"prompt_lookup_num_tokens": 3, "compile_config": CompileConfig(backend="eager")},)


def check_calls(model, change, calls):
    """Before the change, behind it and behind one more, each call's text is that of a copy of the weights of now."""
    inputs, texts = small.ragged(), []
    for change_ in (None, change, lambda: changes.weights_in_place(base(model))):
        if change_ is not None:
            change_()
        texts.append(hla.disable(copy.deepcopy(model)).generate(**inputs, **GREEDY).tolist())
        for call in calls:
            assert model.generate(**inputs, **GREEDY, **call, lossy_policy="strict").tolist() == texts[-1]
    assert texts[0] != texts[1] != texts[2]


@pytest.mark.parametrize(
    "calls", [EAGER, pytest.param(COMPILED, marks=pytest.mark.nightly)], ids=["eager", "compiled"]
)
def test_between_calls(way, calls):
    check_calls(*way, calls)


@pytest.mark.parametrize("way", ["in place"], indirect=True)
def test_between_compiled_calls(way):
    check_calls(*way, COMPILED)


def test_an_adapter_is_put_in_between_calls():
    """In the layers of a model that is enabled already."""
    model = hla.enable(small.llama())
    check_calls(model, lambda: (lora(model, seed=1), model.double()), EAGER)


def test_a_look_sees_each_way_and_nothing_else(way):
    model, change = way
    before = weights_version(base(model)), weights_hash_once(model)
    for _ in range(2):
        model.generate(**small.ragged(), **GREEDY)
        assert before == (weights_version(base(model)), weights_hash_once(model))
    change()
    assert weights_version(base(model)) != before[0] or isinstance(model.get_base_model(), type(OTHER))
