"""Makes the folders …_golden: drafters with random weights as the packages that train them write them, with what those work out.

    pip install speculators==0.9.0 'transformers==5.19.*'     # in an environment of its own
    python tests/drafters/make_golden.py eagle3 dflash_windows dspark dflash2
    pip install dflash==0.1.0                                 # in another one
    python tests/drafters/make_golden.py dflash

golden.safetensors: `embedding` and `head` (V, H), as a target's; `states` (1, T, layers · H) and `ids` (1, T) of a text; `logits` (2, drafts, draft V) and
DSpark's `confidence` (2, drafts), before the sigmoid, of the blocks behind its first `FIRST` and `FIRST` + 2 tokens: of the first block one was accepted.
DSpark's places follow the tokens of `ids`; DFlash 2's logits are its selector's scores, −inf at all but its candidates. EAGLE-3's: `hidden` are the states,
and of `logits` (steps, T, draft V) [k, t] are those of the (k + 1)-th token drafted behind place t, where the tokens in between are those of `ids`.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig, Qwen3Config

from hf_lossy_assist.models.facts import CACHE


DRAFT_VOCABULARY, WIDTH, FIRST, FULL, SLIDING = 24, 16, 7, "full_attention", "sliding_attention"
# A new case goes to the end: its place is its seed.
CASES = {
    "eagle3": {
        "plain": {}, "norm-before-residual": {"norm_before_residual": True}, "norm-before-fc": {"norm_before_fc": True},
        "eagle-3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True}, "two-layers": {"layers": 2},
        "whole-vocabulary": {"draft_vocabulary": None}, "qwen3-four-states": {"kind": Qwen3Config, "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]},
        "windows": {"layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 4},
    },
    "dflash": {"one-layer": {"layers": 1, "block": 4, "ids": [0, 2]}, "two-layers": {"layers": 2, "block": 6, "ids": [1, 3, 4]}},
    "dflash_windows": {"causal": {"non_causal": False}, "not-causal": {"non_causal": True}},
    "dspark": {
        "vanilla": {}, "gated-two-layers": {"layers": 2, "markov_head_type": "gated", "aux_hidden_state_layer_ids": [1, 3, 4]},
        "rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
        "whole-vocabulary": {"draft_vocabulary": 41, "sample_from_anchor": False},
    },
    "dflash2": {
        "two-taps": {}, "two-layers": {"layers": 2, "conv_kernel_size": 3, "conv_group_size": 8, "aux_hidden_state_layer_ids": [1, 3, 4]},
        "windows": {"window": 3, "conv_kernel_size": 1, "selector_top_k": 9, "sample_from_anchor": True},
    },
}  # fmt: skip


def make_layer(vocabulary, layers, kind=Qwen3Config, attention="eager", **more):
    out = kind(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, **more,
    )  # fmt: skip
    out._attn_implementation = attention
    return out


def make_spec(algorithm, tokens, architecture):
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=[architecture]),
    )  # fmt: skip


def make_model(kind, config, seed):
    torch.manual_seed(seed)
    model = kind(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    return model


def choose_tokens(vocabulary):
    """Token ids of a reduced vocabulary, and how far each is from its place."""
    ids = torch.randperm(vocabulary)[:DRAFT_VOCABULARY].sort().values
    return ids, ids - torch.arange(DRAFT_VOCABULARY)


def save(folder, model, golden):
    assert not any(bool(tensor.isnan().any()) for tensor in golden.values())
    model.save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # the package's code
    golden = {name: tensor.detach().clone().contiguous() for name, tensor in golden.items()}
    save_file(golden, folder / "golden.safetensors")


def eagle3(folder, seed, kind=LlamaConfig, layers=1, draft_vocabulary=DRAFT_VOCABULARY, **flags):
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    vocabulary, tokens, steps = 61, 10, 3
    windows = {name: flags.pop(name) for name in ("layer_types", "sliding_window") if name in flags}
    layer = make_layer(vocabulary, layers, kind, **windows)  # eager attention takes masks of any length
    spec = make_spec("eagle3", steps, "LlamaForCausalLM")
    model = make_model(
        Eagle3DraftModel,
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=draft_vocabulary or vocabulary, speculators_config=spec, **flags,
        ),
        seed,
    )  # fmt: skip
    if draft_vocabulary is not None:
        map_tokens(model, *choose_tokens(vocabulary))
    logits = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out[0].detach().clone()))
    states = len(flags.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0))
    hidden, ids = torch.randn(1, tokens, states * WIDTH), torch.randint(0, vocabulary, (1, tokens))
    documents = torch.zeros(1, tokens, dtype=torch.long)
    with torch.no_grad():
        model(hidden_states=hidden, input_ids=ids, document_ids=documents, ttt_steps=steps)
    assert len(logits) == steps
    save(folder, model, {"hidden": hidden, "ids": ids, "logits": torch.stack(logits)})


def map_tokens(model, ids, distances):
    model.t2d.zero_()
    model.t2d[ids] = True
    model.d2t.copy_(distances)


def dflash(folder, seed, layers, block, ids):
    from dflash.model import DFlashDraftModel

    vocabulary, tokens = 61, 12
    config = make_layer(vocabulary, layers, attention="sdpa", tie_word_embeddings=False, layer_types=[FULL] * layers)
    config.dflash_config = {"target_layer_ids": ids, "block_size": block, "mask_token_id": vocabulary - 1}
    config.num_target_layers = 8
    model = make_model(DFlashDraftModel, config, seed)
    embedding, head = torch.randn(vocabulary, WIDTH), torch.randn(vocabulary, WIDTH)
    states, text = torch.randn(1, tokens, len(ids) * WIDTH), torch.randint(0, vocabulary - 1, (1, tokens))
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    logits, known = [], 0
    for length in (FIRST, FIRST + 2):  # the last of them has no states yet
        block_ids = torch.full((1, block), vocabulary - 1)
        block_ids[0, 0] = text[0, length - 1]
        with torch.no_grad():
            hidden = model(
                target_hidden=states[:, known : length - 1], noise_embedding=embedding[block_ids],
                position_ids=torch.arange(known, length - 1 + block)[None], **{CACHE: cache}, use_cache=True,
            )  # fmt: skip
        cache.crop(-(cache.get_seq_length() - (length - 1)))
        logits.append(hidden[0, 1:] @ head.T)
        known = length - 1
    golden = {"embedding": embedding, "head": head, "states": states, "ids": text, "logits": torch.stack(logits)}
    save(folder, model, golden)


def dflash_windows(folder, seed, non_causal):
    from speculators.models.dflash import core
    from speculators.models.dflash.config import DFlashSpeculatorConfig

    vocabulary, tokens, block, layers = 61, 12, 4, [1, 3]
    windows = {"layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 3}
    config = DFlashSpeculatorConfig(
        transformer_layer_config=make_layer(vocabulary, 2, tie_word_embeddings=False, **windows), draft_vocab_size=DRAFT_VOCABULARY,
        block_size=block, aux_hidden_state_layer_ids=layers, mask_token_id=vocabulary - 1, sliding_window_non_causal=non_causal,
        speculators_config=make_spec("dflash", block - 1, "LlamaForCausalLM"),
    )  # fmt: skip
    model = make_model(core.DFlashDraftModel, config, seed + 7)
    map_tokens(model, *choose_tokens(vocabulary))
    states, text = torch.randn(1, tokens, len(layers) * WIDTH), torch.randint(0, vocabulary - 1, (1, tokens))
    anchors = torch.tensor([FIRST - 1, FIRST + 1])  # the last token of each of the two texts
    core.select_anchors = lambda *given: (anchors, torch.ones(2, dtype=torch.bool))
    with torch.no_grad():
        logits = model._backbone_forward(
            hidden_states=states, input_ids=text, loss_mask=torch.ones(1, tokens), verifier_last_hidden_states=torch.zeros(1, tokens, WIDTH),
            document_ids=torch.zeros(1, tokens, dtype=torch.long), max_anchors=2,
        )[1]  # fmt: skip
    logits = logits[0].unflatten(0, (2, block))[:, 1:]
    save(folder, model, {"embedding": model.embed_tokens.weight, "states": states, "ids": text, "logits": logits})


def draft_two_blocks(folder, model, seen):
    """Run a model of blocks of four on a random text; `seen` then has one dict of golden tensors of all places."""
    config, tokens = model.config, 16
    states = torch.randn(1, tokens, len(config.aux_hidden_state_layer_ids) * WIDTH)
    text, anchors = torch.randint(0, 40, (1, tokens)), torch.zeros(1, tokens)
    anchors[0, [FIRST - 1, FIRST + 1]] = 1  # the only tokens behind which blocks are drafted
    with torch.no_grad():
        documents = torch.zeros(1, tokens, dtype=torch.long)
        model(states, text, anchors, torch.randn(1, tokens, WIDTH), documents, max_anchors=2)
    [found] = seen
    first = 0 if config.sample_from_anchor else 1
    golden = {"embedding": model.embed_tokens.weight, "head": model.lm_head.weight, "states": states, "ids": text}
    save(folder, model, golden | {name: tensor[:, first:] for name, tensor in found.items()})


def dspark(folder, seed, layers=1, draft_vocabulary=DRAFT_VOCABULARY, **flags):
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig, core

    settings, seen = {"aux_hidden_state_layer_ids": [0, 2], "markov_rank": 4} | flags, []
    config = DSparkSpeculatorConfig(
        transformer_layer_config=make_layer(41, layers, layer_types=[FULL] * layers), draft_vocab_size=draft_vocabulary,
        block_size=4, mask_token_id=40, speculators_config=make_spec("dspark", 4, "Qwen3ForCausalLM"), **settings,
    )  # fmt: skip
    model = make_model(DSparkDraftModel, config, seed)
    if draft_vocabulary != 41:
        ids, distances = choose_tokens(41)
        model.load_vocab_mappings(torch.isin(torch.arange(41), ids), distances)

    def keep(logits, targets, confidence, *_, **__):
        seen.append({"logits": logits.view(2, 4, -1), "confidence": confidence.view(2, 4)})
        return 0, {}

    core.compute_metrics = keep
    draft_two_blocks(folder, model, seen)


def dflash2(folder, seed, layers=1, window=None, **flags):
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig, core

    windows = {"layer_types": [FULL if window is None else SLIDING] * layers, "sliding_window": window}
    settings, seen = {"aux_hidden_state_layer_ids": [0, 2], "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 6} | flags, []  # fmt: skip
    config = DFlash2SpeculatorConfig(
        transformer_layer_config=make_layer(41, layers, use_sliding_window=window is not None, **windows), draft_vocab_size=41,
        block_size=4, mask_token_id=40, speculators_config=make_spec("dflash2", 4, "Qwen3ForCausalLM"), **settings,
    )  # fmt: skip
    model = make_model(DFlash2DraftModel, config, seed)
    selector = model.candidate_selector
    for book in (selector.predecessor_codebook, selector.successor_codebook):
        torch.nn.init.normal_(book, std=2.0)  # the token before decides

    def watched(unary, hidden, before, candidates):
        tokens, scores = selector.select(unary, hidden, before)
        seen.append({"logits": torch.full_like(unary, -torch.inf).scatter(-1, tokens, scores).view(2, 4, -1)})
        return original(unary, hidden, before, candidates)

    original, core.compute_metrics = selector.score_candidates, lambda **_: (0, {})
    calls = [watched]  # `select` calls it, too
    selector.score_candidates = lambda *given: (calls.pop() if calls else original)(*given)
    draft_two_blocks(folder, model, seen)


if __name__ == "__main__":
    for algorithm in sys.argv[1:]:
        for seed, (name, settings) in enumerate(CASES[algorithm].items()):
            globals()[algorithm](Path(__file__).with_name(f"{algorithm}_golden") / name, seed, **settings)
