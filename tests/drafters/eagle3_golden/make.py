"""Makes the folders beside it: EAGLE-3 drafters with random weights as the `speculators` package writes them, with the logits that it works out.

    pip install speculators==0.9.0 'transformers==5.19.*'     # in an environment of its own
    python tests/drafters/eagle3_golden/make.py

golden.safetensors: `hidden` (1, T, layers · H), `ids` (1, T), and `logits` (steps, T, draft vocabulary), of which [k, t] are those of the (k + 1)-th token
drafted behind place t, where the tokens in between are those of `ids`.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config


VOCABULARY, DRAFT_VOCABULARY, WIDTH, TOKENS, STEPS = 61, 24, 16, 10, 3
CASES = {
    "plain": {},
    "norm-before-residual": {"norm_before_residual": True},
    "norm-before-fc": {"norm_before_fc": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "two-layers": {"layers": 2},
    "whole-vocabulary": {"draft_vocabulary": None},
    "qwen3-four-states": {"kind": Qwen3Config, "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]},
    "windows": {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
}


def make(
    folder: Path,
    seed: int,
    *,
    kind=LlamaConfig,
    layers: int = 1,
    draft_vocabulary: int | None = DRAFT_VOCABULARY,
    **flags,
) -> None:
    windows = {name: flags.pop(name) for name in ("layer_types", "sliding_window") if name in flags}
    layer = kind(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, max_position_embeddings=64, **windows,
    )  # fmt: skip
    layer._attn_implementation = "eager"  # which takes masks of any length
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    spec = SpeculatorsConfig(
        algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocabulary or VOCABULARY,
        speculators_config=spec,
        **flags,
    )
    torch.manual_seed(seed)
    model = Eagle3DraftModel(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    if draft_vocabulary is not None:
        ids = torch.randperm(VOCABULARY)[:draft_vocabulary].sort().values
        model.t2d.zero_()
        model.t2d[ids] = True
        model.d2t.copy_(ids - torch.arange(draft_vocabulary))
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out[0].detach().clone()))
    states = len(flags.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0))
    hidden, ids = torch.randn(1, TOKENS, states * WIDTH), torch.randint(0, VOCABULARY, (1, TOKENS))
    with torch.no_grad():
        model(
            hidden_states=hidden, input_ids=ids, document_ids=torch.zeros(1, TOKENS, dtype=torch.long), ttt_steps=STEPS
        )
    assert len(logits) == STEPS and not any(bool(row.isnan().any()) for row in logits)
    model.save_pretrained(folder)
    save_file(
        {"hidden": hidden, "ids": ids, "logits": torch.stack(logits).contiguous()}, folder / "golden.safetensors"
    )


if __name__ == "__main__":
    for seed, (name, settings) in enumerate(CASES.items()):  # a new case goes to the end: its place is its seed
        make(Path(__file__).with_name(name), seed, **settings)
