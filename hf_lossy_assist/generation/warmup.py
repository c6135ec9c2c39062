"""`warmup`: compile a pair's rounds ahead of time, so that no later call waits for a compiler."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from .draft_settings import DRAFT_SETTINGS
from .runner import Runner


# Arguments of `generate` that contradict a compiled call or the batch size.
NOT_SETTINGS = {"assistant_model", "lossy_policy", "cache_implementation", "disable_compile", "num_return_sequences"}
NEW = 2  # tokens of a warm-up call


@dataclass(frozen=True)
class WarmUp:
    """The result for one batch size and length of text.

    Args:
        rows: texts of a batch. length: tokens of the longest text.
        seconds: of the call that compiled. num_graphs: that it compiled.
        eager_because: why nothing was compiled, or None.
    """

    rows: int
    length: int
    seconds: float
    num_graphs: int
    eager_because: str | None


def warmup(
    target: PreTrainedModel,
    draft: PreTrainedModel | HiddenStateDrafter,
    policy: object = "strict",
    batch_sizes: Sequence[int] = (1,),
    lengths: Sequence[int] = (256,),
    *,
    compile_config: CompileConfig | None = None,
    artifacts: str | Path | None = None,
    **settings: object,
) -> list[WarmUp]:
    """Compile the rounds of a pair under a policy; later calls with the same `compile_config` and settings find every graph.

    Finished rows leave a batch when a power of two is enough for the others, so smaller powers of two than a batch size are compiled, too.

    Args:
        target, draft: the pair, as in `generate`; a drafter on the target's hidden states, too.
        policy: any value of `lossy_policy=`.
        batch_sizes: each is compiled separately.
        lengths: tokens of a text, prompt and new ones together; cache sizes are powers of two from 256, and each up to the longest text's is
            compiled separately.
        compile_config (`transformers.CompileConfig`, *optional*): how to compile; None: as with `cache_implementation="static"`.
        artifacts (path, *optional*): a file of `torch.compiler.save_cache_artifacts`, loaded before and written after. It contains code:
            never load one from others.
        settings: other settings of later calls that affect compilation: `do_sample`, `temperature`, `num_assistant_tokens`, …

    Returns: a `WarmUp` for each batch size and length.

    Raises: `ValueError` or `TypeError`, one line, for sizes and lengths that are no positive integers; errors of `generate`.
    """
    for name, values in (("batch_sizes", batch_sizes), ("lengths", lengths)):
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise TypeError(f"warmup: {name}: expected whole numbers such as [1, 8], got {shown(values)}")
        for value in values:
            check_int(f"warmup: {name}", value, 1)
    for name in NOT_SETTINGS & set(settings):
        raise TypeError(f"warmup: {name}=… has no meaning here: leave it out")
    if artifacts is not None and (not isinstance(artifacts, str | Path) or Path(artifacts).is_dir()):
        raise TypeError(f"warmup: artifacts: expected the path of a file, got {shown(artifacts)}")
    path = None if artifacts is None else Path(artifacts)
    if path is not None:
        check_file("warmup: artifacts", path)
        if path.exists():
            torch.compiler.load_cache_artifacts(path.read_bytes())
    sizes = {1 << n for n in range((max(batch_sizes) - 1).bit_length())} | set(batch_sizes)
    config = CompileConfig() if compile_config is None else compile_config
    done = [
        _compile(target, WarmingRunner(policy, draft, config, settings, length), rows)
        for rows, length in itertools.product(sorted(sizes), sorted(set(lengths)))
    ]
    made = torch.compiler.save_cache_artifacts() if path is not None else None
    if path is not None and made is not None:
        write_bytes(path, made[0])
    return done


class WarmingRunner(Runner):
    """A runner that compiles every graph that a call of its kind may need for texts of `length` tokens, before its rounds begin."""

    def __init__(
        self,
        policy: object,
        draft: PreTrainedModel | HiddenStateDrafter,
        config: CompileConfig,
        settings: dict[str, object],
        length: int,
    ):
        of_draft = {name: settings[name] for name in DRAFT_SETTINGS if name in settings}
        super().__init__(policy, draft, settings=of_draft | {"compile_config": config})
        self.others = {name: value for name, value in settings.items() if name not in of_draft}
        self.length = length

    def decode(self, call: Call) -> SpeculationStats:
        rounds = CompiledRounds.of(call, SpeculationStats([], 0, True)) if call.compiled else None
        if rounds is not None:
            device = call.rows.ids.device
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                for _ in range(2 if rounds.target.replays else 1):  # a CUDA graph is recorded in the second run
                    rounds.compile_all(self.length)
        return super().decode(call)


def _compile(target: PreTrainedModel, runner: WarmingRunner, rows: int) -> WarmUp:
    """Continue `rows` random prompts to texts of the runner's length."""
    began, known = time.perf_counter(), graphs_made()
    generator = torch.Generator().manual_seed(runner.length)
    ids = torch.randint(vocabulary_of(target), (rows, max(runner.length - NEW, 1)), generator=generator)
    ids, settings = ids.to(target.device), {"do_sample": False, "max_new_tokens": NEW} | runner.others
    settings |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(ids), "custom_generate": runner}
    with torch.random.fork_rng():
        report = target.generate(ids, **settings).speculation
    seconds = time.perf_counter() - began
    return WarmUp(rows, runner.length, seconds, graphs_made() - known, report.eager_because)
