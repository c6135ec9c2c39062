"""The search on many problems at once: each in its place, all waiting on one batch of the target or on its server."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from ...drafters.hidden_state import HiddenStateDrafter
from ...models.introspection import vocabulary_of
from ...models.texts import continuation, special_in
from ...tasks.endpoint import served
from ...tasks.load import AnswerTask, Problem
from .continuing import Batch, Choice, Continuer
from .draft_choices import DraftChoices, StatesChoices
from .mine_inputs import local, prepared
from .mine_settings import DEFAULTS, MineSettings
from .remote import Remote
from .search import Continue, Limits, Mined, Search, Work, search


TAIL = 128  # tokens in which the text that ends a response is looked for


def mine_problems(
    target: Any, draft: Any, tokenizer: Any, task: AnswerTask, problems: Sequence[Problem],
    settings: MineSettings = DEFAULTS, *, batch_size: int = 16, workers: int = 4,
    wrap: Callable[[str], str] = str, numbers: Sequence[int] | None = None,
    tell: Callable[[int, float], None] = lambda number, share: None,
) -> Iterator[Mined]:  # fmt: skip
    """Run Algorithm 1 on every problem, `batch_size` of them in flight; yields each as it is done (not in their order).

    At each step every problem in flight has one continuation under way, or waits for one answer; a problem that is done makes
    room for the next at once. `numbers`: how the problems are called in what is yielded. `tell`: is given a problem's number and the
    share of it that is done, from time to time.
    """
    if not problems:
        return
    texts = [wrap(p.prompt) for p in problems]
    numbers = range(len(problems)) if numbers is None else numbers
    prompts, processors, ends = prepared(target, draft, tokenizer, texts, settings)
    choice = Choice(processors, settings.seed if settings.do_sample else None)
    vocabulary = vocabulary_of(local(target, draft))
    limit, over = max(map(len, prompts)) + settings.max_new_tokens, ended(tokenizer, ends, task)
    places = min(batch_size, len(problems))

    pool = ThreadPoolExecutor(workers, "hf-lossy-mine")  # starts no thread before it is given work
    try:
        if served(target):
            continuer: Continuer = Remote(target, tokenizer, sorted(ends), over, pool)
        else:
            continuer = Batch(target, places, limit, choice, over)

        read: list[DraftChoices] = []

        def begin(i: int) -> Search:
            drafts: Callable[[list[int], int], list[int]]
            if isinstance(draft, HiddenStateDrafter):
                drafts = StatesChoices(draft, target, prompts[i], limit, choice, settings.places)
            else:
                drafts = DraftChoices(draft, prompts[i], limit, vocabulary, choice, read)
            began, seconds = time.monotonic(), settings.max_seconds

            def extract(response: list[int]) -> str | None:
                return task.extract(problems[i], continuation(tokenizer, prompts[i], response))

            return search(
                Mined(numbers[i], texts[i], prompts[i], [], [], None),
                drafts, over, extract, partial(task.same, problems[i]),
                Limits(settings.max_new_tokens, settings.max_mismatches,
                       lambda: seconds is not None and time.monotonic() - began > seconds, partial(tell, numbers[i])),
                against_running=task.against_running, naive=settings.naive,
            )  # fmt: skip

        yield from _drive(_Places(places, continuer, pool if task.slow else None, settings), prompts, begin)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Places:
    """Problems in flight, each in its place; moves a search on when what it asked for is there."""

    def __init__(self, places: int, continuer: Continuer, pool: ThreadPoolExecutor | None, settings: MineSettings):
        self.continuer, self.pool, self.settings = continuer, pool, settings
        self.searches: list[Search | None] = [None] * places
        self.prompts: list[list[int]] = [[] for _ in range(places)]
        self.costs = [[0, 0, 0] for _ in range(places)]  # continuations, tokens, retokenised
        self.pending: dict[Future, Search] = {}

    def begin(self, place: int, found: Search, prompt: list[int]) -> Mined | None:
        self.searches[place], self.prompts[place], self.costs[place] = found, prompt, [0, 0, 0]
        return self.move(place, None)

    def move(self, place: int, value: Any) -> Mined | None:
        """Give a search what it waited for; returns what it found if that was the last."""
        search_here = self.searches[place]
        assert search_here is not None
        try:
            while True:
                asked = search_here.send(value)
                if isinstance(asked, Continue):
                    budget = self.settings.max_new_tokens - len(asked.prefix)
                    self.continuer.start(place, self.prompts[place], asked.prefix, budget)
                    return None
                assert isinstance(asked, Work)
                if self.pool is not None:
                    self.pending[self.pool.submit(asked.run)] = search_here
                    return None
                value = asked.run()
        except StopIteration as stop:
            self.searches[place] = None
            self.continuer.forget(place)
            mined: Mined = stop.value
            mined.continuations, mined.new_tokens, mined.retokenised = self.costs[place]
            return mined

    def step(self) -> Iterator[Mined]:
        """One step of everything that is under way."""
        if self.continuer.busy:
            for place, continuation, respelt in self.continuer.step():
                for i, cost in enumerate((1, len(continuation), int(respelt))):
                    self.costs[place][i] += cost
                if (mined := self.move(place, continuation)) is not None:
                    yield mined
        elif self.pending:
            wait(self.pending, return_when=FIRST_COMPLETED)
        for future in [f for f in self.pending if f.done()]:
            place = self.searches.index(self.pending.pop(future))
            if (mined := self.move(place, future.result())) is not None:
                yield mined

    def narrow(self) -> None:
        """Give up free places once they are half of all: no problem is left for them."""
        used = [place for place, search_here in enumerate(self.searches) if search_here is not None]
        if used and 2 * len(used) <= len(self.searches):
            self.continuer.narrow(used)
            for name in ("searches", "prompts", "costs"):
                setattr(self, name, [getattr(self, name)[place] for place in used])


def _drive(places: _Places, prompts: Sequence[list[int]], begin: Callable[[int], Search]) -> Iterator[Mined]:
    waiting = iter(range(len(prompts)))
    left = len(prompts)
    while left:
        for place, search_here in enumerate(places.searches):
            while search_here is None and (i := next(waiting, None)) is not None:
                mined = places.begin(place, begin(i), prompts[i])
                search_here = places.searches[place]
                if mined is not None:
                    left -= 1
                    yield mined
        for mined in places.step():
            left -= 1
            yield mined
        if left and None in places.searches and left == sum(s is not None for s in places.searches):
            places.narrow()


def ended(tokenizer: Any, ends: set[int], task: AnswerTask | None = None) -> Callable[[Sequence[int]], bool]:
    """Whether a response is over: its last token is an end token, or the task says so of its tail."""
    if task is None or not task.ends_early:
        return lambda response: response[-1] in ends
    visible = special_in(tokenizer, task.ends)

    def over(response: Sequence[int]) -> bool:
        if response[-1] in ends:
            return True
        return task.over(continuation(tokenizer, response[:-TAIL], response[-TAIL:], visible))

    return over
