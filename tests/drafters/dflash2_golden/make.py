"""Makes the folders beside it: DFlash 2 drafters with random weights as the `speculators` package writes them, with what its forward works out.

    pip install speculators==0.9.0 'transformers==5.19.*'     # in an environment of its own
    python tests/drafters/dflash2_golden/make.py

golden.safetensors: as in ../dspark_golden, without a confidence; `logits` (2, drafts, V) are the selector's scores, −inf at all but its candidates.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config


VOCABULARY, WIDTH, TOKENS, FIRST = 41, 16, 16, 7
CASES = {
    "two-taps": {},
    "two-layers": {"layers": 2, "conv_kernel_size": 3, "conv_group_size": 8, "aux_hidden_state_layer_ids": [1, 3, 4]},
    "windows": {"window": 3, "conv_kernel_size": 1, "selector_top_k": 9, "sample_from_anchor": True},
}


def make(folder: Path, seed: int, *, layers: int = 1, window: int | None = None, **flags) -> None:
    kind = "full_attention" if window is None else "sliding_attention"
    layer = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, max_position_embeddings=64, layer_types=[kind] * layers, sliding_window=window, use_sliding_window=window is not None,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=4)
    verifier = VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"])
    spec = SpeculatorsConfig(
        algorithm="dflash2", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    )
    settings = {
        "aux_hidden_state_layer_ids": [0, 2],
        "conv_group_size": 4,
        "selector_rank": 4,
        "selector_top_k": 6,
    } | flags
    config = DFlash2SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=VOCABULARY, block_size=4, mask_token_id=VOCABULARY - 1,
        speculators_config=spec, **settings,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = DFlash2DraftModel(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    for book in (model.candidate_selector.predecessor_codebook, model.candidate_selector.successor_codebook):
        torch.nn.init.normal_(book, std=2.0)  # the token before decides
    states = torch.randn(1, TOKENS, len(settings["aux_hidden_state_layer_ids"]) * WIDTH)
    text = torch.randint(0, VOCABULARY - 1, (1, TOKENS))
    anchors = torch.zeros(1, TOKENS)
    anchors[0, [FIRST - 1, FIRST + 1]] = 1  # the only tokens behind which blocks are drafted
    seen = []

    def watched(unary, hidden, before, candidates):
        tokens, scores = model.candidate_selector.select(unary, hidden, before)
        seen.append(torch.full_like(unary, -torch.inf).scatter(-1, tokens, scores))
        return original(unary, hidden, before, candidates)

    original, core.compute_metrics = model.candidate_selector.score_candidates, lambda **_: (0, {})
    calls = [watched]  # `select` calls it, too
    model.candidate_selector.score_candidates = lambda *given: (calls.pop() if calls else original)(*given)
    with torch.no_grad():
        model(
            states, text, anchors, torch.randn(1, TOKENS, WIDTH), torch.zeros(1, TOKENS, dtype=torch.long), max_anchors=2
        )  # fmt: skip
    [logits] = seen
    first = 0 if config.sample_from_anchor else 1
    golden = {
        "embedding": model.embed_tokens.weight, "head": model.lm_head.weight, "states": states, "ids": text,
        "logits": logits.view(2, 4, -1)[:, first:],
    }  # fmt: skip
    assert not any(bool(tensor.isnan().any()) for tensor in golden.values())
    model.save_pretrained(folder)
    (folder / "config.py").unlink()  # the package's code
    save_file({name: tensor.detach().contiguous() for name, tensor in golden.items()}, folder / "golden.safetensors")


if __name__ == "__main__":
    for seed, (name, settings) in enumerate(CASES.items()):
        make(Path(__file__).with_name(name), seed, **settings)
