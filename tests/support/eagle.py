"""Tiny random EAGLE-3 drafters, and what they draft worked out without caches, one text at a time."""

import copy
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.eagle import Eagle3Drafter
from hf_lossy_assist.drafters.hidden_state import HiddenStateRun
from hf_lossy_assist.drafters.networks.eagle_network import Eagle1Config, Eagle1Network, Eagle3Config, Eagle3Network
from hf_lossy_assist.methods.eagle3.data import TextBatch
from hf_lossy_assist.methods.eagle3.unrolled_loss import unroll
from hf_lossy_assist.models.hidden_state_hook import HiddenStateHook


def network(
    target, seed=0, kind="llama", layers=1, kept=40, target_layers=(0, 1, 2), hidden=None, own_embeddings=True, **flags
):
    """`kept`: tokens that it can propose; None: all."""
    text = target.config.get_text_config(decoder=True)
    sizes = {
        "vocab_size": text.vocab_size, "hidden_size": hidden or text.hidden_size, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    }  # fmt: skip
    layer = (LlamaConfig if kind == "llama" else Qwen3Config)(**sizes)
    config = Eagle3Config(layer, target_layers, kept or text.vocab_size, text.hidden_size, **flags)
    torch.manual_seed(seed)
    out = Eagle3Network(config, own_embeddings)
    with torch.no_grad():
        for weight in out.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
        if kept:
            ids = torch.randperm(text.vocab_size)[:kept].sort().values
            out.d2t.copy_(ids - torch.arange(kept))
    return out.to(target.dtype).eval()


def eagle1(target, layers=1, bias=True, own_embeddings=True, seed=0):
    text = target.config
    layer = LlamaConfig(
        vocab_size=text.vocab_size, hidden_size=text.hidden_size, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(seed)
    out = Eagle1Network(Eagle1Config(layer, bias), own_embeddings)
    with torch.no_grad():
        for weight in out.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    return out.to(target.dtype).eval().requires_grad_(False)


class Round(NamedTuple):
    """What a drafter did in one round."""

    texts: list  # of each row, before
    draft: object
    limits: list
    begins: list  # of each row, tokens of which the drafter knows nothing


def watched(monkeypatch):
    """The rounds of all drafters on target states from now on."""
    seen, own = [], HiddenStateRun.propose

    def propose(self, rows, limits, randomness):
        texts, begins = [text.clone() for text in rows.token_ids()], list(self.begins)
        seen.append(Round(texts, own(self, rows, limits, randomness), list(limits), begins))
        return seen[-1].draft

    monkeypatch.setattr(HiddenStateRun, "propose", propose)
    return seen


def drafts(seen):
    """Of each row's text in each round the drafted tokens, where there are any."""
    for its in seen:
        for text, tokens, count in zip(its.texts, its.draft.tokens.tolist(), its.draft.lengths.tolist(), strict=False):
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
    for _ in range(gamma):
        count = len(tokens)
        mask = torch.full((count, count), torch.finfo(states.dtype).min, dtype=states.dtype).triu(1)[None, None]
        embeds = embedding(torch.tensor([tokens]))
        own, normed = net(embeds, states, torch.arange(count)[None], mask, None)
        read.append(normed[0, -1])
        before.append(own[0, -1])  # the last layer's, where `norm_output` is off
        full = (net.lm_head or target.get_output_embeddings())(normed[0, -1])
        if config.reduced:
            full = torch.full((config.layer.vocab_size,), -torch.inf, dtype=full.dtype).scatter(
                0, net.target_ids, full
            )
        logits.append(full)
        tokens.append(follow[len(read) - 1] if len(read) <= len(follow) else int(full.argmax()))
        states = torch.cat([states, own[:, -1:]], dim=1)
    return torch.stack(logits), torch.tensor(tokens[len(text) - 1 - begin :]), torch.stack(read), torch.stack(before)


def trained(target, inputs, new=24, rounds=60, layers=(0, 1, 2), **settings):
    """A drafter that has learned what `target` writes behind `inputs`, of `rounds` steps of training."""
    net = network(target, own_embeddings=False, target_layers=layers, **settings).float()
    texts = target.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None)
    reader = HiddenStateHook(target, layers)
    rows = [text[int((mask == 0).sum()) :] for text, mask in zip(texts, inputs["attention_mask"], strict=True)]
    with torch.no_grad():
        likely = [target(row[None]).logits[0].softmax(dim=-1).topk(32) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    batch = TextBatch(
        pad(rows, batch_first=True), pad([reader.read(target, row).bfloat16().cpu() for row in rows], batch_first=True),
        pad([its.indices for its in likely], batch_first=True), pad([its.values.float() for its in likely], batch_first=True),
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
