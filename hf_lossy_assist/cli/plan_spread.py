"""`hf-lossy plan --tp N`: rounds of a target that is spread over devices, before anyone has the devices."""

import dataclasses
from typing import Any

from ..evaluation.spread_costs import (
    Device,
    Link,
    Load,
    Round,
    Seconds,
    Shape,
    best_round,
    offloaded,
    pipeline,
    tensor_parallel,
)
from ..terminal import console, show, show_json, table
from ..validation import MOST_FACTOR, MOST_ROWS, check_int, check_number, shown
from .options import batch_sizes


Way = tuple[str, float, tuple[Seconds, Seconds]]
GIGA, MICRO = 1e9, 1e-6
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes of a number
STEP_TOKENS = 6  # of the block in --step-ms
# Sizes of Llama 3.1, for a plan of nobody's models in particular.
EXAMPLE = {
    "70B": Shape(layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128, vocabulary=128256),
    "8B": Shape(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocabulary=128256),
}


@dataclasses.dataclass(frozen=True)
class Spread:
    """The options of `hf-lossy plan` that are about a target spread over devices, by their names there."""

    tp: int
    link: float = 300.0
    hop_us: float = 15.0
    memory: float | None = None
    tflops: float | None = None
    step_ms: str | None = None
    device_gb: float | None = None
    host_link: float = 50.0
    batch_size: str = "1"
    context: int = 2048
    acceptance: str = "0.8"

    def check(self) -> None:
        """Raises: `ValueError`, one line, with the option's name."""
        check_int("--tp", self.tp, 1, MOST_ROWS)
        check_int("--context", self.context, 0, 10**7)
        for name in ("link", "hop_us", "host_link", "memory", "tflops", "device_gb"):
            value = getattr(self, name)
            if value is not None:
                check_number("--" + name.replace("_", "-"), value, 0.0 if name == "hop_us" else 1e-6, MOST_FACTOR)
        if (self.memory is None) != (self.tflops is None):
            raise ValueError("--memory and --tflops describe a device together: pass both, or neither")
        if self.memory is not None and self.step_ms is not None:
            raise ValueError("--step-ms gives times, --memory and --tflops work them out: pass one of the two")


def plan_spread(
    asked: Spread, model: str | None, assistant: str | None, dtype: str, device: str, repeats: int, as_json: bool
) -> None:
    """Print the rounds that each way of spreading the target gives."""
    check_int("--repeats", repeats, 1, 10**6)
    asked.check()
    if dtype not in WIDTHS:
        raise ValueError(f"--dtype: expected {', '.join(WIDTHS)}, got {shown(dtype)}")
    rates, steps = _numbers("--acceptance", asked.acceptance), _numbers("--step-ms", asked.step_ms)
    for rate in rates:
        check_number("--acceptance", rate, 0.0, 1.0)
    for step in steps:
        check_number("--step-ms", step, 1e-6, MOST_FACTOR)
    if steps and len(steps) != 3:
        raise ValueError(
            f"--step-ms: expected three numbers (a target step, a block of {STEP_TOKENS} tokens, a draft step), got {len(steps)}"
        )
    if steps and steps[1] < steps[0]:
        raise ValueError(
            f"--step-ms: a block of {STEP_TOKENS} tokens takes no less than a step of one, got {steps[1]:g} and {steps[0]:g}"
        )
    sizes = batch_sizes(asked.batch_size)
    if steps and sizes != [1]:
        raise ValueError(
            f"--step-ms is of one batch size, and --batch-size is {shown(asked.batch_size)}: leave it out"
        )
    configs = None if model is None else (_config(model), _config(assistant))
    if configs is None and not steps and asked.memory is None:
        asked = dataclasses.replace(asked, memory=2500.0, tflops=500.0)  # about what an H100 reaches
    target, draft = EXAMPLE.values() if configs is None else map(Shape.of, configs)
    width = WIDTHS[dtype]
    lines = []
    for rows in sizes:
        load = Load(rows, asked.context, width)
        whole, part, draft_step = _times(asked, steps, configs, (target, draft), load, (dtype, device, repeats))
        for name, held, times in _ways(asked, target, whole, part, load):
            for rate in rates:
                found = best_round(times, draft_step, rate)
                each = {
                    "way": name,
                    "batch_size": rows,
                    "acceptance": rate,
                    "device_gb": held / GIGA,
                }
                lines.append(each | dataclasses.asdict(found))
    show_json({"lines": lines}) if as_json else show(_text(lines))


def _numbers(name: str, text: str | None) -> list[float]:
    try:
        return [float(word) for word in text.split(",")] if text is not None else []
    except ValueError:
        raise ValueError(
            f"{name}: expected a number, or several with commas between them, got {shown(text)}"
        ) from None


def _config(source: Any) -> Any:
    from ..models.loading import load_config

    return load_config(source)


def _times(
    asked: Spread, steps: list[float], configs: Any, shapes: tuple[Shape, Shape], load: Load, how: tuple[str, str, int]
) -> tuple[Seconds, Seconds, float]:  # fmt: skip
    """Seconds of the whole target's forwards, of a rank's part of it, and of a draft step: given, worked out or measured."""
    from ..evaluation.spread_times import between, part_seconds

    ranks = asked.tp
    if steps:
        whole = between({1: steps[0] / 1e3, STEP_TOKENS: steps[1] / 1e3})
        return whole, lambda tokens: whole(tokens) / ranks, steps[2] / 1e3
    if asked.memory is not None:
        its = Device(asked.memory * GIGA, (asked.tflops or 0.0) * 1e12)
        target, draft = shapes
        return its.forward(target, load), its.forward(target, load, ranks), its.forward(draft, load)(1)
    import torch

    dtype, device, repeats = how
    kind = getattr(torch, dtype)
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    measured = [
        part_seconds(config, n, load, place, kind, repeats)
        for config, n in ((configs[0], 1), (configs[0], ranks), (configs[1], 1))
    ]
    return measured[0], measured[1], measured[2](1)


def _ways(asked: Spread, shape: Shape, whole: Seconds, part: Seconds, load: Load) -> list[Way]:
    """The name of each way to spread the target, its bytes of weights on a device, and its seconds."""
    ranks, link = asked.tp, Link(asked.hop_us * MICRO, asked.link * GIGA)
    size = shape.weights * load.width
    ways: list[Way] = [("1 device", size, (whole, lambda tokens: 0.0))]
    if ranks > 1:
        ways.append((f"TP {ranks}", size / ranks, tensor_parallel(part, shape, load, ranks, link)))
        ways.append((f"pipeline {ranks}", size / ranks, pipeline(whole, shape, load, ranks, link)))
    if asked.device_gb is not None:
        share = max(0.0, 1 - asked.device_gb * GIGA / size)
        host = Link(asked.hop_us * MICRO, asked.host_link * GIGA)
        ways.append((f"{share:.0%} in RAM", (1 - share) * size, offloaded(whole, shape, load, share, host)))
    return ways


def _text(lines: list[dict[str, Any]]) -> str:
    titles = ("rows", "α", "GB", "step\nms", "block\nms", "link\nms", "draft\nms", "γ", "round\nms", "tokens", "×")
    found = table("target", *titles)
    found.padding = (0, 1, 0, 0)
    found.columns[0].no_wrap = True
    for line in lines:
        its = Round(**{field.name: line[field.name] for field in dataclasses.fields(Round)})
        found.add_row(
            line["way"], str(line["batch_size"]), f"{line['acceptance']:g}", _three(line["device_gb"]),
            *(_three(1e3 * seconds) for seconds in (its.target_step, its.block, its.link, its.draft_step)), str(its.gamma),
            _three(1e3 * its.seconds), f"{its.tokens:.2f}", f"{its.gain:.2f}",
        )  # fmt: skip
    screen = console(color_system=None)
    with screen.capture() as capture:
        screen.print(found)
    return (
        f"{capture.get()}\nGB: weights on a device. step: a forward of the target alone; block: of γ + 1 tokens of each row, link: of that, between devices.\n"
        "A round is γ draft steps on the first device and one block (what the engine does beside them is left out); it writes so many tokens of each row\n"
        "at the acceptance α. γ: the draft length that gains most. ×: times the target alone, spread the same way. TP: tensor parallel."
    )


def _three(number: float) -> str:
    """Three figures."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
