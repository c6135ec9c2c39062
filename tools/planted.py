"""Plant one-line faults, one at a time, and report which test finds each, and after how many seconds.

    python tools/planted.py                        # all, two at a time: half an hour; exit status 1 if one goes uncaught
    python tools/planted.py rollback stops         # the faults whose name begins with one of these words
    python tools/planted.py --out found.json       # also write the results
    python tools/planted.py --check                # only look whether each fault's line is still there, once

A fault is a line of the package and the line that replaces it. The tests named beside it run against a copy of the package, until the first
fails. Of uncommitted files only those that git tracks are there. A refactoring moves lines: write the same fault where the line is now, with the same name, so that runs can be compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).parent.parent
PACKAGE = "hf_lossy_assist"
TIMEOUT = 600  # seconds of a fault's tests: an endless loop is found, too


class Fault(NamedTuple):
    name: str
    path: str  # in the package
    line: str
    wrong: str
    tests: str  # folders and files in tests/, in the order in which they run


FAULTS = (
    # Acceptance
    Fault("acceptance coins", "rules/base.py", "return coins < refuse_unfit(chances, coins.shape, verified.logits.dtype, self, \"probability\")", "return coins < refuse_unfit(chances, coins.shape, verified.logits.dtype, self, \"probability\").sqrt()", "rules/test_laws.py"),
    Fault("acceptance prefix", "rules/acceptance.py", "runs = (by_rule & verified.is_sent).long().cumprod(dim=1).bool()", "runs = (by_rule & verified.is_sent).long().cummax(dim=1).values.bool()", "rules"),
    Fault("acceptance unsent", "rules/acceptance.py", "(by_rule & verified.is_sent).long()", "by_rule.long()", "filters rules"),
    Fault("acceptance residual", "rules/base.py", "return p.sub_(at_places(verified.q, at)).clamp_(min=0.0)", "return p", "rules/test_laws.py"),
    Fault("acceptance certain draft", "rules/base.py", "return p.scatter(1, verified.tokens.gather(1, at[:, None]), 0.0)", "return p", "drafters/test_suffix.py rules"),
    Fault("acceptance bonus", "rules/acceptance.py", "return torch.where(accepted < verified.sent, choice, bonus)", "return choice", "rules generation/test_lossless.py"),
    Fault("acceptance would verify", "rules/acceptance.py", "residual + either.masked_fill(verifies, 0.0)", "residual", "filters rules/test_lossless_registry.py"),
    Fault("acceptance argmax ties", "tensors.py", "best = group * GROUP + inside", "best = group * GROUP + inside * (inside < GROUP - 1)", "test_tensors.py"),
    # Randomness
    Fault("randomness position", "batch/randomness.py", "counter=[0, slot, self.round, self.user]", "counter=[0, 0, self.round, self.user]", "batch/test_randomness.py rules"),
    Fault("randomness round", "batch/randomness.py", "self.round += 1", "pass", "batch/test_randomness.py rules generation/test_many.py"),
    Fault("randomness filters", "batch/randomness.py", "out.user = 1", "out.user = 0", "filters batch/test_randomness.py"),
    # Rollback
    Fault("rollback target", "engine/loop.py", "call.target.rollback(rows.cached_lengths())", "call.target.rollback([n + (len(accepted) > 1) for n in rows.cached_lengths()])", "generation/test_lossless.py"),
    Fault("rollback draft", "drafters/model.py", "self.model.rollback([min(a, b) for a, b in zip(self.model.lengths, valid, strict=True)])", "pass", "generation/test_lossless.py stops"),
    Fault("rollback companion", "engine/loop.py", "companion.rollback([min(pair) for pair in zip(companion.lengths, valid, strict=True)])", "pass", "filters"),
    Fault("rollback replaced token", "round.py", "return [length - (n > slot) for length, n, slot in", "return [length for length, n, slot in", "filters/test_staging.py"),
    Fault("rollback recurrent", "models/recurrence.py", "if tokens < step.counts[b] and step.records:", "if tokens + 1 < step.counts[b] and step.records:", "models/test_row_states.py generation/test_hybrids.py"),
    Fault("rollback exit", "models/early_exit.py", "self._ahead = [0] * len(lengths)", "pass", "models/test_early_exit.py"),
    # Masks and positions
    Fault("masks causal", "models/row_model.py", "seen = key <= query", "seen = key <= query.amax() + 0 * query", "batch/test_masks.py generation/test_lossless.py"),
    Fault("masks window", "models/row_model.py", "seen = seen & (query - key < window)", "seen = seen & (query - key <= window)", "batch/test_masks.py generation"),
    Fault("masks chunk", "models/row_model.py", "seen = seen & (query // chunk == key // chunk)", "pass", "batch/test_masks.py generation/test_lossless.py generation/test_hub_configs.py"),
    Fault("masks hidden order", "generation/prompt_layout.py", "ids = ids.gather(1, order)", "pass", "batch/test_masks.py generation/test_padding_on_the_right.py"),
    Fault("masks hidden window", "generation/model_factory.py", "(rows.max_length > target.facts.reach or", "(", "batch/test_masks.py"),
    Fault("positions packed", "models/row_model.py", "positions = slots[None].clamp(max=self.last)", "positions = slots[None].clamp(max=self.last - 1)", "models generation/test_lossless.py"),
    Fault("positions table", "engine/call.py", "max(min(n, size - k - 1), 0)", "max(min(n, size - k), 0)", "generation/test_wrong_uses.py"),
    # Caches
    Fault("cache slots", "models/row_cache.py", "self.slots = first + torch.arange(width, device=device)", "self.slots = first.amin() + 0 * first + torch.arange(width, device=device)", "generation/test_lossless.py"),
    Fault("cache grow", "models/row_cache.py", "new[:, :, : old.shape[2]] = old", "new[:, :, : old.shape[2] // 2] = old[:, :, : old.shape[2] // 2]", "models/test_cache.py generation/test_lossless.py"),
    Fault("cache prefix path", "models/prefix_cache.py", "next((n for n, (a, b) in enumerate(pairs) if a != b), most)", "most", "generation/test_prefixes.py generation/test_many.py"),
    Fault("cache prefix split", "models/prefix_cache.py", "segment.states = [_cut(states, tokens, None) for states in segment.states]", "pass", "generation/test_prefixes.py"),
    Fault("cache insertion", "models/row_model.py", "self.lengths[slot] = length", "self.lengths[slot] = max(length - 1, 0)", "generation/test_many.py"),
    # Texts and their ends
    Fault("texts end token", "batch/rows.py", "stop = self._ended[row_id] is None and (self._criteria_stop(row, length) or token in self.eos)", "stop = self._ended[row_id] is None and self._criteria_stop(row, length)", "generation/test_lossless.py generation/test_generate.py"),
    Fault("texts budget", "batch/rows.py", "full = length >= self.max_lengths[row]", "full = length > self.max_lengths[row]", "generation/test_lossless.py generation/test_generate.py"),
    Fault("texts past end", "batch/rows.py", "self.cut(self.width + max(n for n in self._ended if n is not None))", "self.cut(self.width + min(n for n in self._ended if n is not None))", "batch/test_criteria.py"),
    Fault("texts end twice", "batch/criteria.py", "if going[row] and over:", "if over:", "batch/test_criteria.py"),
    Fault("texts selected rows", "batch/rows.py", "self.ids, self.row_ids = self.ids[rows], self.row_ids[rows]", "self.ids = self.ids[rows]", "generation rules"),
    Fault("texts detokenized", "text/detokenizer.py", "if end > done and text.startswith(settled):", "if end > done:", "models/test_detokenizer.py"),
    # Processors
    Fault("processors order", "engine/stages.py", "if i == sent[b] or not accepted[b, i] or rows.ends_at(b, length, verified.logits[b]):", "if i == sent[b] or not accepted[b, i]:", "batch/test_stateful_processors.py"),
    Fault("processors forbidden", "engine/stages.py", "if i < sent[b] and not never:", "if i < sent[b]:", "batch/test_callers_processors.py"),
    Fault("processors several texts", "batch/logits_processing.py", "serves_several = any(processor is other for other in self.shared)", "serves_several = False", "batch/test_stateful_processors.py"),
    Fault("processors forbidden draft", "engine/stages.py", "lengths = torch.minimum(draft.lengths, allowed.long().cumprod(dim=1).sum(dim=1))", "lengths = draft.lengths", "drafters/test_suffix.py"),
    # Stops and filters
    Fault("stops svip", "stops/confidence.py", "return (scale * entropy(scores[-1])).sqrt() > self.h", "return (scale * entropy(scores[-1])).sqrt() < self.h", "stops"),
    Fault("stops patience", "drafters/model.py", "if sum(self.going) <= may_wait:", "if sum(self.going) < may_wait:", "methods/sprinter/test_sprinter.py stops drafters"),
    Fault("stops end in draft", "drafters/model.py", "lengths = torch.minimum(1 + (rows.is_end_token(tokens).long().cumsum(dim=1) == 0).sum(dim=1), lengths)", "pass", "stops/test_stops.py drafters stats"),
    Fault("stops half of the rows", "stops/fallback.py", "if 2 * rows <= self.rows or", "if 2 * rows < self.rows or", "stops/test_fallback.py"),
    Fault("stops first round", "stops/joint_goodput.py", "            if self.warm:", "            if True:", "stops/test_joint.py"),
    Fault("filters gain", "filters/sv.py", "gains = np.cumprod(accept, axis=1)", "gains = accept", "filters"),
    Fault("filters tie", "filters/sv.py", 'same = np.searchsorted(level * batch + row, goal, side="right")', 'same = np.searchsorted(level * batch + row, goal, side="left")', "filters"),
    Fault("filters similarity", "filters/sv.py", "return torch.minimum(probs_of(draft), companion[:, : draft.gamma]).sum(dim=-1)", "return torch.minimum(probs_of(draft), companion[:, 1 : draft.gamma + 1]).sum(dim=-1)", "filters methods/sv"),
    # Compiled rounds
    Fault("compiled ends", "engine/compiled_round.py", "active = active & (before + i + 1 < state.limits) & ~torch.isin(token, state.ends)", "active = active & (before + i + 1 < state.limits)", "engine"),
    Fault("compiled state", "engine/compiled_round.py", "state.cached + verdict.accepted + 1, memory", "state.cached + verdict.accepted, memory", "engine/test_compiled.py"),
    Fault("compiled worth", "engine/compiled_round.py", "worth = worth * rules.joint.factors[bins[-1]]", "worth = rules.joint.factors[bins[-1]]", "stops/test_joint.py engine"),
    # Drafters
    Fault("drafters limits", "drafters/base.py", "if not 0 <= length <= min(limit, gamma):", "if not 0 <= length <= gamma:", "drafters/test_own_drafter.py"),
    Fault("drafters window", "drafters/networks/base.py", "(keys >= first[..., None]) | (keys >= begins[..., None])", "keys >= first[..., None]", "drafters/test_windows.py"),
    Fault("drafters validity", "engine/stages.py", "return (((x - x) == 0) | unread).long().cumprod(dim=1).sum(dim=1)", "return torch.ones_like(x).long().cumprod(dim=1).sum(dim=1)", "batch/test_broken_logits.py"),
    # Scheduler and server
    Fault("scheduler end tokens", "generation/scheduler.py", "other.row and other.row.end_tokens != request.row.end_tokens for other in others", "False for other in others", "generation/test_many_memory.py"),
    Fault("scheduler room", "generation/scheduler.py", "return math.inf if self.tokens is None else self.tokens - reserved - sum(request.longest for request in texts)", "return math.inf", "generation"),
    Fault("server stop window", "server/detokenize.py", "max(self._searched - self.stops.reach, 0)", "self._searched", "server/test_stop_texts.py"),
    Fault("server special whole", "server/detokenize.py", "if at in positions and at + size in positions", "if at in positions", "server/test_stop_texts.py"),
    Fault("server offset of marks", "server/detokenize.py", "offsets.append(begin - self._marks)", "offsets.append(begin)", "server/test_stop_texts.py"),
    Fault("server usage", "server/answers.py", "self.choices[::per_prompt]", "self.choices", "server/test_logprobs.py"),
    Fault("server tenants", "server/worker.py", "pool = self._pools.setdefault(request.tenant, SuffixMemory(POOL_TOKENS))", 'pool = self._pools.setdefault("", SuffixMemory(POOL_TOKENS))', "server"),
    Fault("server tenants' prompts", "server/routes.py", 'tenant = hashlib.sha256(http.headers.get("authorization", "").encode()).hexdigest()', 'tenant = ""', "server/test_server.py"),
    Fault("server stop texts", "server/detokenize.py", "end -= self.stops.count_begun(text)", "pass", "server/test_logprobs.py"),
    Fault("server group", "server/worker.py", "tuple(sorted(request.sampling.items()))", "len(request.sampling)", "server/test_server.py"),
    Fault("server queue", "server/worker.py", "if len(self._jobs) + texts > self.most:", "if len(self._jobs) > self.most:", "server/test_server.py"),
    # Files and certificates
    Fault("files atomic", "artifacts/files.py", "temporary = Path(tempfile.mkdtemp(prefix=f\".{path.name}.\", dir=path.parent))", "temporary = path; temporary.mkdir(exist_ok=True)", "artifacts"),
    Fault("files depth", "artifacts/files.py", "except RecursionError:", "except MemoryError:", "artifacts"),
    Fault("files links", "policy/json_form.py", "if path.is_symlink() and (path == subfolder or path.resolve().parent != blobs):", "if False:", "artifacts/test_references.py"),
    Fault("files weights", "artifacts/head.py", "tensor.dtype in DTYPES and tensor.float().isfinite().all()", "tensor.dtype in DTYPES", "artifacts/test_damages.py"),
    Fault("files half characters", "artifacts/files.py", "json.dumps(value, ensure_ascii=False).encode()  # no", "json.dumps(value, ensure_ascii=False)  # no", "artifacts/test_damages.py"),
    Fault("files other run", "training/run_folder.py", "self._refuse_other_run(record)", "pass", "training methods cli evaluation"),
    Fault("certificates share", "evaluation/tuning.py", "share, climbing = delta / len(ladders), True", "share, climbing = delta, True", "evaluation/test_bounds.py"),
    Fault("certificates climb", "evaluation/tuning.py", "climbing = climbing and harm <= max_loss", "climbing = harm <= max_loss", "evaluation"),
    Fault("certificates bound", "stats/intervals.py", 'proportion_ci(1 - delta, method="exact").high', 'proportion_ci(1 - delta, method="wilson").high', "stats evaluation"),
    Fault("interrupts cache", "models/row_model.py", "self.passed.layers[:] = out.layers", "pass", "generation/test_passed_inputs.py"),
    Fault("prefixes weights", "models/prefix_cache.py", "return model, adapters_of(model), weights_version(base_of(model))", "return model, adapters_of(model)", "generation/test_weights_in_between.py"),
    Fault("counts after the end", "stats/speculation.py", "if begins < lengths[row]:", "if True:", "stats generation/test_generate.py"),
    Fault("certificates weights", "artifacts/identity.py", "if weights == weights_hash_once(model):", "if True:", "evaluation artifacts"),
    # Training data
    Fault("data states", "methods/autojudge/fit.py", 'inside = position == "token" and response[t] == token', 'inside = position == "token"', "methods/autojudge/test_states.py"),
    Fault("data rounds", "methods/sv/round_costs.py", "watch.last = None  # a call's first round includes its prompt", "pass", "methods/sv/test_profiling.py"),
)  # fmt: skip


def check(root: Path) -> list[str]:
    """Return a line for each fault whose line does not stand in its file, and for each of its tests that is not there."""
    wrong = []
    for fault in FAULTS:
        path = root / PACKAGE / fault.path
        count = path.read_text(encoding="utf-8").count(fault.line) if path.is_file() else 0
        if count == 0:
            wrong.append(f"{fault.name}: {fault.path} has no line {fault.line!r}: write where it is now")
        gone = [test for test in fault.tests.split() if not (root / "tests" / test.partition("::")[0]).exists()]
        wrong += [f"{fault.name}: there is no tests/{test}" for test in gone]
    return wrong


def plant(fault: Fault, root: Path, folder: Path) -> None:
    """Link the checkout's files into `folder`, and write the file with the fault."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(root / name, folder / name)
    path = folder / PACKAGE / fault.path
    text = path.read_text(encoding="utf-8")
    path.unlink()  # else the fault would stand in the checkout, too
    path.write_text(text.replace(fault.line, fault.wrong, 1), encoding="utf-8")


def run(fault: Fault, root: Path, marks: str) -> dict[str, object]:
    """Run the fault's tests until one fails; return the test, None if none did, and the seconds."""
    (root / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root / "runs", prefix="planted.") as name:
        folder = Path(name)
        plant(fault, root, folder)
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header",
        ]  # fmt: skip
        command += ["--tb=no", "-m", marks, *(f"tests/{test}" for test in fault.tests.split())]
        began = time.monotonic()
        environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            test = lines[0].split(" - ")[0] if lines else None
            if done.returncode not in (0, 1, 2) or (done.returncode != 0 and test is None):
                raise RuntimeError(f"{fault.name}: pytest ended with {done.returncode}: {done.stdout[-500:]}")
        except subprocess.TimeoutExpired:
            test = f"no end within {TIMEOUT} s"
        return {"name": fault.name, "test": test, "seconds": round(time.monotonic() - began)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names; none: all faults")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--marks", default="not full and not nightly", help="pytest's -m: the tests that may find them"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    missing = check(ROOT)
    print(*missing, sep="\n", end="\n" if missing else "", file=sys.stderr)
    if options.check or missing:
        return bool(missing)
    faults = [fault for fault in FAULTS if fault.name.startswith(tuple(options.names) or "")]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = []
        for result in pool.map(lambda fault: run(fault, ROOT, options.marks), faults):
            print(f"{result['name']:28}{result['seconds']:>5} s  {result['test'] or 'UNCAUGHT  <<<'}", flush=True)
            results.append(result)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    caught = sum(result["test"] is not None for result in results)
    print(f"{caught} of {len(results)} faults are caught")
    return int(caught < len(results))


if __name__ == "__main__":
    sys.exit(main())
