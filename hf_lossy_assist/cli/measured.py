"""What `compare` and `tune` share: where prompts come from, a run's record, the bar."""

import hashlib
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..artifacts.files import check_new
from ..terminal import Bar, show
from ..validation import MOST_NEW_TOKENS, check_int, check_positive
from .exits import going_on
from .options import DEMO, check_sampling


DEMO_LIMIT = 12  # problems of `compare` without --limit
UNCOUNTED = {  # tasks of `mine` whose right answers are not counted here
    "qa": "has no right answers, and its judge is for hf-lossy mine",
    "code": "runs what a model wrote, which hf-lossy mine alone does",
}


def check_decoding(decoding: Any) -> None:
    """Refuse settings of `Decoding` that no call takes, by the names of their options."""
    check_int("--max-new-tokens", decoding.max_new_tokens, 2, MOST_NEW_TOKENS)
    check_int("--seed", decoding.seed, 0)
    check_int("--top-k", decoding.top_k, 0)
    check_positive("--top-p", decoding.top_p, 1.0)
    check_positive("--temperature", decoding.temperature)
    check_sampling(decoding.do_sample, decoding.temperature, decoding.top_k, decoding.top_p)


def check_out(out: Path | None, resume: bool) -> None:
    """Refuse what cannot be written or gone on with, before models are loaded."""
    if resume and out is None:
        raise ValueError("--resume goes on with the run of a folder: pass its --out")
    if out is not None and not (
        resume and Path(f"{out}.partial").is_dir()
    ):  # which may be what is left of a run that is over
        check_new(out)


def prompts_of(
    prompts: Path | None,
    task: str | None,
    data: Path | None,
    model: str | None,
    limit: int | None,
    seed: int,
    shots: int = 0,
) -> tuple[list[str], list[Any], Any, str]:
    """The prompts, the problems that they are, their task, and what they are called in the record."""
    from ..tasks.load import load_task as task_named
    from ..tasks.prompts import read_prompts

    if limit is not None:
        check_int("--limit", limit, 1)
    if prompts is not None:
        if task is not None or data is not None:
            raise ValueError("--prompts and --task are two sources: pass one of them")
        if shots:
            raise ValueError("--shots are of --task gsm8k: leave them out, or pass --task")
        return read_prompts(prompts, limit), [], None, prompts.name
    if task is None and model is not None:
        raise ValueError("nothing to continue: pass --prompts or --task with --model")
    name = DEMO if task is None else task
    if name == DEMO and model is not None:
        raise ValueError("--task demo is for the demo models: pass another task, or --prompts, with --model")
    if name in UNCOUNTED:
        raise ValueError(f"--task {name} {UNCOUNTED[name]}: pass demo, gsm8k, math or a JSON-lines file with `answer`")
    its = task_named(name, data=data, seed=seed, shots=shots)
    problems = its.problems(DEMO_LIMIT if limit is None and name == DEMO else limit)
    return [problem.prompt for problem in problems], problems, its, source_of(name, data, shots)


def source_of(task: str, data: Path | None, shots: int) -> str:
    """What a task's problems are called in records: a file's folder is nobody's business."""
    source = Path(task).name if data is None else f"{Path(task).name}, {data.name}"
    return f"{source}, {shots} worked examples" if shots else source


def once_each(problems: Sequence[Any], source: str) -> list[Any]:
    """Problems without those that stand there again, of which it warns: a repetition says nothing new, and would narrow a bound."""
    found = list({problem.prompt: problem for problem in reversed(problems)}.values())[::-1]
    if len(found) < len(problems):
        warnings.warn(
            f"{source}: {len(problems) - len(found)} of {len(problems)} problems are repetitions, and each problem counts once",
            stacklevel=2,
        )
    return found


def check_answers(problems: Sequence[Any], source: str) -> None:
    """Refuse problems of which no right answer is known: their loss cannot be told."""
    unknown = next((i for i, problem in enumerate(problems, 1) if problem.gold is None), None)
    if unknown is not None:
        raise ValueError(
            f"{source}: problem {unknown} has no right answer, and without one no loss can be told: add `answer`"
        )


def say_what_makes_an_interval(prompts: int, sizes: Sequence[int]) -> None:
    """Say before a run if its speeds will have no interval, and how many prompts would give one."""
    from ..stats.intervals import FEWEST

    if few := sorted({size for size in sizes if prompts // size < FEWEST}):
        which = ", ".join(map(str, few))
        show(
            f"{prompts} prompts make no interval at batch size {which}: use --limit {FEWEST * few[-1]} or more for one"
        )


def longest_of(tokenizer: Any, texts: Sequence[str]) -> int:
    """Tokens of the longest text."""
    return max(len(ids) for ids in tokenizer(list(texts))["input_ids"])


def facts_of(
    target: Any,
    draft: Any,
    arms: Sequence[Any],
    decoding: Any,
    texts: Sequence[str],
    source: str,
    sizes: Sequence[int],
    problems: Sequence[Any] = (),
) -> dict[str, Any]:
    """What a run is of, for its record: a run is gone on with where all of it is the same."""
    from ..artifacts.conditions import describe_machine as machine
    from ..models.identity import ModelIdentity, dtype_of, versions, weights_hash
    from ..policy.policy import compute_fingerprint as fingerprint

    return {
        "target": ModelIdentity.of(target).to_dict(),
        "target_weights": weights_hash(target),
        "draft": ModelIdentity.of(draft).to_dict(),
        "draft_weights": weights_hash(draft),
        "dtype": dtype_of(target),
        "draft_dtype": dtype_of(draft),  # a drafter's is its file's: beside a target it is copied
        "arms": {
            arm.name: {
                "kind": arm.kind,
                "lossless": arm.lossless,
                "policy": None if arm.policy is None else arm.policy.to_dict(),
                "fingerprint": None if arm.policy is None else fingerprint(arm.policy),
            }
            for arm in arms
        },
        "decoding": asdict(decoding),
        "source": source,
        "prompts": hash_of(texts, problems),
        "batch_sizes": list(sizes),
        "machine": machine(target.device),
        "versions": versions(),
    }


def hash_of(texts: Sequence[str], problems: Sequence[Any]) -> str:
    """SHA-256 of what is asked, and of what is right."""
    known = [[problem.gold, dict(problem.extra)] for problem in problems]
    return hashlib.sha256(json.dumps([list(texts), known], sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def progress(
    what: str, calls: int, *, most: bool = False, quiet: bool = False
) -> Iterator[Callable[[str, int], None]]:
    """A bar of calls, each of one way to write and one batch, that moves within a call too; `most`: there may be fewer calls. `quiet`: it is not shown.

    It is told which call begins, with 0, and that it is over, with 1.
    """
    with Bar(calls, what, "calls", most=most, quiet=quiet) as bar, closing(_Within(bar)) as within:
        yield within.tell


@contextmanager
def resumable(store: Any) -> Iterator[None]:
    """Where this is interrupted, say how to go on, and let another process do so; `store`: the folder of the run, or None."""
    if store is None:
        yield
        return
    try:
        with going_on(store.out):
            yield
    except BaseException:
        store.release()
        raise


class _Within:
    """Moves a bar within a call by the seconds of the last one of its kind: what is timed must not be asked how far it has come."""

    def __init__(self, bar: Bar, tick: float = 0.5):
        """`tick`: seconds between two moves."""
        self.bar, self.tick = bar, tick
        self.seconds: dict[str, float] = {}  # of the last call of each kind
        self.begun: tuple[str, float] | None = None  # the call under way
        self.done = 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._move, name="hf-lossy-bar", daemon=True)
        self._thread.start()

    def tell(self, now: str, done: int) -> None:
        """`done` calls are over since the last word; `now`: of which kind, or which one begins."""
        kind = now.removeprefix("warm-up: ")
        with self._lock:
            if not done:
                self.bar.say(now)
                self.begun = kind, time.perf_counter()
                return
            if self.begun is not None:
                self.seconds[kind] = time.perf_counter() - self.begun[1]
            self.begun, self.done = None, self.done + done
            self.bar.to(self.done)

    def _move(self) -> None:
        while not self._over.wait(self.tick):
            with self._lock:
                if self.begun is not None and (usual := self.seconds.get(self.begun[0])):
                    self.bar.to(self.done + min((time.perf_counter() - self.begun[1]) / usual, 0.95))

    def close(self) -> None:
        """The bar stays where it is."""
        self._over.set()
        self._thread.join()
