"""How runs start, resume and end: problems, a run's record, the progress bar, the exit code, and one line on stderr for user errors."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import typer

import hf_lossy_assist as hla

from .. import tasks, training
from ..artifacts.files import check_new
from ..artifacts.hub import HTTP_CLIENTS, unreached
from ..terminal import plain_warnings, show
from ..validation import EXTRAS, format_missing, one_line
from ._options import DEMO, JobOptions, LoadOptions, check_source


T = TypeVar("T")
# The base class of typer's usage errors, wherever this release defines it.
WRONG_WORDS: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
LONGEST_LINE = 300  # characters of an error
DEMO_LIMIT = 12  # problems of `compare` without --limit


def run(app: typer.Typer) -> int:
    """Run the command in `sys.argv`; return its exit code: 0, 2 for user errors, 130 when interrupted."""
    _begun.clear()
    try:
        with plain_warnings(), _one_voice(), _connections:
            code = app(standalone_mode=False)  # otherwise typer draws a frame around its error messages
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except WRONG_WORDS as error:
        _say_wrong_words(error)
        return 2
    except (ValueError, TypeError, OSError, ImportError) as error:
        module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        say(format_missing("this command", [module]) if module in " ".join(EXTRAS.values()).split() else str(error))
        return 2
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which `--help` does not load
            say(
                "the device has no room for so many texts at once: a smaller --batch-size, and --resume in a job, go on"
            )
        elif type(error).__module__.partition(".")[0] in HTTP_CLIENTS:
            say(f"the Hub was not reached ({unreached(error)})")
        elif isinstance(error, RuntimeError):  # torch's: a head of another size, a device that is not there
            say(str(error))
        else:
            raise
        return 2
    if code == 130:
        for unfinished in filter(Path.is_dir, _begun):
            show(f"interrupted; what is done is in {unfinished}: the same command with --resume goes on")
        say("interrupted")
    return code if isinstance(code, int) else 0


_connections = ExitStack()  # that end with the command
_begun: list[Path] = []  # the folder of the command's unfinished run


@contextmanager
def _one_voice() -> Iterator[None]:
    """Silence all but the first of the processes that `accelerate launch` started; errors of all are shown."""
    if int(os.environ.get("RANK", "0")) == 0:
        yield
        return
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def _say_wrong_words(error: Any) -> None:
    text = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":  # the text is the help, which typer may have printed already
        print(text, end="\n" if text else "")
        return
    context = getattr(error, "ctx", None)
    say(text if context is None else f"{text.rstrip('.')}; see {context.command_path} --help")


def say(text: str) -> None:
    """Print one line on stderr without control characters, whatever the text contains; cut in its middle, since the way out ends it."""
    line = one_line(f"hf-lossy: {text}", 100 * LONGEST_LINE)
    print(line if len(line) <= LONGEST_LINE else f"{line[:200]}…{line[201 - LONGEST_LINE :]}", file=sys.stderr)


def find_workers(
    job: JobOptions, models: T, load: "Callable[[T, LoadOptions], tuple[Any, ...]]", timed: bool = False
) -> "training.processes.Processes":
    """Return what does the units of a job: the actors of `--ray`, or else the processes that `accelerate launch` started.

    load: loads the models in the actors. timed: their seconds are compared.
    """
    if job.ray is None:
        return training.processes.Processes.started()
    gpus = 0 if job.device.startswith("cpu") else None
    workers = hla.ray.Workers(address=job.ray, load=partial(load, models, job), num_gpus=gpus, timed=timed)
    _connections.enter_context(workers.connected())
    return workers


def check_out(out: Path | None, resume: bool) -> None:
    """Refuse an output folder that cannot be written or resumed, before models are loaded."""
    if out is None:
        if resume:
            raise ValueError("--resume goes on with the run of a folder: pass its --out")
        return
    unfinished = training.run_folder.folders(out)[1]
    if not (resume and unfinished.is_dir()):  # it may be the remains of a finished run
        check_new(out)
    _begun.append(unfinished)


def read_problems(
    prompts: Path | None,
    task: str | None,
    data: Path | None,
    model: str | None,
    limit: int | None,
    seed: int,
    shots: int = 0,
) -> tuple[list[str], "list[tasks.base.Problem]", "tasks.base.AnswerTask | None", str]:
    """Return the prompts, their problems, the task, and their name in records: that of the file, without its path."""
    if prompts is not None:
        if task is not None or data is not None or shots:
            raise ValueError("--prompts is in place of --task, --data and --shots: leave them out")
        return tasks.prompts.read_prompts(prompts, limit), [], None, prompts.name
    name = DEMO if task is None else task
    check_source(name, model)
    loaded = tasks.load.load_task(name, data=data, seed=seed, shots=shots)
    problems = loaded.problems(DEMO_LIMIT if limit is None and name == DEMO else limit)
    source = Path(name).name if data is None else f"{Path(name).name}, {data.name}"
    return (
        [problem.prompt for problem in problems],
        problems,
        loaded,
        source + f", {shots} worked examples" * (shots > 0),
    )


def remove_duplicates(problems: "Sequence[tasks.base.Problem]", source: str) -> "list[tasks.base.Problem]":
    """Remove duplicate problems, with a warning: they would make the confidence bound too tight.

    Raises: `ValueError`, one line, for a problem without a right answer.
    """
    unique = list({problem.prompt: problem for problem in reversed(problems)}.values())[::-1]
    if repeated := len(problems) - len(unique):
        line = f"{source}: {repeated} of {len(problems)} problems are repetitions, and each problem counts once"
        warnings.warn(line, stacklevel=2)
    unknown = next((i for i, problem in enumerate(unique, 1) if problem.gold is None), None)
    if unknown is not None:
        raise ValueError(
            f"{source}: problem {unknown} has no right answer, and without one no loss can be told: add `answer`"
        )
    return unique
