"""Redraw three figures of the SPRINTER paper: the ROC curve of a trained head (Figure 3), and from its theorems the tokens
accepted (Figure 5) and the time taken (Figure 6) until the verifier first says no.

python examples/sprinter_figures.py --out figures
python examples/sprinter_figures.py --out figures --head HEAD
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score, roc_curve

import hf_lossy_assist as hla
from hf_lossy_assist.methods.sprinter.held_out import read_held_out
from hf_lossy_assist.methods.sprinter.theory import expected_accepted, expected_stop_time
from hf_lossy_assist.training.dataset import acceptable
from hf_lossy_assist.training.plots import roc_figure, save


R, ETA_FP, T_D = 5, 0.5, 0.1  # acceptable tokens; the rate shown against 0; seconds of a draft step
GRID = [k / 200 for k in range(201)]  # η_TP


def gap_figure(value: Callable[[float, float], float], label: str, title: str, unit: str, path: Path) -> float:
    """`value`(η_TP, η_FP) over η_TP, for η_FP = 0 and `ETA_FP`; returns the widest gap between the two."""
    ideal, lossy = ([value(eta_tp, eta_fp) for eta_tp in GRID] for eta_fp in (0.0, ETA_FP))
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="true-positive rate $\\eta_{TP}$", ylabel=label, title=title, xlim=(0, 1.12))
    axes.plot(GRID, lossy, label=f"$\\eta_{{FP}} = {ETA_FP:g}$", color="tab:red")
    axes.plot(GRID, ideal, label="$\\eta_{FP} = 0$", color="tab:blue")
    axes.fill_between(GRID, ideal, lossy, color="tab:red", alpha=0.12)
    axes.annotate(
        "", (1.02, lossy[-1]), (1.02, ideal[-1]), arrowprops={"arrowstyle": "<->", "shrinkA": 0, "shrinkB": 0}
    )
    gap = lossy[-1] - ideal[-1]
    axes.text(1.03, (ideal[-1] + lossy[-1]) / 2, f"Gap\n{gap:.3g}{unit}", va="center", ha="left", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    save(figure, path)
    return max(b - a for a, b in zip(ideal, lossy, strict=True))


def theory_figures(out: Path) -> None:
    """Figures 5 and 6, and what the paper says of them."""
    five, six = out / "figure5_accepted.png", out / "figure6_stop_time.png"
    tokens = gap_figure(
        lambda tp, fp: expected_accepted(R, tp, fp), "accepted tokens E[N]", f"r = {R} acceptable tokens", "", five
    )
    seconds = gap_figure(
        lambda tp, fp: expected_stop_time(R, tp, fp, T_D),
        "stopping time E[T] in s",
        f"r = {R}, t_d = {T_D:g} s",
        " s",
        six,
    )
    for path, gap, unit, bound in ((five, tokens, "tokens", 1.0), (six, seconds, "s", T_D)):
        holds = "holds" if gap <= bound + 1e-9 else "does not hold"
        print(
            f"{path}: widest gap at η_FP = {ETA_FP:g} is {gap:.3f} {unit}; the paper's “never exceeds {bound:g}” {holds}"
        )
    worse = expected_accepted(R, 1, 0.9) - expected_accepted(R, 1, 0)
    print(f"The gap is η_TP^r · η_FP / (1 − η_FP): widest at η_TP = 1, and {worse:.1f} tokens there if η_FP = 0.9")


def verifier_figure(head: str, out: Path) -> None:
    """Figure 3, on the held-out prompts that were saved beside the head, for the labels of the paper's three λ."""
    data = read_held_out(head)
    curves = {}
    for lam in (1.0, 1.2, 1.5):
        labels, v = acceptable(data["p"], data["q"], lam).numpy(), data["v"].numpy()
        curves[f"$\\lambda$ = {lam:g}"] = (*roc_curve(labels, v)[:2], float(roc_auc_score(labels, v)))
    roc_figure(curves, out / "figure3_roc.png")
    print(f"{out / 'figure3_roc.png'}: AUROC " + ", ".join(f"{name} {c[2]:.3f}" for name, c in curves.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the PNG files; made if it is not there")
    parser.add_argument("--head", default=str(hla.demo.FOLDER / "sprinter_head"), help="folder or Hub repository")
    args = parser.parse_args(arguments)
    verifier_figure(args.head, args.out)
    theory_figures(args.out)


if __name__ == "__main__":
    main()
