"""`warmup`: compile a pair's rounds ahead of time, so that no later call waits for a compiler."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import CompileConfig, PreTrainedModel

from ..artifacts.files import check_file, write_bytes
from ..drafters.hidden_state import HiddenStateDrafter
from ..engine.call import Call
from ..engine.compiled_loop import CompiledRounds
from ..models.compiled.compilation import graphs_made
from ..stats.speculation import SpeculationStats
from ..tensors import fork_random
from .draft_settings import DRAFT_SETTINGS
from .runner import Runner


NEW = 2  # tokens of a warm-up call


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
) -> list[SpeculationStats]:
    """Compile the rounds of a pair under a policy; later calls with the same `compile_config` and settings find every
    graph.

    Finished rows leave a batch when a power of two is enough for the others, so smaller powers of two than a batch size
    are compiled, too.

    Args:
        target, draft: the pair, as in `generate`; a drafter on the target's hidden states, too.
        policy: any value of `lossy_policy=`.
        batch_sizes: each is compiled separately.
        lengths: tokens of a text, prompt and new ones together. Cache sizes are powers of two from 256; the longest
            text's is compiled, and used by all later calls of these models that compile.
        compile_config (`transformers.CompileConfig`, *optional*): how to compile; None: as with
            `cache_implementation="static"`.
        artifacts (path, *optional*): a file of `torch.compiler.save_cache_artifacts`, loaded before and written after.
            It contains code: never load one from others.
        settings: other settings of later calls that affect compilation: `do_sample`, `temperature`,
            `num_assistant_tokens`, …

    Returns: the report of one short call for each number of rows, from the smallest; `eager_because`: why nothing was
    compiled, or None.

    Raises: errors of `generate`.
    """
    path = None if artifacts is None else Path(artifacts)
    if path is not None:
        check_file("warmup: artifacts", path)
        if path.exists():
            torch.compiler.load_cache_artifacts(path.read_bytes())
    sizes = {1 << n for n in range((max(batch_sizes) - 1).bit_length())} | set(batch_sizes)
    config = CompileConfig() if compile_config is None else compile_config
    reports = [
        _compile(target, WarmingRunner(policy, draft, config, settings, max(lengths)), n) for n in sorted(sizes)
    ]
    saved = torch.compiler.save_cache_artifacts() if path is not None else None
    if path is not None and saved is not None:
        write_bytes(path, saved[0])
    return reports


class WarmingRunner(Runner):
    """A runner that compiles every graph that a call of its kind may need for texts of `length` tokens, before its
    rounds begin."""

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
        before, compiling = graphs_made(), SpeculationStats([], 0, True)
        rounds = CompiledRounds.of(call, compiling) if call.compiled else None
        if rounds is not None:
            with fork_random(call.rows.ids.device):
                for _ in range(2 if rounds.target.replays else 1):  # a CUDA graph is recorded in the second run
                    rounds.compile_all(self.length)
        stats = super().decode(call)
        stats.num_graphs = graphs_made() - before
        return stats


def _compile(target: PreTrainedModel, runner: WarmingRunner, rows: int) -> SpeculationStats:
    """Continue `rows` texts of two tokens."""
    ids = torch.ones(rows, 2, dtype=torch.int64, device=target.device)
    settings = {"do_sample": False, "max_new_tokens": NEW} | runner.others
    settings |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(ids), "custom_generate": runner}
    with fork_random(ids.device):
        report: SpeculationStats = target.generate(ids, **settings).speculation
    return report
