"""A request being processed: its texts are joined or streamed in the format of OpenAI's API, and counted with vLLM's names."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, disable_created_metrics
from starlette.requests import ClientDisconnect, Request

from ..artifacts.files import JSONObject
from ..generation.output import Result
from ..stats.speculation import SpeculationStats
from ..validation import one_line
from .bodies import RequestError, format_event, make_error
from .detokenize import AnswerLogprobs, AnswerText, TokenTexts
from .requests import ClientRequest, CompletionRequest
from .tool_calls import CallReader
from .worker import LatestEvents, Progress, Worker


log = logging.getLogger("hf_lossy_assist.server")
# Counters by the entry of `RowStats` that they add up.
COUNTERS = {
    "spec_decode_num_drafts": "num_spec_steps",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_draft_tokens",
    "spec_decode_num_lossy_tokens": "num_lossy_accepts",
    "spec_decode_num_unchecked_tokens": "num_unchecked_tokens",
}
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # buckets of the histograms
# Entries of `SpeculationStats.summary` in the usage, as in vLLM's --per-request-spec-decode-metrics summary.
SHOWN = (
    "mean_acceptance_length draft_acceptance_rate acceptance_histogram num_spec_steps num_accepted_draft_tokens num_draft_tokens "
    "num_spec_tokens"
).split()

Kind = TypeVar("Kind", Counter, Gauge, Histogram)
Times = partial(Histogram, buckets=SECONDS)


class TextFailed(RequestError):
    """A text that cannot be written. Its error is logged, unless `generate` refused the request or the server is shutting down."""

    def __init__(self, error: Exception):
        super().__init__(one_line(str(error) or type(error).__name__, 400), getattr(error, "status", 500))
        if not isinstance(error, RequestError):
            log.error("a text was not written", exc_info=error)


class Choice:
    """One text of an answer."""

    def __init__(self, request: CompletionRequest, texts: TokenTexts, chat: bool):
        self.request = request
        self.text = AnswerText(texts.tokenizer, request.stops, request.ids)
        wanted = "logprobs" in request.arguments
        self.logprobs = AnswerLogprobs(self.text, request.ids, texts, chat) if wanted else None
        self.calls = None if request.tools is None else CallReader(request.tools.form, request.tools.names)
        self.begun = False  # something of it was sent
        self.result: Result | None = None

    def read(self, event: Progress | Result) -> tuple[list[JSONObject], Mapping[str, object] | None]:
        """Return what an event adds to the text as pieces of a message, and the log-probabilities of the added tokens."""
        last = isinstance(event, Result)
        ids = event.token_ids if isinstance(event, Result) else event.ids
        text = self.text.more(ids, last)
        deltas: list[JSONObject] = [{"content": text}] if text else []
        if self.calls is not None:
            deltas = self.calls.more(text, last)
        return deltas, None if self.logprobs is None else self.logprobs.more(ids, event.logprobs or [], last)

    def find_end(self, result: Result) -> str:
        """Return why the text ended. Call it after all of it was read."""
        if result.finish_reason == "length":
            return "length"
        return "tool_calls" if self.calls is not None and self.calls.calls and not self.calls.open else "stop"


def make_usage(results: Sequence[Result], prompt: int, policy: str) -> JSONObject:
    """Return token counts in OpenAI's format, and statistics of speculation over all texts. prompt: tokens of all prompts, each counted once."""
    stats = SpeculationStats.merge([result.speculation for result in results])
    summary, new = stats.summary(), sum(len(result.token_ids) for result in results)
    speculation = {"lossy_policy": policy, "lossless": stats.lossless, "guarantee": stats.guarantee}
    speculation |= {name: summary[name] for name in SHOWN}
    for share, count in (("lossy_share", "num_lossy_accepts"), ("unchecked_share", "num_unchecked_tokens")):
        speculation[share] = summary[count] / max(new, 1)
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return counts | {"speculation": speculation}


class Metrics:
    """Counters of one server with vLLM's names, and two more: tokens of lossy accepts, and unchecked ones.

    Args:
        load: returns how many texts are being written, and how many wait. model: its name, a label of all counters.
    """

    def __init__(self, load: Callable[[], tuple[int, int]], model: str):
        disable_created_metrics()
        self.registry, self.model = CollectorRegistry(), model
        self._ends = self._make(Counter, "request_success", "finished_reason")
        self._accepted_at = self._make(Counter, "spec_decode_num_accepted_tokens_per_pos", "position")
        self._prompts = self._make(Counter, "prompt_tokens").labels(model)
        self._new = self._make(Counter, "generation_tokens").labels(model)
        self._speculation = {entry: self._make(Counter, name).labels(model) for name, entry in COUNTERS.items()}
        self._seconds = self._make(Times, "e2e_request_latency_seconds").labels(model)
        self.first_token = self._make(Times, "time_to_first_token_seconds").labels(model)
        self._make(Gauge, "num_requests_running").labels(model).set_function(lambda: load()[0])
        self._make(Gauge, "num_requests_waiting").labels(model).set_function(lambda: load()[1])
        for end in ("stop", "length", "abort", "refused", "error"):
            self._ends.labels(model, end)

    def _make(self, kind: Callable[..., Kind], name: str, *labels: str) -> Kind:
        """Return a metric with the model's name and further labels."""
        return kind(f"vllm:{name}", f"As vLLM's {name}", ["model_name", *labels], registry=self.registry)

    def count(self, result: Result, prompt: int, end: str, seconds: float) -> None:
        """Count a finished text. prompt: tokens of its prompt."""
        row = result.speculation.rows[0]
        self._prompts.inc(prompt)
        self._new.inc(len(result.token_ids))
        for entry, counter in self._speculation.items():
            counter.inc(getattr(row, entry))
        for (_, accepted), count in row.steps.items():
            for position in range(accepted):
                self._accepted_at.labels(self.model, str(position)).inc(count)
        self.count_end(end)
        self._seconds.observe(seconds)

    def count_end(self, reason: str) -> None:
        """Count a text that has ended, by the reason: abort, refused and error beside `finish_reason`."""
        self._ends.labels(self.model, reason).inc()

    def collect_labelled(self, label: Mapping[str, str]) -> list[Metric]:
        """Return all counters with a further label."""
        families = list(self.registry.collect())
        for family in families:
            family.samples = [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]
        return families


class Pending:
    """A request whose texts are being written, and the objects of its answer."""

    def __init__(
        self, http: Request, request: ClientRequest, worker: Worker, metrics: Metrics, texts: TokenTexts, chat: bool
    ):
        """Queue the texts. Raises: `QueueFull`."""
        self.request, self.worker, self.metrics, self.chat = request, worker, metrics, chat
        self.choices = [Choice(text, texts, chat) for text in request.texts]
        self.events, self.began = LatestEvents(), time.perf_counter()
        self.over = False  # none of its texts is being written any more
        kind = "chat.completion" if chat else "text_completion"
        answer = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": answer, "object": kind, "created": int(time.time()), "model": metrics.model}
        self.jobs = worker.submit(request.texts, self.events.tell)
        self._gone = asyncio.ensure_future(_wait_for_hang_up(http))

    async def next(self) -> tuple[int, Progress | Result]:
        """Return the next event, with the index of its text. Raises: `ClientDisconnect` or `TextFailed`."""
        came = asyncio.ensure_future(self.events.get())
        try:
            await asyncio.wait({came, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not came.done():
                raise ClientDisconnect
            index, event = came.result()
        finally:
            came.cancel()
        if isinstance(event, Exception):
            raise TextFailed(event)
        if isinstance(event, Result):
            self.choices[index].result = event
            self.over = all(choice.result is not None for choice in self.choices)
        return index, event

    def end(self, reason: str | None = None) -> None:
        """End the texts that are still being written, and count the request, if there is a reason."""
        self._gone.cancel()
        if self.over:
            return
        self.over = True
        for job in self.jobs:
            self.worker.cancel(job)
        if reason is not None:
            self.metrics.count_end(reason)

    async def whole(self) -> JSONObject:
        """Return the whole answer. Raises: as `next`."""
        while not self.over:
            await self.next()
        return await asyncio.to_thread(self._join)

    def _join(self) -> JSONObject:
        choices = list[JSONObject]()
        for index, choice in enumerate(self.choices):
            assert choice.result is not None
            deltas, logprobs = choice.read(choice.result)
            if choice.logprobs is not None and logprobs is None:
                logprobs = choice.logprobs.format([], [], [])
            text = "".join(delta.get("content", "") for delta in deltas)
            calls = [] if choice.calls is None else choice.calls.calls
            message: JSONObject = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
            message |= {"tool_calls": calls} if calls else {}
            content = {"message": message} if self.chat else {"text": text}
            end = self._count(choice, choice.result)
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": end})
        return self._head | {"choices": choices, "usage": self._usage()}

    async def stream(self, index: int, event: Progress | Result) -> AsyncIterator[str]:
        """Yield the pieces of the answer, beginning with those of `event`; an error is the last of them."""
        try:
            while True:
                for piece in self._pieces(index, event):
                    yield piece
                if self.over:
                    break
                index, event = await self.next()
            if self.request.include_usage:
                yield self._format([], usage=self._usage())
            yield format_event("[DONE]")
        except ClientDisconnect:
            self.end("abort")
        except RequestError as error:
            self.end("error")
            yield format_event(make_error(str(error), error.status))
        except Exception:
            self.end()
            raise  # to the server, which counts it

    def _pieces(self, index: int, event: Progress | Result) -> list[str]:
        """Return what an event adds to a streamed text."""
        choice, out = self.choices[index], list[str]()
        deltas, logprobs = choice.read(event)
        if not deltas and (logprobs or (isinstance(event, Result) and not choice.begun)):
            deltas = [{}]
        for delta in deltas:
            begin: JSONObject = {}
            if not choice.begun:
                self.metrics.first_token.observe(time.perf_counter() - self.began)
                begin = {"role": "assistant", "content": None if "tool_calls" in delta else ""}
            out.append(self._piece(index, begin | delta, logprobs))
            choice.begun = True
        if isinstance(event, Result):
            out.append(self._piece(index, {}, end=self._count(choice, event)))
        return out

    def _piece(self, index: int, delta: JSONObject, logprobs: object = None, end: str | None = None) -> str:
        content = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return self._format([{"index": index, **content, "logprobs": logprobs, "finish_reason": end}])

    def _format(self, choices: Sequence[JSONObject], **more: object) -> str:
        kind = {"object": "chat.completion.chunk"} if self.chat else {}
        return format_event({**self._head, **kind, "choices": choices, **more})

    def _count(self, choice: Choice, result: Result) -> str:
        """Count a finished text; return why it ended."""
        end = choice.find_end(result)
        self.metrics.count(result, len(choice.request.ids), end, time.perf_counter() - self.began)
        return end

    def _usage(self) -> JSONObject:
        per_prompt = len(self.choices) // self.request.prompts
        prompt = sum(len(choice.request.ids) for choice in self.choices[::per_prompt])
        results = [choice.result for choice in self.choices if choice.result is not None]
        return make_usage(results, prompt, self.request.texts[0].policy)


async def _wait_for_hang_up(request: Request) -> None:
    """Return once the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
