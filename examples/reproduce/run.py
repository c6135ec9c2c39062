"""Run the papers' headline tables on the demo models, judge each claim by its table's rule, and write docs/results.md.

    python examples/reproduce/run.py                        # all tables; `make reproduce` does the same
    python examples/reproduce/run.py --only svip-figure-5   # one; repeatable
    python examples/reproduce/run.py --long-model M --long-drafter D --long-prompts questions.jsonl  # with the long texts
    python examples/reproduce/run.py --published            # the authors' experiments; with --run they run, by baselines.py

Results are stored in --out: an interrupted run continues, down to the batch. A table that has a result is measured
again only if its file, the versions or the machine changed. Delete --out to start again.
"""

import argparse
import datetime
import hashlib
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from paper_tables import PaperTable, read_tables


ROOT = Path(__file__).resolve().parents[2]
BASELINES = Path(__file__).with_name("baselines.py").resolve()  # `hf-lossy` with the baselines' names


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="a table; repeatable (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "reproduce", help="folder of runs and results")
    parser.add_argument(
        "--page", type=Path, help="the page to write (default: docs/results.md; OUT/results.md of a trial)"
    )
    parser.add_argument("--problems", type=int, help="a trial: at most so many problems in every comparison")
    parser.add_argument(
        "--judge-again", action="store_true", help="judge what is measured by the rules as they are now"
    )
    parser.add_argument("--note", default="", help="what readers should know of the machine, in a sentence")
    parser.add_argument("--judge-url", help="OpenAI-compatible server with a judge model, for wins and ties")
    parser.add_argument("--judge-model", help="name of the judge on that server")
    parser.add_argument("--long-model", help="a model that writes long texts: a path or Hub id")
    parser.add_argument("--long-drafter", help="its drafter, of `hf-lossy fit eagle3`")
    parser.add_argument("--long-prompts", type=Path, help="prompts for it: JSON lines, as chats if it has a template")
    parser.add_argument("--long-tokens", type=int, help="at most so many tokens of a long text (default: the tables')")
    parser.add_argument("--published", action="store_true", help="print what the authors ran, and on what hardware")
    parser.add_argument(
        "--run", action="store_true", help="with --published: run its commands in OUT, one after the other"
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.run and not args.published:
        raise SystemExit("--run is for --published: leave it out")
    tables = read_tables()
    unknown = [name for name in args.only or () if name not in tables]
    if unknown:
        raise SystemExit(f"there is no table {unknown[0]}; there are: {', '.join(tables)}")
    chosen = {name: tables[name] for name in args.only or tables}
    if args.published:
        return published(chosen, args.out if args.run else None)
    try:
        measure_all(tables, chosen, args)
    except KeyboardInterrupt:
        print(f"interrupted; what is done is in {args.out}: the same command goes on", file=sys.stderr)
        return 130
    return 0


def published(chosen: dict[str, PaperTable], out: Path | None) -> int:
    """Print the authors' experiments; with `out` run their commands in it, except those whose --out exists."""
    for table in chosen.values():
        print(f"\n{table.name}: {table.paper}, {table.where}\n{table.claim}\nhardware: {table.published['hardware']}")
        for name, value in table.published["settings"].items():
            print(f"{name}: {value if isinstance(value, str) else '; '.join(value)}")
        for command in table.published["commands"]:
            print(f"    {command}")
            words = shlex.split(command)
            if out is None or ("--out" in words and (out / words[words.index("--out") + 1]).exists()):
                continue
            out.mkdir(parents=True, exist_ok=True)
            done = subprocess.run([sys.executable, str(BASELINES), *words[1:]], cwd=out, check=False)
            if done.returncode:
                return done.returncode
    return 0


def measure_all(tables: dict[str, PaperTable], chosen: dict[str, PaperTable], args: argparse.Namespace) -> None:
    """Measure what has no result yet, and write the page after each table."""
    import torch
    from demo_runs import Place
    from results_page import page

    import hf_lossy_assist as hla
    from hf_lossy_assist.artifacts.conditions import describe_machine
    from hf_lossy_assist.artifacts.files import format_json, write_text
    from hf_lossy_assist.artifacts.identity import versions

    args.out.mkdir(parents=True, exist_ok=True)
    where = {"machine": describe_machine(torch.device("cpu")), "versions": versions()}
    place = Place(hla.demo.load(), args.out, _long_pair(args))
    target_page = args.page or (args.out / "results.md" if args.problems else ROOT / "docs" / "results.md")
    judge = _judge(args)
    for number, table in enumerate(chosen.values(), 1):
        file, key = args.out / f"{table.name}.json", _key(table, args, where)
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if known.get("key") != key or args.judge_again:
            print(f"[{number}/{len(chosen)}] {table.name}: {table.paper}, {table.where}", file=sys.stderr)
            found = where | _result(table, place, judge, args) | {"key": key}
            of_measuring = {"seconds", "date", "note", *where} & known.keys() if args.judge_again else ()
            write_text(file, format_json(found | {name: known[name] for name in of_measuring}))
        results = {
            name: json.loads(path.read_text(encoding="utf-8"))
            for name in tables
            if (path := args.out / f"{name}.json").is_file()
        }
        write_text(target_page, page(tables, results))
    for name in chosen:
        for check in results[name]["checks"]:
            print(
                f"{name}: {check['says']}: {check['shown'] or '–'}: {check['verdict']}{' (' + check['why'] + ')' if check['why'] else ''}"
            )
    print(
        f"{target_page}: {sum(len(result['checks']) for result in results.values())} claims of {len(results)} tables"
    )


def _result(table: PaperTable, place: Any, judge: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return one table's runs and verdicts."""
    from claims import outcome
    from demo_runs import measure

    began = time.monotonic()
    found = {name: measure(_capped(run, args.problems), place) for name, run in table.runs.items()}
    checks = [outcome(check, found[check.run or next(iter(found))], judge).to_dict() for check in table.checks]
    return {
        "checks": checks, "seconds": time.monotonic() - began, "date": datetime.date.today().isoformat(), "note": args.note,
    }  # fmt: skip


def _capped(run: dict[str, Any], most: int | None) -> dict[str, Any]:
    """Return the run, with fewer problems in a trial, and shorter texts."""
    if most is not None and run["kind"] == "long":
        return run | {"texts": min(run["texts"], most), "windows": [16, 32]}
    if most is None or run["kind"] != "compare":
        return run
    return run | {"problems": min(run["problems"], most), "batch_sizes": [1]}


def _judge(args: argparse.Namespace) -> Any:
    """Return the judge of outputs, or None if none is named."""
    from text_quality import Judge

    if (args.judge_url is None) != (args.judge_model is None):
        raise SystemExit("--judge-url and --judge-model belong together")
    return None if args.judge_url is None else Judge(args.judge_url, args.judge_model)


def _long_pair(args: argparse.Namespace) -> Any:
    """Return the model of long texts, or None if none is named."""
    from along_texts import LongPair

    given = [args.long_model, args.long_drafter, args.long_prompts]
    if any(value is None for value in given) and any(value is not None for value in (*given, args.long_tokens)):
        raise SystemExit("--long-model, --long-drafter and --long-prompts belong together")
    return (
        None
        if args.long_model is None
        else LongPair(args.long_model, args.long_drafter, args.long_prompts, args.long_tokens)
    )


def _key(table: PaperTable, args: argparse.Namespace, where: dict[str, Any]) -> str:
    """Return everything that identifies a result."""
    checks = [vars(check) for check in table.checks]
    facts = [table.runs, checks, where, args.problems, args.judge_url, args.judge_model]
    if any(run["kind"] == "long" for run in table.runs.values()):
        facts += [args.long_model, args.long_drafter, args.long_prompts, args.long_tokens]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
