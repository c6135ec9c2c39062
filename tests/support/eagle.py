"""Tiny random networks of EAGLE, DFlash, DFlash 2 and DSpark, and drafts of theirs without caches; what Transformers itself drafts with from a target's states."""

import copy
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, Qwen3Config

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.hidden_state import HiddenStateRun
from hf_lossy_assist.drafters.networks import corrected_networks as corrected
from hf_lossy_assist.drafters.networks.base import AttentionWindow
from hf_lossy_assist.drafters.networks.dflash_network import DFlashConfig, DFlashNetwork
from hf_lossy_assist.drafters.networks.eagle_network import Eagle3Config, Eagle3Network
from hf_lossy_assist.drafters.trained import Eagle3Drafter
from hf_lossy_assist.methods.eagle3.collect import TextBatch
from hf_lossy_assist.methods.eagle3.unrolled_loss import unroll
from hf_lossy_assist.models.hidden_state_hook import HiddenStateHook


def network(
    target, seed=0, kind="llama", layers=1, draft_vocabulary=40, target_layers=(0, 1, 2), hidden=None, has_embeddings=True, **flags
):  # fmt: skip
    """`draft_vocabulary`: how many tokens it can propose; None: all."""
    text = target.config.get_text_config(decoder=True)
    sizes = {
        "vocab_size": text.vocab_size, "hidden_size": hidden or text.hidden_size, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    }  # fmt: skip
    layer = (LlamaConfig if kind == "llama" else Qwen3Config)(**sizes)
    config = Eagle3Config(layer, target_layers, draft_vocabulary or text.vocab_size, text.hidden_size, **flags)
    torch.manual_seed(seed)
    out = Eagle3Network(config, has_embeddings)
    with torch.no_grad():
        for weight in out.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
        if draft_vocabulary:
            ids = torch.randperm(text.vocab_size)[:draft_vocabulary].sort().values
            out.d2t.copy_(ids - torch.arange(draft_vocabulary))
    return out.to(target.dtype).eval()


class Round(NamedTuple):
    """A drafter's inputs and draft in one round."""

    texts: list  # of each row, before
    draft: object
    limits: list
    begins: list  # of each row, tokens of which the drafter knows nothing


def watched(monkeypatch):
    """The rounds of all drafters on target states from now on."""
    seen, original = [], HiddenStateRun.propose

    def propose(self, rows, limits, randomness):
        texts, begins = [text.clone() for text in rows.token_ids()], list(self.model.begins)
        seen.append(Round(texts, original(self, rows, limits, randomness), list(limits), begins))
        return seen[-1].draft

    monkeypatch.setattr(HiddenStateRun, "propose", propose)
    return seen


def drafts(seen):
    """Yield each row's text and drafted tokens in each round, where there are any."""
    for round_ in seen:
        draft = round_.draft
        for text, tokens, count in zip(round_.texts, draft.tokens.tolist(), draft.lengths.tolist(), strict=False):
            if count:
                yield text, tokens[:count]


def drafter(target, **settings):
    return Eagle3Drafter(network(target, **settings))


def chain(target, net, text, gamma, begin=0):
    """The logits over the target's vocabulary of `gamma` greedily drafted tokens behind `text` (n,), (γ, V), and the tokens (γ,).

    `begin`: tokens of which the network knows nothing.
    """
    return chain_with_states(target, net, text, gamma, begin)[:2]


@torch.no_grad()
def chain_with_states(target, net, text, gamma, begin=0, follow=()):
    """As `chain`, over the tokens of `follow` in place of the first drafted ones, and the network's states at each place behind its norm and before it, (γ, H) each."""
    config = net.config
    hidden = target(text[None, :-1], output_hidden_states=True)
    # Transformers norms the last of them; the tests read none that is.
    layers = config.layers_of(len(hidden.hidden_states) - 1)
    states = net.fuse(torch.cat([hidden.hidden_states[layer] for layer in layers], dim=-1))[:, begin:]
    embedding = net.embed_tokens or target.get_input_embeddings()
    tokens, logits, read, before = text[begin + 1 :].tolist(), [], [], []
    known = len(tokens) - 1  # the last pair with a state of the target's
    for _ in range(gamma):
        count = len(tokens)
        sights = config.sights or [AttentionWindow()] * len(net.layers)
        masks = [_seen_by(sight, count, known, states.dtype) for sight in sights]
        embeds = embedding(torch.tensor([tokens]))
        plain, normed = net(embeds, states, torch.arange(count)[None], masks, None)
        read.append(normed[0, -1])
        before.append(plain[0, -1])  # the last layer's, where `norm_output` is off
        full = (net.lm_head or target.get_output_embeddings())(normed[0, -1])
        if config.reduced:
            nothing = torch.full((config.layer.vocab_size,), -torch.inf, dtype=full.dtype)
            full = nothing.scatter(0, net.target_ids, full)
        logits.append(full)
        tokens.append(follow[len(read) - 1] if len(read) <= len(follow) else int(full.argmax()))
        states = torch.cat([states, plain[:, -1:]], dim=1)
    return torch.stack(logits), torch.tensor(tokens[len(text) - 1 - begin :]), torch.stack(read), torch.stack(before)


def _seen_by(sight, count, known, dtype):
    """The mask of `count` pairs, place by place: a pair sees those before it, and of the text `reach` before the last that it knows."""
    mask = torch.full((count, count), torch.finfo(dtype).min, dtype=dtype).triu(1)
    for pair in range(count):
        if sight.reach is not None:
            mask[pair, : max(min(pair, known) - sight.reach, 0)] = torch.finfo(dtype).min
    return mask[None, None]


def trained(target, inputs, new=24, rounds=60, layers=(0, 1, 2), **settings):
    """A drafter that has learned what `target` writes behind `inputs`, of `rounds` steps of training."""
    net = network(target, has_embeddings=False, target_layers=layers, **settings).float()
    texts = target.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None)
    reader = HiddenStateHook(target, layers)
    rows = [text[int((mask == 0).sum()) :] for text, mask in zip(texts, inputs["attention_mask"], strict=True)]
    with torch.no_grad():
        likely = [target(row[None]).logits[0].softmax(dim=-1).topk(32) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    batch = TextBatch(
        pad(rows, batch_first=True), pad([reader.read(target, row).bfloat16().cpu() for row in rows], batch_first=True),
        pad([top.indices for top in likely], batch_first=True), pad([top.values.float() for top in likely], batch_first=True),
        torch.tensor(list(map(len, rows))), inputs["attention_mask"].sum(dim=1),
    )  # fmt: skip
    embedding = copy.deepcopy(target.get_input_embeddings()).float()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(rounds):
        loss = sum(step.loss for step in unroll(net, embedding, batch, 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Eagle3Drafter(net.to(target.dtype).eval().requires_grad_(False))


def refused(folder, **kwargs):
    """The line in which `load_drafter` refuses a folder."""
    with pytest.raises(ValueError) as error:
        hla.load_drafter(folder, **kwargs)
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
    return str(error.value)


def dflash_network(target, seed=0, layers=1, block=5, target_layers=(0, 1, 2), draft_vocabulary=None, **flags):
    """DSpark's if `flags` has the rank of a Markov head, DFlash 2's if it has candidates; both are large, so that the token before matters."""
    of_dspark, second = "rank" in flags and "candidates" not in flags, "candidates" in flags
    make, of = (corrected.DSparkNetwork, corrected.DSparkConfig) if of_dspark else (DFlashNetwork, DFlashConfig)
    make, of = (corrected.DFlash2Network, corrected.DFlash2Config) if second else (make, of)
    text = target.config.get_text_config(decoder=True)
    layer = Qwen3Config(
        vocab_size=text.vocab_size, hidden_size=text.hidden_size, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    config = of(layer, target_layers, block, text.vocab_size - 1, text.hidden_size, draft_vocab_size=draft_vocabulary, **flags)  # fmt: skip
    torch.manual_seed(seed)
    out = make(config)
    with torch.no_grad():
        for weight in out.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
        if of_dspark and config.rank:
            out.markov_head.markov_w2.weight *= 10
        if second:
            out.candidate_selector.hidden_projection.weight *= 10
        if draft_vocabulary:
            ids = torch.randperm(text.vocab_size)[:draft_vocabulary].sort().values
            out.d2t.copy_(ids - torch.arange(draft_vocabulary))
    return out.to(target.dtype).eval().requires_grad_(False)


def write_mtp(folder, layers, vocabulary=6, seed=0):
    """Write a random DeepSeek-V3 of two layers with `layers` MTP layers. Of few tokens some drafts are right by chance."""
    from transformers.modeling_layers import MtpModel

    config = DeepseekV3Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
        q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_mtp_layers=layers,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in MtpModel(model, layers).state_dict().items():
        if not name.startswith("layers."):
            continue  # the target's own
        if tensor.dim() > 1:
            tensor = torch.randn(tensor.shape) * 0.3  # Transformers leaves some of them as the memory was
        _, number, rest = name.split(".", 2)
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        here = f"model.layers.{2 + int(number)}"
        if rest.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    weights[f"{here}.mlp.experts.{e}.{part}.weight"] = half.contiguous()
        elif rest.endswith("experts.down_proj"):
            for e, expert in enumerate(tensor):
                weights[f"{here}.mlp.experts.{e}.down_proj.weight"] = expert.contiguous()
        else:
            weights[f"{here}.{rest}"] = tensor.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def mtp_target(folder):
    """Load one. Transformers knows MTP layers by their numbers in the published checkpoint, of which this one has others."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[2-9].*"]
    return hla.enable(model)
