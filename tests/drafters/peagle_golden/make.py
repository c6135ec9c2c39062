"""Makes the folders beside it: P-EAGLE drafters with random weights as the `speculators` package writes them, with the logits that it works out.

    pip install speculators==0.9.0 'transformers==5.19.*'     # in an environment of its own
    python tests/drafters/peagle_golden/make.py

golden.safetensors: `hidden` (1, T, layers · H), `ids` (1, T), and `logits` (N, draft vocabulary) of the pairs that it ran: pair n is the `depth[n]`-th
behind the text's pair `anchor[n]`, masked unless that is 0.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config


VOCABULARY, DRAFT_VOCABULARY, WIDTH, TOKENS, DEPTHS = 61, 24, 16, 10, 4
CASES = {
    "plain": {},
    "norms": {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "layers": 2},
    "windows": {"kind": Qwen3Config, "layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True},
}  # fmt: skip


def make(folder: Path, seed: int, *, kind=LlamaConfig, layers: int = 1, **flags) -> None:
    windows = {
        name: flags.pop(name) for name in ("layer_types", "sliding_window", "use_sliding_window") if name in flags
    }
    layer = kind(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, max_position_embeddings=64, **windows,
    )  # fmt: skip
    layer._attn_implementation = "eager"  # which takes masks of any length
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=DEPTHS)
    spec = SpeculatorsConfig(
        algorithm="peagle", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    )
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=DRAFT_VOCABULARY, speculators_config=spec, mask_token_id=VOCABULARY - 1, **flags
    )  # fmt: skip
    torch.manual_seed(seed)
    model = PEagleDraftModel(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    ids = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
    model.t2d.zero_()
    model.t2d[ids] = True
    model.d2t.copy_(ids - torch.arange(DRAFT_VOCABULARY))
    logits, places = [], []
    model.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out[0].detach().clone()))
    sample = core.generate_cod_sample_indices

    def watched(**settings):
        places.append(sample(**settings))
        return places[-1]

    core.generate_cod_sample_indices, core.compute_metrics = watched, lambda **_: (0, {})
    hidden, text = torch.randn(1, TOKENS, 3 * WIDTH), torch.randint(0, VOCABULARY - 1, (1, TOKENS))
    with torch.no_grad():
        model(
            hidden_states=hidden, input_ids=text, document_ids=torch.zeros(1, TOKENS, dtype=torch.long), num_depths=DEPTHS,
            verifier_last_hidden_states=torch.randn(1, TOKENS, WIDTH), down_sample_ratio=1.0,
        )  # fmt: skip
    [found], [(anchor, depth)] = logits, places
    assert not bool(found.isnan().any())
    model.save_pretrained(folder)
    (folder / "config.py").unlink()  # the package's code
    golden = {"hidden": hidden, "ids": text, "logits": found, "anchor": anchor, "depth": depth}
    save_file({name: tensor.contiguous() for name, tensor in golden.items()}, folder / "golden.safetensors")


if __name__ == "__main__":
    for seed, (name, settings) in enumerate(CASES.items()):
        make(Path(__file__).with_name(name), seed, **settings)
