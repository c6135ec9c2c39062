"""Kinds of change that a model may see between two calls, each a function of the model (Llama with two layers, float64).

Those that return something have a second change in it, of what the first one has put there: a cell of a closure, an adapter's scale.
"""

import copy
import warnings
from types import MethodType

import torch
from torch.nn.utils import parametrize
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding


def last_mlp(model):
    return model.model.layers[-1].mlp


# --- weights


@torch.no_grad()
def weights_in_place(model):
    model.lm_head.weight.mul_(-1)


def weights_by_data(model):
    model.lm_head.weight.data = -model.lm_head.weight.data


def weights_loaded(model):
    model.load_state_dict({name: -tensor for name, tensor in model.state_dict().items()})


def weights_assigned(model):
    model.load_state_dict({name: -tensor for name, tensor in model.state_dict().items()}, assign=True)


def weights_with_other_strides(model):
    for part in (model.model.embed_tokens, last_mlp(model).up_proj):
        part.weight.data = part.weight.data.t().contiguous().t()
    return lambda: weights_in_place(model)


def weights_in_a_larger_storage(model):
    weight = model.lm_head.weight
    weight.data = torch.cat([torch.zeros(3, weight.shape[1], dtype=weight.dtype), -weight.data])[3:]


def weights_made_in_inference_mode(model):
    with torch.inference_mode():
        weight = torch.nn.Parameter(-model.lm_head.weight.clone(), requires_grad=False)
    model.lm_head.weight = weight


def weights_as_a_new_parameter(model):
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())


def head_tied(model):
    """A graph reads a tensor that stands twice at one place; the second change parts the two."""
    model.lm_head.weight = model.model.embed_tokens.weight
    return lambda: head_replaced(model)


def bias_added(model):
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-9, 9, len(model.lm_head.weight), dtype=model.dtype))


def precision(model):
    model.float()


def weights_frozen(model):
    model.requires_grad_(False)
    return lambda: weights_in_place(model)


# --- RoPE


def frequencies_in_place(model):
    model.model.rotary_emb.inv_freq.mul_(3.0)


def frequencies_replaced(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 3.0


def attention_scaling(model):
    model.model.rotary_emb.attention_scaling = 2.0


def rope_of_another_base(model):
    model.config.rope_parameters["rope_theta"] = 1.5
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)


def rope_linear(model):
    model.config.rope_parameters |= {"rope_type": "linear", "factor": 0.05}
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)


# --- modules


class Other(torch.nn.Module):
    """The caller's own, with a number that it reads."""

    def __init__(self, part, factor=-0.5):
        super().__init__()
        self.part, self.factors = part, [factor]

    def forward(self, x):
        return self.part(x) * self.factors[0]


class Negative(LlamaMLP):
    def forward(self, x):
        return -super().forward(x)


def head_replaced(model):
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False, dtype=model.dtype)


def activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Tanh()


def module_of_the_callers(model):
    model.model.layers[-1].mlp = Other(last_mlp(model))
    return lambda: last_mlp(model).factors.__setitem__(0, 2.0)


def another_class(model):
    last_mlp(model).__class__ = Negative


def a_layer_less(model):
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def a_layer_more(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[-1].self_attn.layer_idx = 2
    model.config.num_hidden_layers = 3


def layers_swapped(model):
    model.model.layers = torch.nn.ModuleList(reversed(model.model.layers))
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number


def parametrized(model):
    parametrize.register_parametrization(model.lm_head, "weight", Other(torch.nn.Identity()))
    return lambda: model.lm_head.parametrizations.weight[0].factors.__setitem__(0, 2.0)


def in_training(model):
    model.train()
    return lambda: weights_in_place(model)


# --- numbers


def epsilon(model):
    model.model.norm.variance_epsilon = model.model.layers[0].input_layernorm.variance_epsilon = 1e5


def scaling(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 5


# --- forwards


def closure(model):
    mlp, factor = last_mlp(model), -0.5
    old = mlp.forward
    mlp.forward = lambda x: old(x) * factor

    def change():
        nonlocal factor
        factor = 2.0

    return change


def closure_again(model):
    mlp = last_mlp(model)
    old = type(mlp).forward
    put = lambda factor: setattr(mlp, "forward", lambda x: old(mlp, x) * factor)  # noqa: E731
    put(-0.5)
    return lambda: put(2.0)


def put_back(model):
    mlp = last_mlp(model)
    old = mlp.forward
    mlp.forward = lambda x: old(x) * -0.5
    return lambda: delattr(mlp, "forward")


def _halved(self, x):
    return -0.5 * LlamaMLP.forward(self, x)


def bound_method(model):
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(_halved, layer.mlp)


def method_of_a_class(model):
    old = LlamaMLP.forward
    LlamaMLP.forward = lambda self, x: old(self, x) * -0.5
    return lambda: setattr(LlamaMLP, "forward", old)


# --- hooks


def hook(model):
    handle = last_mlp(model).register_forward_hook(lambda module, inputs, out: out * -0.5)
    return handle.remove


def pre_hook(model):
    handle = last_mlp(model).register_forward_pre_hook(lambda module, inputs: (inputs[0] * -0.5,))
    return handle.remove


def hook_of_accelerate(model):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Half(ModelHook):
        def post_forward(self, module, output):
            return output * -0.5

    add_hook_to_module(last_mlp(model), Half())
    return lambda: remove_hook_from_module(last_mlp(model))


# --- attention


def attention_eager(model):
    model.set_attn_implementation("eager")
    return lambda: weights_in_place(model)


def _attends(factor):
    def attention(*args, **kwargs):
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return out * factor, weights

    return attention


def attention_of_the_callers(model):
    AttentionInterface.register("sdpa", _attends(-0.5))
    return lambda: AttentionInterface.register("sdpa", _attends(2.0))


# --- adapters


def _with_adapter(model, parts, name="first"):
    """As Transformers loads one: the layers are replaced, the model's class is not."""
    from peft import LoraConfig, inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a second one
        inject_adapter_in_model(LoraConfig(target_modules=parts, init_lora_weights=False, r=4), model, name)
    model.double()


def _each_layer(model, change):
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            change(module)


def adapter(model):
    _with_adapter(model, ["down_proj", "q_proj"])
    return lambda: _each_layer(model, lambda layer: layer.enable_adapters(False))


def adapter_of_another_scale(model):
    _with_adapter(model, ["down_proj", "q_proj"])
    return lambda: _each_layer(model, lambda layer: layer.set_scale("first", 9.0))


def adapter_deleted(model):
    _with_adapter(model, ["down_proj", "q_proj"])
    return lambda: _each_layer(model, lambda layer: layer.delete_adapter("first"))


def second_adapter(model):
    _with_adapter(model, ["down_proj"])

    def change():
        _with_adapter(model, ["down_proj"], "second")
        _each_layer(model, lambda layer: layer.set_adapter("second"))

    return change


def adapter_merged(model):
    _with_adapter(model, ["down_proj", "q_proj"])

    def change():
        _each_layer(model, lambda layer: layer.merge())
        weights_in_place(model)

    return change


CHANGES = {
    name: made
    for name, made in list(globals().items())
    if getattr(made, "__module__", None) == __name__
    and not name.startswith("_")
    and not isinstance(made, type)
    and name != "last_mlp"
}
# Of the first change.
SAME_TEXT = {"weights_with_other_strides", "weights_frozen", "in_training", "attention_eager", "precision"}
