"""SPRINTER's theorems as formulas: its distribution, the length of its rounds, their FLOPs.

p = target, q = draft, V tokens in the vocabulary, γ = drafted tokens. A drafted token x is acceptable if q(x) ≤ p(x); a verifier accepts it without
verification with probability η_TP if it is acceptable and η_FP if not, independently of everything else. Theorems and equations are those of Zhong
et al. (huggingface.co/papers/2502.04557), unless another paper is named. Invalid arguments raise a ValueError or TypeError of one line.

The rates of a real verifier depend on x. Then the distribution of Theorem 3.1 is no longer a mixture, but its distance, and Theorem A.4, hold with
the mean false-positive rate over norm((q − p)⁺). An ROC curve shows another mean, over the unacceptable tokens as drafted.
"""

import copy
import math

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from ...models.compat import CACHE, cache_of
from ...validation import MOST_NEW_TOKENS, check_int, check_number, listed, shown


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # of probabilities


def sprinter_law(p: torch.Tensor, q: torch.Tensor, eta_fp: float) -> torch.Tensor:
    """Return the distribution of one token under SPRINTER, (1 − η_FP)·p + η_FP·q (Theorem 3.1, Eq. 2), which does not depend on η_TP.

    Args: `p`, `q` (..., V) probabilities; returns (..., V).
    """
    _check_laws(p, q)
    check_number("eta_fp", eta_fp, 0, 1)
    return (1 - eta_fp) * p + eta_fp * q


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return d_TV(p, q) = ½ Σ |p − q| of distributions (..., V), (...)."""
    _check_laws(p, q)
    return (p - q).abs().sum(dim=-1) / 2


def sprinter_distance(p: torch.Tensor, q: torch.Tensor, eta_fp: float) -> torch.Tensor:
    """Return the distance of SPRINTER's distribution from the target's, η_FP · d_TV(p, q) (Theorem 3.1), (...)."""
    check_number("eta_fp", eta_fp, 0, 1)
    return eta_fp * total_variation(p, q)


def sprinter_acceptance_rate(p: torch.Tensor, q: torch.Tensor, eta_fp: float) -> torch.Tensor:
    """Return the probability that verifier or target accepts a drafted token, 1 − (1 − η_FP)·d_TV (Theorem A.4), (...)."""
    check_number("eta_fp", eta_fp, 0, 1)
    return 1 - (1 - eta_fp) * total_variation(p, q)


def strict_acceptance_rate(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the probability that strict acceptance keeps a drafted token, 1 − d_TV = Σ min(p, q) (Eq. 33), (...)."""
    return 1 - total_variation(p, q)


def accepted_probability(i: int, r: int, eta_tp: float, eta_fp: float) -> float:
    """Return P(N = i), where N is the number of tokens that the verifier accepts before its first rejection (Theorem 3.3).

    As in the theorem, here and below, the first `r` drafted tokens are acceptable, and no later one is.
    """
    check_int("i", i, 0)
    _check_verifier(r, eta_tp, eta_fp)
    return eta_tp**i * (1 - eta_tp) if i < r else eta_tp**r * eta_fp ** (i - r) * (1 - eta_fp)


def expected_accepted(r: int, eta_tp: float, eta_fp: float, cap: int | None = None) -> float:
    """Return E[N] (Theorem 3.3, Eq. 3), or E[min(N, cap)] if a round drafts at most `cap` tokens (`max_draft` of a stop).

    E[min(N, cap)] = Σ_{k=1..cap} P(N ≥ k), and P(N ≥ k) = η_TP^min(k, r) · η_FP^max(k − r, 0): two geometric sums, which for cap → ∞ are Eq. 3.
    Infinite if the verifier never rejects: η_FP = 1 without a cap, unless η_TP^r = 0. An engine that always lets the target verify the last drafted
    token accepts min(N, cap − 1) without verification.
    """
    _check_verifier(r, eta_tp, eta_fp)
    if cap is not None:
        check_int("cap", cap, 0)
    if eta_tp == 0 and r > 0:
        return 0.0
    acceptable = r if cap is None else min(r, cap)
    beyond = _powers(eta_fp, math.inf if cap is None else cap - acceptable)
    return _powers(eta_tp, acceptable) + (beyond if math.isinf(beyond) else eta_tp**r * beyond)


def expected_stop_time(r: int, eta_tp: float, eta_fp: float, t_d: float, cap: int | None = None) -> float:
    """Return E[T_stop] in the unit of `t_d`, the time of one draft step (Theorem 3.4, Eq. 4); the verifier's time counts as 0.

    N accepted tokens take N + 1 draft steps, since the rejected token was drafted too, and at most `cap` (≥ 1) of them: t_d · E[min(N + 1, cap)] =
    t_d · (1 + E[min(N, cap − 1)]).
    """
    check_number("t_d", t_d, 0, math.inf)
    if cap is not None:
        check_int("cap", cap, 1)
    steps = 1 + expected_accepted(r, eta_tp, eta_fp, None if cap is None else cap - 1)
    return t_d * steps if t_d else 0.0


def expected_strict_tokens(alpha: float, gamma: int) -> float:
    """Return the tokens of a strict round including the target's, (1 − α^(γ+1))/(1 − α) (Leviathan et al., Eq. 1; papers/2211.17192).

    `alpha`: probability that a drafted token is accepted, independent and equal for all.
    """
    check_number("alpha", alpha, 0, 1)
    check_int("gamma", gamma, 0)
    return 1 + _powers(alpha, gamma)


def strict_flops(gamma: int, f_draft: float, f_target: float) -> float:
    """Return the FLOPs of a round in which the target verifies γ tokens, γ·F_d + γ·F_t (Eq. 5; no bonus token); F: for one token."""
    _check_flops(gamma, f_draft, f_target)
    return gamma * (f_draft + f_target)


def sprinter_flops(gamma: int, f_draft: float, f_verifier: float, f_target: float, cached: bool = False) -> float:
    """Return the FLOPs of a SPRINTER round in which a perfect verifier accepts γ tokens, γ·F_d + γ·F_v + F_t (Eq. 6); F: for one token.

    Eq. 6 counts only the token that the target verifies. For that a transformer needs the keys and values of all tokens before it, so the target
    has to compute the γ accepted tokens sooner or later, in this round or the next. With `cached=True` the result is what an engine with a KV cache
    computes, γ·F_d + γ·F_v + γ·F_t, which is Eq. 5 plus the verifier. SPRINTER saves target calls, each of which reads all weights once, but not
    the target's arithmetic.
    """
    _check_flops(gamma, f_draft, f_verifier, f_target)
    return gamma * (f_draft + f_verifier) + (gamma if cached else 1) * f_target


def forward_flops(config: PreTrainedConfig, tokens: int = 1, past: int = 0, embedding: bool = False) -> int:
    """Return the FLOPs of a forward over `tokens` tokens after `past` cached ones, with logits for each; a multiply-add is 2.

    Args: `config` of a Transformers causal LM; `embedding`: count the look-up as the product 2·T·V·d with one-hot vectors, as Hoffmann et al. and
    Casson do (§A.8), although it costs nothing.

    The model is built without weights, and its matrix products are counted as it runs, so grouped heads, gated MLPs and tied or missing heads are
    counted correctly. Attention counts as the full T × (past + T) rectangle. Softmax, norms and activations are not counted, nor are operations
    other than matrix products (recurrent layers) or grouped ones (mixtures of experts).

    With `embedding` and T = 20 this gives 6.50, 56.6, 6.50 and 65.5 billion for GPT-Neo-125M, GPT-Neo-1.3B, GPT-2 and GPT2-XL. The paper's Figure
    10 has 8.01, 64.66, 7.25 and 71.78, which is 9.5 to 23 % more; since the layers of the two small models have the same shapes, no formula of the
    shapes gives all four. Its ratios, "roughly 8 and 10", are 8.7 and 10.1 here, but 10.6 and 12.6 without the embedding.
    """
    check_int("tokens", tokens, 1, MOST_NEW_TOKENS)
    check_int("past", past, 0, MOST_NEW_TOKENS)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise TypeError(f"config: expected the config of a Transformers causal LM, got {type(config).__name__}")
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), torch.no_grad():
        # A copy, since from_config modifies it. Eager attention consists of plain matrix products, which the counter always knows.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        cache = None
        if past:
            cache = cache_of(model(torch.zeros(1, past, dtype=torch.long), use_cache=True))
            if cache is None:
                raise ValueError(f"past: expected 0 for {type(config).__name__}, which keeps no KV cache, got {past}")
        with counter:
            model(torch.zeros(1, tokens, dtype=torch.long), **{CACHE: cache}, use_cache=True)
    return counter.get_total_flops() + (2 * tokens * model.get_input_embeddings().weight.numel() if embedding else 0)


def _powers(x: float, n: float) -> float:
    """Return x + x² + … + x^n for x in [0, 1]; `n` may be infinite. Accurate to the last digits even for x near 1."""
    if x == 1 or n == 0:
        return float(n)
    return x * -math.expm1(n * math.log(x)) / (1 - x) if x else 0.0


def _check_verifier(r: int, eta_tp: float, eta_fp: float) -> None:
    check_int("r", r, 0)
    check_number("eta_tp", eta_tp, 0, 1)
    check_number("eta_fp", eta_fp, 0, 1)


def _check_flops(gamma: int, *flops: float) -> None:
    check_int("gamma", gamma, 1)
    for value in flops:
        check_number("FLOPs", value, 0, math.inf)


def _check_laws(p: torch.Tensor, q: torch.Tensor) -> None:
    """Refuse anything but two distributions of one shape (..., V)."""
    for name, x in (("p", p), ("q", q)):
        if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
            given = x.dtype if isinstance(x, torch.Tensor) else shown(x)
            raise TypeError(
                f"{name}: expected a tensor of probabilities (..., V) in floating point ({listed(DTYPES)}), got {given}"
            )
    if p.shape != q.shape or p.dim() == 0 or p.shape[-1] == 0:
        raise ValueError(
            f"p, q: expected two distributions of one shape (..., V), got {tuple(p.shape)} and {tuple(q.shape)}"
        )
    for name, x in (("p", p), ("q", q)):
        off = (x.double().sum(dim=-1) - 1).abs()  # in bfloat16, sums over a large vocabulary are accurate to 1e-2 only
        if not (off <= 1e-2).all() or (x < 0).any():
            values = f"values from {x.min():.4g} to {x.max():.4g} and a sum {off.max():.4g} off"
            raise ValueError(f"{name}: expected probabilities that sum to 1, got {values}")
