"""The verifier of SPRINTER's theorems, whose every verdict is a coin, and tokens by its step: the formulas of `theory` are checked by it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hf_lossy_assist.methods.sprinter.theory import check_laws
from hf_lossy_assist.validation import check_int, check_number


@dataclass(frozen=True)
class IIDVerifier:
    """Accepts an acceptable token with probability `eta_tp`, any other with `eta_fp`; each verdict is a coin of its own.

    With equal seeds, a verifier with higher rates accepts a superset.
    """

    eta_tp: float
    eta_fp: float
    generator: torch.Generator | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_number("eta_tp", self.eta_tp, 0, 1)
        check_number("eta_fp", self.eta_fp, 0, 1)

    def __call__(self, acceptable: torch.Tensor) -> torch.Tensor:
        """Which tokens to accept unchecked, bool in the shape of `acceptable` (bool)."""
        if acceptable.dtype != torch.bool:
            raise TypeError(f"acceptable: expected a bool tensor, got {acceptable.dtype}")
        coins = torch.rand(acceptable.shape, dtype=torch.float64, device=acceptable.device, generator=self.generator)
        return torch.where(acceptable, coins < self.eta_tp, coins < self.eta_fp)


def simulate_round(
    p: torch.Tensor,
    q: torch.Tensor,
    verifier: Callable[[torch.Tensor], torch.Tensor],
    n: int,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`n` independent tokens by SPRINTER's step for the distributions `p` and `q` (V,).

    x ~ q. Where the verifier says yes, x stays; else it stays with probability min(1, p(x)/q(x)) or is replaced by a draw
    from norm((p − q)⁺). Returns the tokens (n,) int64 and whether the drafted token stayed (n,) bool.
    """
    check_laws(p, q)
    check_int("n", n, 1)
    if p.dim() != 1:
        raise ValueError(f"p, q: expected distributions of shape (V,), got {tuple(p.shape)}")
    drafted = q.multinomial(n, replacement=True, generator=generator)
    coins = torch.rand(n, dtype=torch.float64, device=p.device, generator=generator)
    kept = verifier((q <= p)[drafted]) | (coins < (p / q)[drafted])
    residual = (p - q).clamp(min=0)
    if not residual.any():  # p = q up to rounding: nothing is refused but by rounding
        residual = p
    corrected = residual.multinomial(n, replacement=True, generator=generator)
    return torch.where(kept, drafted, corrected), kept
