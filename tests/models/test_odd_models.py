"""Models in states that Transformers' `generate` can run: in training, past a table of positions, offloaded, compiled; heads of other dtypes. Each
writes what the model writes otherwise.
"""

import contextlib

import accelerate
import pytest
import torch
import transformers
from support.small import VOCAB, llama, louder, near, one, ragged, tokenizer, words
from transformers import AutoModelForCausalLM, BloomConfig, GenerationMixin, GPT2Config, GPT2LMHeadModel

import hf_lossy_assist as hla
from hf_lossy_assist import demo
from hf_lossy_assist.generation.prefill import checkpointing_disabled
from hf_lossy_assist.models.facts import facts_of


NEW = {"max_new_tokens": 16, "do_sample": False}


def stock(model, inputs):
    return GenerationMixin.generate(model, **inputs, **NEW)


def ours(target, draft, inputs, policy="strict", **settings):
    return hla.enable(target).generate(**inputs, **NEW | settings, assistant_model=draft, lossy_policy=policy)


def gpt2(positions):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": positions}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    return louder(GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes, **special)).eval())


def in_training(model):
    enable = getattr(model, "activation_checkpointing_enable", None)  # the old name warns where there is this one
    (enable or model.gradient_checkpointing_enable)()
    return model.train()


def flags(model):
    return [getattr(module, "gradient_checkpointing", False) for module in model.modules()]


@pytest.mark.parametrize("which", ["target", "draft"])
def test_gradient_checkpointing_changes_no_text(which):
    """There Transformers' own `generate` drops the cache and still feeds one token at a time, so its text is none of the model's."""
    inputs = ragged()
    target, draft, expected = llama(), near(llama()), stock(llama(), inputs)
    for name, model in (("target", target), ("draft", draft)):
        if which == name:
            in_training(model)
    before = flags(target), flags(draft)
    assert torch.equal(ours(target, draft, inputs), expected)
    with pytest.raises(ValueError, match="max_new_tokens"):
        ours(target, draft, inputs, max_new_tokens=0)
    assert before == (flags(target), flags(draft)) and any(map(any, before))


def test_gradient_checkpointing_waits_for_the_last_of_several_calls():
    target, draft = in_training(llama()), in_training(near(llama()))
    before = flags(target), flags(draft)
    for fails in (False, True):
        first, second = contextlib.ExitStack(), contextlib.ExitStack()
        first.enter_context(checkpointing_disabled(target, target))
        second.enter_context(checkpointing_disabled(target, draft))
        with contextlib.suppress(RuntimeError), first:
            if fails:
                raise RuntimeError("stop here")
        assert not any(flags(target)) and not any(flags(draft))
        second.close()
        assert (flags(target), flags(draft)) == before


def test_a_target_may_fill_its_table():
    """16 positions write 17 tokens: the last is not fed. Drafts never reach beyond the table, nor does the padding of a row that is ahead of the others."""
    model, inputs = gpt2(16), ragged()
    expected = GenerationMixin.generate(model, **inputs, max_new_tokens=8, do_sample=False)
    for gamma in (1, 5, 12):
        settings = {"max_new_tokens": 8, "num_assistant_tokens": gamma}
        assert torch.equal(ours(model, near(gpt2(16)), inputs, **settings), expected)


def test_a_text_that_ends_in_time_may_have_a_larger_limit():
    """As in Transformers, `max_new_tokens` beyond the table is no error while no text needs it."""
    model, inputs = gpt2(20), ragged()
    first = GenerationMixin.generate(model, **inputs, max_new_tokens=8, do_sample=False)
    model.generation_config.eos_token_id = sorted({int(row[11]) for row in first})
    expected = GenerationMixin.generate(model, **inputs, max_new_tokens=60, do_sample=False)
    assert expected.shape[1] <= 12
    assert torch.equal(ours(model, near(gpt2(20)), inputs, max_new_tokens=60, num_assistant_tokens=15), expected)


@pytest.mark.parametrize("policy", ["svip", pytest.param("strict", marks=pytest.mark.full)])
def test_a_draft_stops_guessing_at_the_end_of_its_table(policy):
    """The texts outgrow it, or began beyond it; the target goes on alone."""
    target = llama()
    for inputs in (ragged(), ragged((0, 3, 9), 20)):
        out = ours(target, gpt2(16), inputs, policy, return_dict_in_generate=True)
        assert torch.equal(out.sequences, stock(target, inputs))
        width = int(inputs["attention_mask"].sum(dim=1).min())
        assert (out.speculation.total().num_draft_tokens > 0) == (width < 16)
    tokenizers = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(words()[::-1])}
    for width in (9, 30):
        out = ours(target, gpt2(16), one(width), return_dict_in_generate=True, **tokenizers)
        assert torch.equal(out.sequences, stock(target, one(width)))
        assert out.speculation.num_new_tokens == 16 and ("draft" in out.speculation.forwards) == (width < 16)


def test_tables_are_found_where_transformers_has_them():
    assert facts_of(gpt2(16)).table_end == 16 and facts_of(llama()).table_end is None
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "ffn_dim": 16}
    opt = transformers.OPTConfig(**sizes, word_embed_proj_dim=16, max_position_embeddings=24)
    assert facts_of(transformers.OPTForCausalLM(opt)).table_end == 24
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 24, "pad_token_id": 1}
    roberta = transformers.RobertaConfig(**sizes, is_decoder=True)
    assert facts_of(transformers.RobertaForCausalLM(roberta)).table_end == 22


@pytest.mark.filterwarnings(
    "ignore:You are calling .generate.. with the `input_ids`:UserWarning"
)  # Transformers before 5.20
def test_models_whose_weights_are_offloaded():
    models = {"target": llama(), "draft": near(llama())}
    for model in models.values():
        accelerate.cpu_offload(model, torch.device("cpu"))
        assert model.get_input_embeddings().weight.device.type == "meta"
    assert torch.equal(ours(**models, inputs=ragged()), stock(llama(), ragged()))


@pytest.mark.nightly
def test_compiled_models_are_run_as_transformers_runs_them():
    """`torch.compile(model).generate` is the inner model's."""
    target, draft = llama(), near(llama())
    compiled = torch.compile(target)
    assert hla.enable(compiled) is compiled and hla.is_enabled(target) and hla.is_enabled(compiled)
    out = compiled.generate(**ragged(), **NEW, assistant_model=torch.compile(draft), lossy_policy="strict")
    assert torch.equal(out, stock(llama(), ragged()))
    assert not hla.is_enabled(hla.disable(compiled))


class OutOnce:
    """Raises at its second call, as a device without memory does."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *_):
        self.calls += 1
        if self.calls == 2:
            raise torch.OutOfMemoryError("out of memory")


def test_memory_that_ran_out_in_a_trial_says_nothing_of_the_model():
    target = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=2, n_head=6, pad_token_id=0, eos_token_id=None)
    ).eval()
    handle = target.transformer.ln_f.register_forward_hook(OutOnce())
    with pytest.raises(torch.OutOfMemoryError):
        ours(target, near(llama()), ragged())
    handle.remove()
    assert torch.equal(ours(target, near(llama()), ragged()), stock(target, ragged()))


@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.full)])
def test_a_head_of_another_dtype_says_what_its_weights_say(dtype):
    for cls, kind in ((hla.LinearHead, {"kind": "linear"}), (hla.MLPHead, {"kind": "mlp", "width": 8})):
        torch.manual_seed(1)
        head, same = cls(hla.HeadConfig(32, **kind)).to(dtype), cls(hla.HeadConfig(32, **kind))
        same.load_state_dict({name: weight.float() for name, weight in head.state_dict().items()})
        features = torch.randn(3, 5, 32, dtype=torch.bfloat16)
        assert torch.equal(head(features), same(features)) and head(features).dtype == torch.float32
        texts = [ours(llama(), near(llama()), ragged(), hla.Sprinter(each, 0.5)) for each in (head, same)]
        assert torch.equal(*texts)


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
@pytest.mark.filterwarnings("ignore:.*this policy is lossy", "ignore:the head.s .* may differ")
def test_tokens_are_those_of_the_whole_model(tmp_path):
    whole, draft, _, tokenizer = demo.load()
    given = {"device_map": PLACES, "offload_folder": tmp_path, "dtype": torch.float32}
    target = AutoModelForCausalLM.from_pretrained(FOLDER, **given)
    assert target.get_parameter("model.layers.11.mlp.up_proj.weight").device.type == "meta", "it is on disk"
    prompts = [problem.prompt for problem in demo.problems(3, seed=2)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    for n, (name, policy) in enumerate(POLICIES.items()):
        texts = []
        for model in (target, whole):
            call = {"lossy_policy": policy(), "do_sample": n % 2 == 0, "max_new_tokens": 16}
            call["generator"] = torch.Generator().manual_seed(3)
            texts.append(hla.enable(model).generate(**inputs, assistant_model=draft, **call))
        assert torch.equal(*texts), name
