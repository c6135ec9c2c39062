"""Run many OpenAI clients against `hf-lossy serve`: errors, outputs, latencies, memory, hang-ups, and shutdown.

    python benchmarks/soak.py                                # the demo pair, 64 clients, ten minutes
    python benchmarks/soak.py --clients 8 --minutes 0.2
    python benchmarks/soak.py --mix                          # every kind of request; needs jsonschema
    python benchmarks/soak.py --ray 2                        # two replicas on Ray Serve, one of which is killed each minute
    python benchmarks/soak.py --clients 16 --minutes 0.5 --copies 0.5 --drafters model auto    # copied documents, without suffixes and with

The server is a separate process. Each client sends one demo problem after another, greedily, every third one streamed; the client drops every tenth request
in the middle. Outputs are compared with `generate`'s. As a baseline, the same server first gets one request
after another. At the end SIGTERM arrives while all clients wait, and running requests must finish. With --policy and a lossy policy
outputs differ by design. Each of --drafters gets a server: values of `serve --drafter`, or `model` for none. --copies sends the text as `prediction` in a
share of the requests.

--ray N: N replicas on a Ray cluster of this machine, each with --rows; every --kill-seconds one is killed with SIGKILL. Requests that this ends are "errors",
with their messages below the table; an answer put together of two replicas would be "different".

--mix: a random pair of characters in place of the demo's, whose words spell no JSON. Requests are plain, structured by different schemas, for
three sampled texts, with log-probabilities, or with tools, each streamed and not. "equal" are those with all of this right: greedy texts are
`generate`'s (calls of tools those that the server writes alone), structured texts and arguments are valid by jsonschema, and there are three
texts where three were wanted.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
from pairs import machine, record
from rich.console import Console
from rich.table import Table
from soak_mix import NEW, SCHEMAS, Answer, Case, make_cases, make_pair, make_prompts, write_alone

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.loading import load_model, load_tokenizer


class Clients:
    """The clients' requests and results."""

    def __init__(self, url: str, problems: list[str], texts: list[str], policy: str, copies: float = 0.0):
        self.url, self.problems, self.texts, self.policy, self.copies = url, problems, texts, policy, copies
        self.seconds: list[float] = []
        self.counts: Counter[str] = Counter()
        self.tokens = 0
        self.errors: list[str] = []
        self.until, self.least = 0.0, 0

    async def ask(self, client: openai.AsyncOpenAI, number: int) -> None:
        """Send one request; the last digit of its number decides its kind."""
        n = number % len(self.problems)
        call: dict[str, Any] = {
            "model": "demo", "prompt": self.problems[n], "max_tokens": NEW, "temperature": 0, "extra_body": {"lossy_policy": self.policy},
        }  # fmt: skip
        if number * 37 % 100 < 100 * self.copies:
            call["extra_body"]["prediction"] = {"type": "content", "content": self.texts[n]}
        began = time.perf_counter()
        if number % 10 == 7:
            stream = await client.completions.create(**call, stream=True)
            async for _ in stream:
                break
            await stream.close()
            self.counts["hung up"] += 1
            return
        if number % 3 == 0:
            text = ""
            call |= {"stream": True, "stream_options": {"include_usage": True}}
            async for part in await client.completions.create(**call):
                text += part.choices[0].text if part.choices else ""
                self.tokens += part.usage.completion_tokens if part.usage else 0
        else:
            out = await client.completions.create(**call)
            text = out.choices[0].text
            self.tokens += out.usage.completion_tokens
        self.seconds.append(time.perf_counter() - began)
        self.counts["equal" if text == self.texts[n] else "different"] += 1

    async def client(self, first: int) -> None:
        """Send requests until the time is over, and there have been `least`."""
        number = first * 1009
        async with openai.AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=120) as client:
            while time.monotonic() < self.until or number < self.least:
                try:
                    await self.ask(client, number)
                except Exception as error:
                    self.counts["errors"] += 1
                    self.errors.append(f"{type(error).__name__}: {error}")
                number += 1

    async def run(self, clients: int, seconds: float) -> float:
        """Run all clients at once; return the seconds."""
        self.until, began = time.monotonic() + seconds, time.perf_counter()
        await asyncio.gather(*(self.client(first) for first in range(clients)))
        return time.perf_counter() - began


class MixedClients(Clients):
    """Clients with requests of every kind. `alone`: an answer's text becomes what further answers must be, where it is not known."""

    def __init__(self, cases: list[Case], alone: bool, url: str, problems: list[str], texts: list[str], policy: str):
        super().__init__(url, problems, texts, policy)
        self.cases, self.alone, self.kinds = cases, alone, Counter[str]()
        self.least = len(cases) if alone else 0

    async def ask(self, client: openai.AsyncOpenAI, number: int) -> None:
        """Send one request; its number decides its kind."""
        turns, place = divmod(number, len(self.cases))
        case, stream = self.cases[place], (place // len(SCHEMAS) + turns) % 2 == 1  # half of each kind
        create = (client.chat if "messages" in case.body else client).completions.create
        body = {
            "model": "demo",
            **case.body,
            "extra_body": {"lossy_policy": self.policy} | case.body.get("extra_body", {}),
        }
        began = time.perf_counter()
        if number % 10 == 7 and not self.alone:
            pieces = await create(**body, stream=True)
            async for _ in pieces:
                break
            await pieces.close()
            self.counts["hung up"] += 1
            return
        answers, tokens = defaultdict[int, Answer](Answer), 0
        if stream:
            pieces = await create(**body, stream=True, stream_options={"include_usage": True})
            parts = [part async for part in pieces]
        else:
            parts = [await create(**body)]
        for part in parts:
            tokens += part.usage.completion_tokens if part.usage else 0
            for choice in part.choices:
                answers[choice.index].add(choice)
        self.seconds.append(time.perf_counter() - began)
        self.tokens += tokens
        wrong = case.find_wrong([*answers.values()], tokens)
        self.counts["different" if wrong else "equal"] += 1
        self.kinds[f"{case.kind}{', streamed' * stream}"] += 1
        if wrong:
            self.errors.append(f"{case.kind}{', streamed' * stream}: {wrong}")
        elif self.alone and case.kind == "tools" and case.text is None:
            case.text = str(answers[0].calls)


def storage(pid: int) -> float:
    """Return the resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def watched(pid: int, work: Any, found: list[float]) -> Any:
    """Run `work` and record the server's memory every few seconds."""
    task = asyncio.ensure_future(work)
    while not task.done():
        found.append(storage(pid))
        await asyncio.wait([task], timeout=5)
    return task.result()


@contextmanager
def start_replicas(args: argparse.Namespace) -> Iterator[str]:
    """Serve on Ray to the end of the block; yield the URL."""
    import ray
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(
            hla.ray.app(policies=args.policy, replicas=args.ray, batch_size=args.rows, num_cpus=0.1), name="soak"
        )
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        serve.shutdown()
        ray.shutdown()


@contextmanager
def kill_replicas(seconds: float) -> Iterator[list[int]]:
    """Kill one of the replicas every so many seconds; the processes killed are added to what is yielded."""
    over, killed = threading.Event(), list[int]()

    def kill() -> None:
        while not over.wait(seconds):
            files = [
                file
                for file in Path("/proc").glob("[0-9]*/cmdline")
                if file.read_bytes().startswith(b"ray::ServeReplica:soak:replica")
            ]
            if files:
                killed.append(int(random.choice(files).parent.name))
                os.kill(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    yield killed
    over.set()
    thread.join()


async def ended(server: subprocess.Popen, clients: Clients, count: int) -> dict[str, int]:
    """Send SIGTERM while `count` requests run; return how many were open, how many finished properly, and the exit code."""
    async with openai.AsyncOpenAI(base_url=clients.url, api_key="none", max_retries=0, timeout=120) as client:

        async def one(n: int) -> bool:
            out = await client.completions.create(
                model="demo", prompt=clients.problems[n], max_tokens=NEW, temperature=0, extra_body={"lossy_policy": clients.policy}
            )  # fmt: skip
            return out.choices[0].text == clients.texts[n]

        tasks = [asyncio.ensure_future(one(n)) for n in range(count)]
        await asyncio.sleep(0.3)
        still = sum(not task.done() for task in tasks)
        server.send_signal(signal.SIGTERM)
        results = await asyncio.gather(*tasks, return_exceptions=True)
    return {"asked": count, "open": still, "written": sum(r is True for r in results), "code": server.wait(60)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rows", type=int, default=32, help="texts that the server writes at a time")
    parser.add_argument("--policy", default="svip")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--mix", action="store_true", help="requests of every kind")
    parser.add_argument("--drafters", nargs="+", default=["model"], help="values of serve's --drafter, or `model`")
    parser.add_argument("--ray", type=int, default=0, help="serve this number of replicas on Ray")
    parser.add_argument("--kill-seconds", type=float, default=60.0, help="between two kills of --ray")
    parser.add_argument("--copies", type=float, default=0.0, help="share of requests whose text is sent as prediction")
    args = parser.parse_args()
    speeds = []
    for drafter in args.drafters:
        with tempfile.TemporaryDirectory() as folder:
            speeds.append(run_soak(args, Path(folder), drafter))
        if len(speeds) > 1:
            print(
                f"{drafter}: {speeds[-1] / speeds[0]:.2f} × the tokens/s of {args.drafters[0]} with {args.clients} clients"
            )


def run_soak(args: argparse.Namespace, folder: Path, drafter: str) -> float:
    """Run the clients and print the figures; return the tokens per second of all clients. folder: for the pair of --mix."""
    models: list[str] = []
    cases: list[Case] = []
    if args.mix:
        make_pair(folder)
        models = ["--model", f"{folder}/target", "--assistant", f"{folder}/draft", "--name", "demo"]
        target, tokenizer = load_model(f"{folder}/target").eval(), load_tokenizer(f"{folder}/target")
        problems = make_prompts(64)
        texts = [write_alone(target, tokenizer, prompt, NEW) for prompt in problems]
        cases = make_cases(target, tokenizer, problems, texts)
    else:
        target, draft, _, tokenizer = hla.demo.load()
        problems = [problem.prompt for problem in hla.demo.problems(64, seed=5)]
        hla.enable(target)
        beside = {"assistant_model": draft, "lossy_policy": args.policy}
        texts = [write_alone(target, tokenizer, prompt, NEW, **beside) for prompt in problems]

    def make_clients(alone: bool) -> Clients:
        if args.mix:
            return MixedClients(cases, alone, url, problems, texts, args.policy)
        return Clients(url, problems, texts, args.policy, args.copies)

    if args.ray:
        with start_replicas(args) as url:
            alone, many = make_clients(True), make_clients(False)
            took = asyncio.run(alone.run(1, min(20.0, args.minutes * 60)))
            with kill_replicas(args.kill_seconds) as killed:
                spent = asyncio.run(many.run(args.clients, args.minutes * 60))
        show_figures(args, (alone, took), (many, spent), [f"{args.ray} replicas; {len(killed)} were killed"])
        return many.tokens / spent

    models += [] if drafter == "model" else ["--drafter", drafter]
    command = [str(Path(sys.executable).with_name("hf-lossy")), "serve", "--port", "0", "--policies", args.policy]
    server = subprocess.Popen([*command, "--batch-size", str(args.rows), *models], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        words = next(line for line in server.stdout if "http://" in line)
        url = words[words.index("http://") :].split()[0].rstrip("/").removesuffix("/v1") + "/v1"
        alone, many = make_clients(True), make_clients(False)
        took = asyncio.run(alone.run(1, min(20.0, args.minutes * 60)))
        sizes: list[float] = []
        spent = asyncio.run(watched(server.pid, many.run(args.clients, args.minutes * 60), sizes))
        end = asyncio.run(ended(server, many, min(args.clients, args.rows)))
    finally:
        server.kill()
    thirds = [float(np.median(part)) for part in np.array_split(sizes, min(3, len(sizes)))]
    lines = [
        f"the server's storage, medians of the thirds of the time: {', '.join(f'{size:.0f}' for size in thirds)} MB",
        f"SIGTERM with {end['open']} of {end['asked']} requests open: {end['written']} texts were written to their end, as they should be; "
        f"exit code {end['code']}",
    ]
    if isinstance(many, MixedClients):
        lines.append(f"answered: {', '.join(f'{count} {kind}' for kind, count in sorted(many.kinds.items()))}")
    show_figures(args, (alone, took), (many, spent), lines, storage_mb=sizes, end=end)
    return many.tokens / spent


def show_figures(
    args: argparse.Namespace,
    alone: tuple[Clients, float],
    many: tuple[Clients, float],
    lines: list[str],
    **more: object,
) -> None:
    """Print and record the figures of two runs with their seconds, and further lines. more: for the record."""
    table = Table("clients", "requests", "equal", "different", "hung up", "errors", "p50, s", "p95, s", "tokens/s")
    rows = []
    for name, (clients, seconds) in (("1", alone), (str(args.clients), many)):
        p50, p95 = np.percentile(clients.seconds, [50, 95])
        row = {"clients": name, "requests": sum(clients.counts.values()), **clients.counts, "p50": float(p50), "p95": float(p95), "tokens_per_second": clients.tokens / seconds}  # fmt: skip
        rows.append(row)
        table.add_row(
            name, str(row["requests"]), *(str(clients.counts[kind]) for kind in ("equal", "different", "hung up", "errors")),
            f"{p50:.2f}", f"{p95:.2f}", f"{row['tokens_per_second']:.0f}",
        )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{machine('cpu')}; {args.minutes:g} minutes, {args.rows} texts at a time, {torch.get_num_threads()} threads for both sides"
    )
    for line in lines:
        console.print(line)
    errors = many[0].errors + alone[0].errors
    for error, count in Counter(errors).most_common(5):
        console.print(f"{count} × {error}")
    record(args, machine("cpu"), rows=rows, errors=json.loads(json.dumps(many[0].errors[:20])), **more)


if __name__ == "__main__":
    main()
