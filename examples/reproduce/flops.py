"""Count the matrix products of a forward, for SPRINTER's Figure 10 (Zhong et al., huggingface.co/papers/2502.04557)."""

import copy

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedConfig


def forward_flops(config: PreTrainedConfig, tokens: int, embedding: bool = False) -> int:
    """Return the FLOPs of a forward over `tokens` tokens, with logits for each; a multiply-add is 2.

    Args: `config` of a Transformers causal LM; `embedding`: count the look-up as the product 2·T·V·d with one-hot vectors, as Hoffmann et al. and
    Casson do (§A.8), although it costs nothing.

    The model is built without weights, and its matrix products are counted as it runs, so grouped heads, gated MLPs and tied or missing heads are
    counted correctly. Attention counts as the full T × T square. Softmax, norms and activations are not counted, nor are operations
    other than matrix products (recurrent layers) or grouped ones (mixtures of experts).

    With `embedding` and T = 20 this gives 6.50, 56.6, 6.50 and 65.5 billion for GPT-Neo-125M, GPT-Neo-1.3B, GPT-2 and GPT2-XL. The paper's Figure
    10 has 8.01, 64.66, 7.25 and 71.78, which is 9.5 to 23 % more; since the layers of the two small models have the same shapes, no formula of the
    shapes gives all four. Its ratios, "roughly 8 and 10", are 8.7 and 10.1 here, but 10.6 and 12.6 without the embedding.
    """
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), torch.no_grad():
        # A copy, since from_config modifies it. Eager attention consists of plain matrix products, which the counter always knows.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        with counter:
            model(torch.zeros(1, tokens, dtype=torch.long), use_cache=True)
    return counter.get_total_flops() + (2 * tokens * model.get_input_embeddings().weight.numel() if embedding else 0)
