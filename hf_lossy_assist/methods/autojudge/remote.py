"""A target behind an OpenAI-compatible server, as the search's `Continuer` (AutoJudge, Appendix R)."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from ...tasks.endpoint import Endpoint


class Remote:
    """Sends each place's text to the server and makes tokens of what comes back.

    Text has several spellings in tokens, and the server's own one is not told. Where this tokenizer spells the whole text so
    that it begins with the tokens there are, the rest are the new ones; where not, the prefix keeps its tokens, the new text
    is tokenised by itself, and the continuation is counted as respelt.
    """

    def __init__(
        self, endpoint: Endpoint, tokenizer: Any, ends: Sequence[int], over: Callable[[Sequence[int]], bool],
        pool: ThreadPoolExecutor,
    ):  # fmt: skip
        """`ends`: end tokens, of which the tokenizer's own or else the first stands for the end that a server reports.

        `over`: whether a response ends with its last token; what the server wrote behind that is cut off.
        """
        self.endpoint, self.tokenizer, self.over, self.pool = endpoint, tokenizer, over, pool
        self.end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else next(iter(ends), None)
        # A begin token that the tokenizer adds by itself, the server adds as well; one that the text spells out it does not.
        self.added = int(tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id])
        self.pending: dict[int, Future[tuple[list[int], bool]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.pending)

    def start(self, place: int, prompt: list[int], prefix: list[int], budget: int) -> None:
        self.pending[place] = self.pool.submit(self._ask, prompt, prefix, budget)

    def step(self) -> list[tuple[int, list[int], bool]]:
        wait(self.pending.values(), return_when=FIRST_COMPLETED)
        ready = [place for place, future in self.pending.items() if future.done()]
        return [(place, *self.pending.pop(place).result()) for place in ready]

    def forget(self, place: int) -> None:
        pass

    def narrow(self, places: Sequence[int]) -> None:
        self.pending = {new: self.pending[old] for new, old in enumerate(places) if old in self.pending}

    def _ask(self, prompt: list[int], prefix: list[int], budget: int) -> tuple[list[int], bool]:
        ids = (prompt + prefix)[self.added :]
        text = self.tokenizer.decode(ids)
        completion = self.endpoint.complete(text, budget)
        spelt = self.tokenizer(text + completion.text, add_special_tokens=False)["input_ids"]
        respelt = spelt[: len(ids)] != ids
        new = spelt[len(ids) :]
        if respelt:
            new = self.tokenizer(completion.text, add_special_tokens=False)["input_ids"]
        if completion.finished and self.end is not None:
            new = [*new, self.end]
        new = new[:budget]  # the server counts its own spelling: ours may be longer than what is left
        last = next((i for i in range(len(new)) if self.over(prefix + new[: i + 1])), len(new) - 1)
        return new[: last + 1], respelt
