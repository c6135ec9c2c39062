"""Makes the folders beside it: DSpark drafters with random weights as the `speculators` package writes them, with what its forward works out.

    pip install speculators==0.9.0 'transformers==5.19.*'     # in an environment of its own
    python tests/drafters/dspark_golden/make.py

golden.safetensors: `embedding` and `head` (V, H), as a target's; `states` (1, T, layers · H) and `ids` (1, T) of a text; `logits` (2, drafts, draft V) and
`confidence` (2, drafts), before the sigmoid, of the blocks behind its first `FIRST` and `FIRST` + 2 tokens, each place after the tokens of `ids`.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config


VOCABULARY, DRAFT_VOCABULARY, WIDTH, TOKENS, FIRST = 41, 24, 16, 16, 7
CASES = {
    "vanilla": {},
    "gated-two-layers": {"layers": 2, "markov_head_type": "gated", "aux_hidden_state_layer_ids": [1, 3, 4]},
    "rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    "whole-vocabulary": {"draft_vocabulary": VOCABULARY, "sample_from_anchor": False},
}


def make(folder: Path, seed: int, *, layers: int = 1, draft_vocabulary: int = DRAFT_VOCABULARY, **flags) -> None:
    layer = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, max_position_embeddings=64, layer_types=["full_attention"] * layers,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=4)
    verifier = VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"])
    spec = SpeculatorsConfig(
        algorithm="dspark", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    )
    settings = {"aux_hidden_state_layer_ids": [0, 2], "markov_rank": 4} | flags
    config = DSparkSpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=draft_vocabulary, block_size=4, mask_token_id=VOCABULARY - 1,
        speculators_config=spec, **settings,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = DSparkDraftModel(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    if draft_vocabulary != VOCABULARY:
        ids = torch.randperm(VOCABULARY)[:draft_vocabulary].sort().values
        model.load_vocab_mappings(torch.isin(torch.arange(VOCABULARY), ids), ids - torch.arange(draft_vocabulary))
    states = torch.randn(1, TOKENS, len(settings["aux_hidden_state_layer_ids"]) * WIDTH)
    text = torch.randint(0, VOCABULARY - 1, (1, TOKENS))
    anchors = torch.zeros(1, TOKENS)
    anchors[0, [FIRST - 1, FIRST + 1]] = 1  # the only tokens behind which blocks are drafted
    seen = []
    core.compute_metrics = lambda logits, targets, confidence, *_, **__: seen.append((logits, confidence)) or (0, {})
    with torch.no_grad():
        model(
            states,
            text,
            anchors,
            torch.randn(1, TOKENS, WIDTH),
            torch.zeros(1, TOKENS, dtype=torch.long),
            max_anchors=2,
        )
    [(logits, confidence)] = seen
    first = 0 if config.sample_from_anchor else 1
    golden = {
        "embedding": model.embed_tokens.weight, "head": model.lm_head.weight, "states": states, "ids": text,
        "logits": logits.view(2, 4, -1)[:, first:], "confidence": confidence.view(2, 4)[:, first:],
    }  # fmt: skip
    assert not any(bool(tensor.isnan().any()) for tensor in golden.values())
    model.save_pretrained(folder)
    (folder / "config.py").unlink()  # the package's code
    save_file({name: tensor.detach().contiguous() for name, tensor in golden.items()}, folder / "golden.safetensors")


if __name__ == "__main__":
    for seed, (name, settings) in enumerate(CASES.items()):
        make(Path(__file__).with_name(name), seed, **settings)
