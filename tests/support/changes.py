"""Kinds of change that a model may see between two calls, each a function of the model (Llama with two layers, float64)."""

import copy
import warnings
from types import MethodType

import torch
from torch.nn.utils import parametrize
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding


class Other(torch.nn.Module):
    """The caller's own, with a number that it reads."""

    def __init__(self, part):
        super().__init__()
        self.part, self.factors = part, [-0.5]

    def forward(self, x):
        return self.part(x) * self.factors[0]


class Negative(LlamaMLP):
    def forward(self, x):
        return -super().forward(x)


def last_mlp(model):
    return model.model.layers[-1].mlp


@torch.no_grad()
def weights_in_place(model):
    model.lm_head.weight.mul_(-1)


def negated(model):
    return {name: -tensor for name, tensor in model.state_dict().items()}


def set_head(model, weight, **flags):
    model.lm_head.weight = torch.nn.Parameter(weight, **flags)


def set_head_in_inference_mode(model):
    with torch.inference_mode():
        set_head(model, -model.lm_head.weight.clone(), requires_grad=False)


def weights_in_a_larger_storage(model):
    weight = model.lm_head.weight
    weight.data = torch.cat([torch.zeros(3, weight.shape[1], dtype=weight.dtype), -weight.data])[3:]


def weights_with_other_strides(model):
    for part in (model.model.embed_tokens, last_mlp(model).up_proj):
        part.weight.data = part.weight.data.t().contiguous().t()


def replace_head(model):
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False, dtype=model.dtype)


def add_bias(model):
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-9, 9, len(model.lm_head.weight), dtype=model.dtype))


def set_rope(model, **parameters):
    model.config.rope_parameters |= parameters
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)


def set_layers(model, layers):
    model.model.layers, model.config.num_hidden_layers = torch.nn.ModuleList(layers), len(layers)
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number


def each_layer(change):
    return lambda model: [change(layer) for layer in model.model.layers]


def halved(mlp, x):
    return -0.5 * LlamaMLP.forward(mlp, x)


ONCE = {
    "weights in place": weights_in_place,
    "weights by data": lambda model: setattr(model.lm_head.weight, "data", -model.lm_head.weight.data),
    "weights loaded": lambda model: model.load_state_dict(negated(model)),
    "weights assigned": lambda model: model.load_state_dict(negated(model), assign=True),
    "weights in a larger storage": weights_in_a_larger_storage,
    "weights made in inference mode": set_head_in_inference_mode,
    "weights as a new parameter": lambda model: set_head(model, -model.lm_head.weight.detach()),
    "bias added": add_bias,
    "head replaced": replace_head,
    "frequencies in place": lambda model: model.model.rotary_emb.inv_freq.mul_(3.0),
    "frequencies replaced": lambda model: setattr(
        model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 3.0
    ),
    "attention scaling": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 2.0),
    "RoPE of another base": lambda model: set_rope(model, rope_theta=1.5),
    "RoPE of another type": lambda model: set_rope(model, rope_type="linear", factor=0.05),
    "activation": each_layer(lambda layer: setattr(layer.mlp, "act_fn", torch.nn.Tanh())),
    "another class": lambda model: setattr(last_mlp(model), "__class__", Negative),
    "a layer less": lambda model: set_layers(model, model.model.layers[:1]),
    "a layer more": lambda model: set_layers(model, [*model.model.layers, copy.deepcopy(model.model.layers[0])]),
    "layers swapped": lambda model: set_layers(model, model.model.layers[::-1]),
    "epsilon": each_layer(lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 1e5)),
    "scaling": each_layer(lambda layer: setattr(layer.self_attn, "scaling", 5 * layer.self_attn.scaling)),
    "bound method": each_layer(lambda layer: setattr(layer.mlp, "forward", MethodType(halved, layer.mlp))),
}

# The texts stay the same, and the weights change next.
SAME_TEXT = {
    "weights with other strides": weights_with_other_strides,
    "weights frozen": lambda model: model.requires_grad_(False),
    "precision": lambda model: model.float(),
    "in training": lambda model: model.train(),
    "eager attention": lambda model: model.set_attn_implementation("eager"),
}


def tied(model):
    """A graph reads a tensor that stands twice at one place; the second change parts the two."""
    model.lm_head.weight = model.model.embed_tokens.weight
    return lambda: replace_head(model)


def module_of_the_callers(model):
    model.model.layers[-1].mlp = Other(last_mlp(model))
    return lambda: last_mlp(model).factors.__setitem__(0, 2.0)


def parametrized(model):
    parametrize.register_parametrization(model.lm_head, "weight", Other(torch.nn.Identity()))
    return lambda: model.lm_head.parametrizations.weight[0].factors.__setitem__(0, 2.0)


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
    mlp.forward = MethodType(halved, mlp)
    return lambda: delattr(mlp, "forward")


def method_of_a_class(model):
    old = LlamaMLP.forward
    LlamaMLP.forward = lambda self, x: old(self, x) * -0.5
    return lambda: setattr(LlamaMLP, "forward", old)


def hook_of_accelerate(model):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Half(ModelHook):
        def post_forward(self, module, output):
            return output * -0.5

    add_hook_to_module(last_mlp(model), Half())
    return lambda: remove_hook_from_module(last_mlp(model))


def attend(factor):
    def attention(*args, **kwargs):
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return out * factor, weights

    AttentionInterface.register("sdpa", attention)


def attention_of_the_callers(model):
    attend(-0.5)
    return lambda: attend(2.0)


def adapt(model, parts=("down_proj", "q_proj"), name="first"):
    """As Transformers loads an adapter: the layers are replaced, the model's class is not."""
    from peft import LoraConfig, inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a second one
        inject_adapter_in_model(LoraConfig(target_modules=list(parts), init_lora_weights=False, r=4), model, name)
    model.double()


def adapted(change):
    """An adapter, and behind it a change of each of its layers."""

    def first(model):
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapt(model)
        return lambda: [change(module) for module in model.modules() if isinstance(module, BaseTunerLayer)]

    return first


def second_adapter(model):
    activate = adapted(lambda layer: layer.set_adapter("second"))(model)

    def change():
        adapt(model, name="second")
        activate()

    return change


# Each returns a second change, of what the first one has put there: a cell of a closure, an adapter's scale.
TWICE = {
    "head tied": tied,
    "module of the caller's": module_of_the_callers,
    "parametrized": parametrized,
    "closure": closure,
    "closure again": closure_again,
    "put back": put_back,
    "method of a class": method_of_a_class,
    "hook": lambda model: last_mlp(model).register_forward_hook(lambda module, inputs, out: out * -0.5).remove,
    "pre-hook": lambda model: (
        last_mlp(model).register_forward_pre_hook(lambda module, inputs: -0.5 * inputs[0]).remove
    ),
    "hook of accelerate": hook_of_accelerate,
    "attention of the caller's": attention_of_the_callers,
    "adapter": adapted(lambda layer: layer.enable_adapters(False)),
    "adapter of another scale": adapted(lambda layer: layer.set_scale("first", 9.0)),
    "adapter deleted": adapted(lambda layer: layer.delete_adapter("first")),
    "adapter merged": adapted(lambda layer: (layer.merge(), layer.get_base_layer().weight.data.mul_(-1))),
    "second adapter": second_adapter,
}
CHANGES = ONCE | SAME_TEXT | TWICE


def change(name, model):
    """Change `model`; return the next change, or None."""
    again = CHANGES[name](model)
    return again if name in TWICE else (lambda: weights_in_place(model)) if name in SAME_TEXT else None
