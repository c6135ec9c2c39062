"""`warmup`: compile a pair's rounds ahead of time, and measure for each batch size whether that pays."""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel

from ..artifacts.files import check_file, write_bytes
from ..drafters.hidden_state import HiddenStateDrafter
from ..engine.call import Call
from ..engine.compiled_loop import CompiledRounds
from ..models.compiled.compilation import graphs_made
from ..models.introspection import vocabulary_of
from ..stats.speculation import SpeculationStats
from ..validation import check_int, shown
from .compile_options import GraphKey, forget, make_compilation, remember
from .draft_settings import DRAFT_SETTINGS
from .model_checks import refuse_target
from .runner import Runner


# Arguments of `generate` that contradict the measurement or the batch size.
NOT_SETTINGS = {"assistant_model", "lossy_policy", "cache_implementation", "disable_compile", "num_return_sequences"}
NEW = 32  # new tokens of a warm-up call; at most twice as many with given prompts


@dataclass(frozen=True)
class WarmUp:
    """The result for one batch size and length of text.

    Args:
        rows: prompts of a batch.
        length: tokens of the longest text.
        compile_seconds: duration of the first call.
        num_graphs: number of compiled graphs.
        eager, compiled: tokens per second, medians.
        eager_because: why nothing was compiled, or None.
    """

    rows: int
    length: int
    compile_seconds: float
    num_graphs: int
    eager: float
    compiled: float
    eager_because: str | None

    @property
    def pays(self) -> bool:
        """Whether later calls of this size are compiled by default."""
        return self.eager_because is None and self.compiled > self.eager


def warmup(
    target: PreTrainedModel,
    draft: PreTrainedModel | HiddenStateDrafter,
    policy: object = "strict",
    batch_sizes: Sequence[int] = (1,),
    lengths: Sequence[int] = (256,),
    *,
    compile_config: CompileConfig | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    artifacts: str | Path | None = None,
    repeats: int = 3,
    **settings: object,
) -> list[WarmUp]:
    """Compile the rounds of a pair under a policy, and measure them against eager ones.

    Later calls with the same models, policy and settings are compiled by default where that was faster; calls with another batch size, a
    longer text or other settings run eagerly as before. Finished rows are dropped when one of `batch_sizes` is enough for the others.

    Args:
        target, draft: the pair, as in `generate`; a drafter on the target's hidden states, too.
        policy: any value of `lossy_policy=`.
        batch_sizes: each is compiled separately.
        lengths: tokens of a text, prompt and new ones together; cache sizes are powers of two from 256, and each up to the longest text's is
            compiled separately.
        compile_config (`transformers.CompileConfig`, *optional*): how to compile.
        prompts: token ids of typical prompts to measure with; None: random tokens. Draft lengths, and so the result, depend on the text:
            random tokens say little about a stop that reads each token.
        artifacts (path, *optional*): a file of `torch.compiler.save_cache_artifacts`, loaded before and written after. It contains code:
            never load one from others.
        repeats: number of calls whose median is reported.
        settings: other settings of later calls that affect compilation: `do_sample`, `temperature`, `num_assistant_tokens`, …

    Returns: a `WarmUp` for each batch size and length.

    Raises: `ValueError` or `TypeError`, one line, for sizes and lengths that are no positive integers; errors of `generate`.
    """
    refuse_target("warmup", target)
    for name, values in (("batch_sizes", batch_sizes), ("lengths", lengths)):
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise TypeError(f"warmup: {name}: expected whole numbers such as [1, 8], got {shown(values)}")
        for value in values:
            check_int(f"warmup: {name}", value, 1)
    check_int("warmup: repeats", repeats, 1)
    if prompts is not None:
        _check_prompts(prompts, vocabulary_of(target))
    for name in NOT_SETTINGS & set(settings):
        raise TypeError(f"warmup: {name}=… has no meaning here: leave it out")
    config = CompileConfig() if compile_config is None else compile_config
    compilation = make_compilation(None, config)
    assert compilation is not None
    if artifacts is not None and (not isinstance(artifacts, str | Path) or Path(artifacts).is_dir()):
        raise TypeError(f"warmup: artifacts: expected the path of a file, got {shown(artifacts)}")
    path = None if artifacts is None else Path(artifacts)
    if path is not None:
        check_file("warmup: artifacts", path)
        if path.exists():
            torch.compiler.load_cache_artifacts(path.read_bytes())
    found = []
    for rows, length in itertools.product(sorted(set(batch_sizes)), sorted(set(lengths))):
        runner, eager = (
            WarmingRunner(policy, draft, config, settings, batch_sizes, length, on) for on in (True, False)
        )
        found.append(_measure(target, (runner, eager), rows, prompts, repeats))
        assert runner.key is not None
        if found[-1].pays:
            remember(target, runner.assistant or runner.drafter, runner.key, compilation, rows, length)
        else:
            forget(target, runner.assistant or runner.drafter, runner.key, rows)
    made = torch.compiler.save_cache_artifacts() if path is not None else None
    if path is not None and made is not None:
        write_bytes(path, made[0])
    return found


def _check_prompts(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Raise `TypeError` or `ValueError` unless `prompts` are lists of ids below `vocabulary`."""
    fine = isinstance(prompts, Sequence) and not isinstance(prompts, str) and len(prompts) > 0
    if not fine or not all(isinstance(ids, Sequence) and not isinstance(ids, str) and ids for ids in prompts):
        raise TypeError(f"warmup: prompts: expected lists of token ids, one a prompt, got {shown(prompts)}")
    for token in (token for ids in prompts for token in ids):
        check_int("warmup: prompts", token, 0, vocabulary - 1)


class WarmingRunner(Runner):
    """A runner that compiles every graph that a call of its kind may need before its rounds begin.

    `sizes`: the batch sizes that its batches may shrink to; `length`: tokens of the longest text.
    """

    def __init__(
        self,
        policy: object,
        draft: PreTrainedModel | HiddenStateDrafter,
        config: CompileConfig,
        settings: dict[str, object],
        sizes: Sequence[int],
        length: int,
        compiles: bool,
    ):
        of_draft = {name: settings[name] for name in DRAFT_SETTINGS if name in settings}
        super().__init__(
            policy, draft, settings=of_draft | {"compile_config": config, "disable_compile": not compiles}
        )
        self.others = {name: value for name, value in settings.items() if name not in of_draft}
        self.sizes, self.length = tuple(sorted(set(sizes))), length
        self.compile_seconds, self.num_graphs = 0.0, 0
        self.key: GraphKey | None = None
        self.compiled = False

    def decode(self, call: Call) -> SpeculationStats:
        known, began, call.compiled_batch_sizes = graphs_made(), time.perf_counter(), self.sizes
        self.key = GraphKey.of(
            call.policy, call.stop.settings, call.processing, getattr(call.drafter, "sampling", False)
        )
        rounds = CompiledRounds.of(call, SpeculationStats([], 0, True)) if call.compiled else None
        if rounds is not None and not self.compiled:  # later calls are timed
            self.compiled = True
            device = call.rows.ids.device
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                for _ in range(2 if rounds.target.replays else 1):
                    rounds.compile_all(self.length)
        stats = super().decode(call)
        self.num_graphs += graphs_made() - known
        if self.num_graphs and not self.compile_seconds:
            self.compile_seconds = time.perf_counter() - began
        return stats

    def write(self, target: PreTrainedModel, rows: int, prompts: Sequence[Sequence[int]] | None) -> Any:
        """Continue `rows` prompts, random ones to texts of `length` tokens."""
        new = min(NEW, max(self.length // 2, 1))
        width = max(self.length - new, 1)
        if prompts is None:
            generator = torch.Generator().manual_seed(self.length)
            ids = torch.randint(vocabulary_of(target), (rows, width), generator=generator)
            mask = torch.ones_like(ids)
        else:
            # Long prompts are cut on the left; short ones are padded on the left.
            texts = [list(prompts[i % len(prompts)])[-width:] for i in range(rows)]
            width = max(map(len, texts))
            new = min(2 * NEW, max(self.length - width, 1))
            ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
            mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
        settings = {"do_sample": False, "max_new_tokens": new} | self.others | {"return_dict_in_generate": True}
        ids, mask = ids.to(target.device), mask.to(target.device)
        return target.generate(ids, attention_mask=mask, custom_generate=self, **settings)


def _measure(
    target: PreTrainedModel,
    arms: tuple[WarmingRunner, WarmingRunner],
    rows: int,
    prompts: Sequence[Sequence[int]] | None,
    repeats: int,
) -> WarmUp:
    """Measure the two `arms`, compiled and eager, in turns."""
    speeds: list[list[float]] = [[], []]
    for turn in range(repeats + 1):  # the first turn compiles and does not count
        for arm, speed in zip(arms, speeds, strict=True):
            began = time.perf_counter()
            out = arm.write(target, rows, prompts)
            if turn:
                speed.append(out.speculation.num_new_tokens / (time.perf_counter() - began))
            if arm is arms[0]:
                reason = out.speculation.eager_because
    (warming, _), (compiled, eager) = arms, map(statistics.median, speeds)
    return WarmUp(rows, warming.length, warming.compile_seconds, warming.num_graphs, eager, compiled, reason)
