"""FLOPs of a round of γ drafted tokens by SPRINTER's formulas (Zhong et al., Eq. 5 and 6, huggingface.co/papers/2502.04557), and of a model's forward."""

import copy
import math
from typing import Any

import torch

from ...models.cache_name import CACHE, cache_of
from ...validation import MOST_NEW_TOKENS, check_int, check_number


def strict_flops(gamma: int, f_draft: float, f_target: float) -> float:
    """FLOPs of a round whose γ tokens the target verifies, γ·F_d + γ·F_t (Eq. 5; no bonus token); F: for one token."""
    _check_flops(gamma, f_draft, f_target)
    return gamma * (f_draft + f_target)


def sprinter_flops(gamma: int, f_draft: float, f_verifier: float, f_target: float, cached: bool = False) -> float:
    """FLOPs of a SPRINTER round whose γ tokens a perfect verifier accepts, γ·F_d + γ·F_v + F_t (Eq. 6); F: for one token.

    Eq. 6 counts the one token that the target verifies. To do so a transformer needs the keys and values of all tokens
    before it, so the target has to compute the γ accepted tokens sooner or later, in this round or the next. `cached=True`
    is what an engine with a KV cache computes: γ·F_d + γ·F_v + γ·F_t, which is Eq. 5 and the verifier on top. What SPRINTER
    saves is target calls, each of which reads all weights once, and not the target's arithmetic.
    """
    _check_flops(gamma, f_draft, f_verifier, f_target)
    return gamma * (f_draft + f_verifier) + (gamma if cached else 1) * f_target


def forward_flops(config: Any, tokens: int = 1, past: int = 0, embedding: bool = False) -> int:
    """FLOPs of one forward over `tokens` tokens behind `past` cached ones, with logits for each; a multiply-add is 2.

    Args: `config` of a Transformers causal LM; `embedding`: count the look-up as the product 2·T·V·d with one-hot vectors,
    as Hoffmann et al. and Casson do (§A.8). In truth it costs nothing.

    The model is built without weights and its matrix products are counted as it runs, so grouped heads, gated MLPs and tied
    or missing heads come out right. Attention counts as the full T × (past + T) rectangle; softmax, norms and activations
    are not counted, nor is what is no matrix product (recurrent layers) or a grouped one (mixtures of experts).

    With `embedding` and T = 20 this gives 6.50, 56.6, 6.50 and 65.5 billion for GPT-Neo-125M, GPT-Neo-1.3B, GPT-2 and GPT2-XL.
    The paper's Figure 10 has 8.01, 64.66, 7.25 and 71.78, which is 9.5 to 23 % more; and as the layers of the two small models
    have the same shapes, no formula of the shapes gives all four. Its ratios, "roughly 8 and 10", are 8.7 and 10.1 here, but
    10.6 and 12.6 without the embedding.
    """
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    check_int("tokens", tokens, 1, MOST_NEW_TOKENS)
    check_int("past", past, 0, MOST_NEW_TOKENS)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise TypeError(f"config: expected the config of a Transformers causal LM, got {type(config).__name__}")
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), torch.no_grad():
        # A copy, for from_config writes into it. Eager attention is plain matrix products, which the counter knows everywhere.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        cache = None
        if past:
            cache = cache_of(model(torch.zeros(1, past, dtype=torch.long), use_cache=True))
            if cache is None:
                raise ValueError(f"past: expected 0 for {type(config).__name__}, which keeps no KV cache, got {past}")
        with counter:
            model(torch.zeros(1, tokens, dtype=torch.long), **{CACHE: cache}, use_cache=True)
    return counter.get_total_flops() + (2 * tokens * model.get_input_embeddings().weight.numel() if embedding else 0)


def _check_flops(gamma: int, *flops: float) -> None:
    check_int("gamma", gamma, 1)
    for value in flops:
        check_number("FLOPs", value, 0, math.inf)
