"""Tiny random EAGLE-3 drafters, and what they draft worked out without caches, one text at a time."""

import copy

import torch
from transformers import LlamaConfig, Qwen3Config

from hf_lossy_assist.drafters.eagle3 import Eagle3Drafter
from hf_lossy_assist.methods.eagle3.chains import steps_of
from hf_lossy_assist.methods.eagle3.collect import read_text
from hf_lossy_assist.methods.eagle3.data import Batch
from hf_lossy_assist.models.eagle3 import Eagle3Config, Eagle3Network
from hf_lossy_assist.models.layer_states import LayerStates


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


def drafter(target, **settings):
    return Eagle3Drafter(network(target, **settings))


@torch.no_grad()
def chain(target, net, text, gamma, begin=0):
    """The logits over the target's vocabulary of `gamma` greedily drafted tokens behind `text` (n,), (γ, V), and the tokens (γ,).

    `begin`: tokens of which the network knows nothing.
    """
    config = net.config
    hidden = target(text[None, :-1], output_hidden_states=True)
    # Transformers norms the last of them; the tests read none that is.
    states = net.fuse(torch.cat([hidden.hidden_states[layer] for layer in config.target_layers], dim=-1))[:, begin:]
    embedding = net.embed_tokens or target.get_input_embeddings()
    tokens, logits = text[begin + 1 :].tolist(), []
    for _ in range(gamma):
        count = len(tokens)
        mask = torch.full((count, count), torch.finfo(states.dtype).min, dtype=states.dtype).triu(1)[None, None]
        embeds = embedding(torch.tensor([tokens]))
        own, normed = net(embeds, states, torch.arange(count)[None], mask, None)
        full = torch.full((config.layer.vocab_size,), -torch.inf, dtype=states.dtype)
        full[net.kept] = net.lm_head(normed[0, -1])
        logits.append(full)
        tokens.append(int(full.argmax()))
        states = torch.cat([states, own[:, -1:]], dim=1)
    return torch.stack(logits), torch.tensor(tokens[len(text) - 1 - begin :])


def trained(target, inputs, new=24, rounds=60, layers=(0, 1, 2), **settings):
    """A drafter that has learned what `target` writes behind `inputs`, of `rounds` steps of training."""
    net = network(target, own_embeddings=False, target_layers=layers, **settings).float()
    texts = target.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None)
    reader = LayerStates(target, layers)
    rows = [text[int((mask == 0).sum()) :] for text, mask in zip(texts, inputs["attention_mask"], strict=True)]
    found = [read_text(reader, target, row, 32) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    batch = Batch(
        pad(rows, batch_first=True), pad([its["states"] for its in found], batch_first=True),
        pad([its["likely"].long() for its in found], batch_first=True), pad([its["probs"].float() for its in found], batch_first=True),
        torch.tensor(list(map(len, rows))), inputs["attention_mask"].sum(dim=1),
    )  # fmt: skip
    embedding = copy.deepcopy(target.get_input_embeddings()).float()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(rounds):
        loss = sum(step.loss for step in steps_of(net, embedding, batch, 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Eagle3Drafter(net.to(target.dtype).eval().requires_grad_(False))
