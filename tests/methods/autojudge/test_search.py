"""AutoJudge's search by hand and against a literal transcription of Algorithm 1."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hf_lossy_assist.methods.autojudge.search import Continue, Limits, Mined, Mismatch, Work, search


END = 0


def problem() -> Mined:
    return Mined(7, "prompt", [1], [], [], None)


class Script:
    """Plays the models and the task: `says[prefix]` is the target's continuation, `answers` of whole responses (by default the
    last token but END), `choices` what the draft returns, call by call. What the search asked for is kept."""

    def __init__(self, says: dict[tuple, list[int]], choices: list[list[int]], answers: dict[tuple, str | None] | None = None):  # fmt: skip
        self.says, self.choices, self.answers = says, choices, answers or {}
        self.prefixes: list[list[int]] = []
        self.drafted: list[tuple[list[int], int]] = []
        self.compared: list[tuple[str, str]] = []

    def draft(self, y: list[int], start: int) -> list[int]:
        self.drafted.append((list(y), start))
        return list(self.choices[len(self.drafted) - 1])

    def extract(self, ids: list[int]) -> str | None:
        default = str(ids[-1] if ids[-1] != END else ids[-2]) if ids else None
        return self.answers.get(tuple(ids), default)

    def same(self, reference: str, answer: str) -> bool:
        self.compared.append((reference, answer))
        return int(reference) % 10 == int(answer) % 10

    def run(self, max_new_tokens: int = 4, same: Callable[[str, str], bool] | None = None, **settings: Any) -> Mined:
        caps = {name: settings.pop(name) for name in ("max_mismatches", "late") if name in settings}
        over = lambda response: response[-1] == END  # noqa: E731
        limits = Limits(max_new_tokens, **caps)
        mined = problem()
        found, value = search(mined, self.draft, over, self.extract, same or self.same, limits, **settings), None
        try:
            while True:
                step = found.send(value)
                if isinstance(step, Work):
                    value = step.run()
                    continue
                assert isinstance(step, Continue)
                self.prefixes.append(list(step.prefix))
                value = self.says[tuple(step.prefix)]
                assert len(step.prefix) + len(value) <= max_new_tokens, "the script itself is too long"
        except StopIteration as stop:
            assert stop.value is mined
        assert self.prefixes[0] == [], "the whole response comes first"
        assert sorted(map(tuple, self.prefixes)) == sorted(self.says), "a line of the script unused"
        assert len(self.drafted) == len(self.choices)
        return mined


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_goes_on_from_an_unimportant_token_and_keeps_an_important_one():
    script = Script({(): [1, 2, 3, END], (1, 5): [13, END], (1, 5, 6): [4]}, choices=[[1, 5, 9, END], [6, 8]])

    def same(reference, answer):
        script.compared.append((reference, answer))
        return answer == "13"

    mined = script.run(4, same)
    # 3 would have been the next mismatch (9), but the response is another one by then. [1, 5, 6, 4] is as long as may be.
    # Position 3 comes last: END against the draft's 8, which is not continued either.
    assert script.drafted == [([1, 2, 3, END], 0), ([1, 5, 13, END], 2)]
    assert mined.mismatches == [
        Mismatch(1, 2, 5, False, "13"), Mismatch(2, 13, 6, True, "4"), Mismatch(3, END, 8, True, "8"),
    ]  # fmt: skip
    assert script.compared == [("3", "13"), ("3", "4"), ("3", "8")], "with the target's own answer, every time"
    assert (mined.target_response, mined.response, mined.target_answer) == ([1, 2, 3, END], [1, 5, 13, END], "3")
    assert mined.cut is None


def test_without_an_answer():
    script = Script({(): [1, 2, END]}, [], {(1, 2, END): None})
    mined = script.run()
    assert (mined.mismatches, mined.target_answer, mined.response) == ([], None, [1, 2, END])
    script = Script({(): [1, 2, END], (5,): [2, END]}, [[5, 2, END]], {(5, 2, END): None})
    assert script.run().mismatches == [Mismatch(0, 1, 5, True, None)]
    assert not script.compared, "there is nothing to compare"


def test_caps_are_named():
    says = {(): [1, 2, 3, END], (4,): [9, END], (1, 5): [9, END]}
    choices = [[4, 5, 6, END]]
    mined = Script(says, choices).run(max_mismatches=2)
    assert mined.cut == "mismatches" and [m.position for m in mined.mismatches] == [0, 1]
    assert Script(says, [[4, 5, 3, END]]).run(max_mismatches=2).cut is None, "there was no third"

    times = iter([False, False, True])
    mined = Script(says, choices).run(late=lambda: next(times))
    assert mined.cut == "seconds" and [m.position for m in mined.mismatches] == [0, 1]
    assert mined.response == [1, 2, 3, END]
    assert Script({(): [1, END]}, [[1, END]]).run(late=lambda: True).cut is None, "there was nothing to cut"


# -- against a transcription of the paper -----------------------------------------------------------------------------

TOP, WORDS = 9, 4


@cache
def word(seed: int, *text: int) -> int:
    """A made-up model: its greedy token after `text`."""
    return random.Random(f"{seed} {text}").choice([END, *range(1, WORDS + 1)] if len(text) > 2 else range(1, WORDS))


def written(seed: int, prefix: Sequence[int]) -> list[int]:
    out = list(prefix)
    while not (out and out[-1] == END) and len(out) < TOP:
        out.append(word(seed, *out))
    return out


def draft_word(seed: int, *text: int) -> int:
    return word(seed, *text) if random.Random(f"{seed} {text} !").random() < 0.6 else word(seed + 10**6, *text)


def literal(seed: int, answer: Callable[[list[int]], Any]) -> tuple[list, list[int]]:
    """Algorithm 1, line by line, with nothing kept from one round to the next."""
    found: list[tuple] = []
    y = written(seed, [])
    alpha, t = answer(y), -1
    while True:
        choices = [draft_word(seed, *y[:i]) for i in range(len(y))]
        left = [i for i in range(len(y)) if y[i] != choices[i] and i > t]
        if not left:
            return found, y
        t = min(left)
        other = written(seed, [*y[:t], choices[t]])
        if answer(other) == alpha:
            found.append((t, y[t], choices[t], False))
            y = other
        else:
            found.append((t, y[t], choices[t], True))


def test_as_the_paper_writes_it():
    both: set[bool] = set()
    longest = differ = 0
    for seed in range(120):
        answer = lambda ids: sum(ids) % 3  # noqa: E731
        want, last = literal(seed, answer)
        found = search(
            problem(), lambda y, start: [draft_word(seed, *y[:i]) for i in range(start, len(y))],  # noqa: B023
            lambda ids: ids[-1] == END, lambda ids: str(sum(ids) % 3), lambda a, b: a == b, Limits(TOP),
        )  # fmt: skip
        value: Any = None
        try:
            while True:
                step = found.send(value)
                if isinstance(step, Continue):
                    assert len(step.prefix) < TOP and END not in step.prefix
                    value = written(seed, step.prefix)[len(step.prefix) :]
                else:
                    value = step.run()
        except StopIteration as stop:
            mined: Mined = stop.value
        assert [(m.position, m.target_token, m.draft_token, m.important) for m in mined.mismatches] == want
        assert mined.response == last and mined.target_response == written(seed, [])
        assert answer(mined.response) == answer(mined.target_response)
        # What Appendix A promises: where the draft's own answer differs, some token is important.
        drafted: list[int] = []
        while not (drafted and drafted[-1] == END) and len(drafted) < TOP:
            drafted.append(draft_word(seed, *drafted))
        if answer(drafted) != answer(mined.target_response):
            differ += 1
            assert any(m.important for m in mined.mismatches)
        # And what it is for: the draft with the important tokens replaced writes exactly this response.
        replaced, text = {m.position: m.target_token for m in mined.mismatches if m.important}, []
        while not (text and text[-1] == END) and len(text) < TOP:
            text.append(replaced.get(len(text), draft_word(seed, *text)))
        assert text == mined.response
        both |= {m.important for m in mined.mismatches}
        longest = max(longest, len(mined.mismatches))
    assert both == {True, False} and longest > 4 and differ > 10
