"""Makes the folders beside it: DFlash drafters of the `speculators` package with a sliding and a full layer, and what that package works out with them.

    pip install speculators==0.9.0 'transformers==5.19.*'     # in an environment of its own
    python tests/drafters/dflash_windows_golden/make.py

golden.safetensors: `embedding` (V, H), a target's; `states` (1, T, layers · H) and `ids` (1, T) of a text; and `logits` (2, block − 1, draft vocabulary) of the
blocks behind its first `FIRST` tokens, and behind two more.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import core
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config


VOCABULARY, DRAFT_VOCABULARY, WIDTH, TOKENS, FIRST, BLOCK, IDS, WINDOW = 61, 24, 16, 12, 7, 4, [1, 3], 3


def make(folder: Path, seed: int, non_causal: bool) -> None:
    layer = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True, sliding_window=WINDOW,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    spec = SpeculatorsConfig(
        algorithm="dflash", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
        default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )  # fmt: skip
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=DRAFT_VOCABULARY, block_size=BLOCK, aux_hidden_state_layer_ids=IDS,
        mask_token_id=VOCABULARY - 1, sliding_window_non_causal=non_causal, speculators_config=spec,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = DFlashDraftModel(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    tokens = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
    model.t2d.zero_()
    model.t2d[tokens] = True
    model.d2t.copy_(tokens - torch.arange(DRAFT_VOCABULARY))
    states, text = torch.randn(1, TOKENS, len(IDS) * WIDTH), torch.randint(0, VOCABULARY - 1, (1, TOKENS))
    anchors = torch.tensor([FIRST - 1, FIRST + 1])  # the last token of each of the two texts
    core.select_anchors = lambda *given: (anchors, torch.ones(2, dtype=torch.bool))
    with torch.no_grad():
        logits = model._backbone_forward(
            hidden_states=states, input_ids=text, loss_mask=torch.ones(1, TOKENS), verifier_last_hidden_states=torch.zeros(1, TOKENS, WIDTH),
            document_ids=torch.zeros(1, TOKENS, dtype=torch.long), max_anchors=2,
        )[1]  # fmt: skip
    logits = logits[0].unflatten(0, (2, BLOCK))[:, 1:]
    assert not bool(logits.isnan().any())
    golden = {"embedding": model.embed_tokens.weight, "states": states, "ids": text, "logits": logits}
    model.save_pretrained(folder)
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in golden.items()}, folder / "golden.safetensors"
    )


if __name__ == "__main__":
    for seed, (name, non_causal) in enumerate({"causal": False, "not-causal": True}.items(), 7):
        make(Path(__file__).with_name(name), seed, non_causal)
