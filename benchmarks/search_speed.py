"""How much faster the search's fitness is than ``simple_evaluate``, and the share of each measure.

    python benchmarks/search_speed.py --individuals 20 --examples 200

A small genetic search is run, and every individual that it asks for is measured by ``lm_eval.simple_evaluate``, by the
search's fitness, and by the same fitness with one measure switched off at a time: in turns, on the same machine, model
and examples. It stops where a single example's score differs. What is known is written after every individual, whole or
not at all, so a run that is cut short loses none.
"""

import argparse
import json
import logging
import os
import platform
import shlex
import sys
import time
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")

import lm_eval
import torch
from lm_eval.tasks import TaskManager

from lpes_eval.curves import layer_factors
from lpes_eval.errors import UserError
from lpes_eval.files import write_atomically
from lpes_eval.flags import at_least, whole
from lpes_eval.harness.plugin import tasks_folder
from lpes_eval.methods.lpes import LPES
from search.fitness import Fitness
from search.identity import packages
from search.optimizer import GeneticAlgorithm, Space
from search.parts import load_parts

HARNESS, ALL, REBUILT = "simple_evaluate", "all measures", "requests built for every individual"


def switched_off(batch_size):
    """One measure at a time: what it is called without it, and the arguments of ``Fitness``."""
    return {
        "no past answers as drafts": {"draft": False},
        "no lookup of what repeats": {"look_up": False},
        "no drafts at all": {"draft": False, "look_up": False},
        "no shared prefixes": {"share_prefixes": False},
        "logits everywhere": {"few_logits": False},
        "batches of a fixed number": {"prompts_per_batch": batch_size},  # --batch_size, as simple_evaluate has it
        "lm-eval's own loop": {"fast": False},
    }


def machine(lm):
    """What the seconds hang on."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    found = {"processor": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": str(lm.device)}
    if lm.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(lm.device)
    return found


def spent_of(records, variant):
    """Seconds by ``variant``, and by all measures on the same individuals."""
    both = [r["seconds"] for r in records if variant in r["seconds"] and not r["repeats"]]
    return sum(s[variant] for s in both), sum(s[ALL] for s in both), len(both)


def summarise(records, variants):
    """The table of a run, as data."""
    rows = {}
    for variant in (HARNESS, ALL, *variants, REBUILT):
        spent, with_all, count = spent_of(records, variant)
        if count:
            counts = [r["counts"][variant] for r in records if variant in r["counts"] and not r["repeats"]]
            rows[variant] = {
                "individuals": count,
                "seconds_an_individual": spent / count,
                "times_all_measures": spent / with_all,
            } | ({name: sum(c[name] for c in counts) for name in counts[0]} if counts else {})
    asked = len(records)
    repeated = sum(r["repeats"] for r in records)
    harness, with_all, _ = spent_of(records, HARNESS)
    ratios = [r["seconds"][HARNESS] / r["seconds"][ALL] for r in records if HARNESS in r["seconds"]]
    return {
        "asked_for": asked,
        "equal_to_an_earlier_one": repeated,
        "times_faster": harness / with_all,
        "times_faster_an_individual": {"least": min(ratios), "most": max(ratios)},
        # an individual that was measured before costs nothing here and as much as any other there
        "times_faster_with_equal_factors_once": harness * asked / (asked - repeated) / with_all,
        "load_average": os.getloadavg()[0],
        "rows": rows,
    }


def show(summary, prompts):
    """Print a summary."""
    print(
        f"\n{summary['asked_for']} individuals asked for, {summary['equal_to_an_earlier_one']} of them equal to an "
        f"earlier one; {prompts} prompts each; every example's score equal"
    )
    print(
        "\n| | individuals | seconds each | of all measures | decode steps | forward passes | prompt tokens computed |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, row in summary["rows"].items():
        cells = [f"{row[key]:,}" if key in row else "-" for key in ("steps", "forwards", "prefilled")]
        if "tokens" in row:
            cells[0] += f" of {row['tokens']:,}"
        cells = [f"{row['seconds_an_individual']:.2f}", f"{row['times_all_measures']:.2f}", *cells]
        print(f"| {name} | {row['individuals']} | {' | '.join(cells)} |")
    least, most = summary["times_faster_an_individual"].values()
    print(
        f"\n{summary['times_faster']:.1f} times faster than simple_evaluate ({least:.1f} to {most:.1f} an individual); "
        f"{summary['times_faster_with_equal_factors_once']:.1f} times where equal factors are measured once"
    )


def json_object(text):
    """A flag's JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, not {text!r}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--individuals", type=at_least(1), default=20, help="with different factors")
    parser.add_argument("--examples", type=at_least(1), default=200)
    parser.add_argument("--switched_off", type=at_least(0), default=None, metavar="N",
        help="switch measures off for the first N individuals only (default: all)")  # fmt: skip
    parser.add_argument("--batch_size", type=at_least(1), default=16, help="simple_evaluate's, and of fixed batches")
    parser.add_argument("--pretrained", default="reference")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--task", default="kv_retrieval")
    parser.add_argument("--metadata", type=json_object, default={}, metavar="JSON", help="as lm_eval's")
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument("--published_start", action="store_true", help="from Eq. 8 instead of a start of wide origin")
    parser.add_argument("--all_tasks", action="store_true", help="let simple_evaluate index all tasks, as by default")
    parser.add_argument(
        "--json", default="benchmarks/results/search_speed.json", help="where to write what is measured"
    )
    args = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    lm = LPES(pretrained=args.pretrained, batch_size=args.batch_size, device=args.device)
    load = lambda: load_parts(lm, [args.task], metadata=args.metadata, examples=args.examples)  # noqa: E731
    parts = load()
    without = switched_off(args.batch_size)
    variants = {name: Fitness(lm, parts, **options) for name, options in {ALL: {}, **without}.items()}
    fitness = variants[ALL]
    if fitness.slow_because is not None:
        raise SystemExit(f"nothing to compare: lm-eval's own loop answers, because {fitness.slow_because}")
    metadata = {**args.metadata, "split": "search"}
    names = [part.name for part in parts]

    def by_the_harness(factors):
        lm.set_factors(factors)
        manager = None
        if not args.all_tasks:
            manager = TaskManager(include_path=str(tasks_folder()), include_defaults=False, metadata=metadata)
        found = lm_eval.simple_evaluate(
            model=lm, tasks=names, limit=args.examples, task_manager=manager, metadata=metadata
        )
        of = {part.name: {s["doc_id"]: s[part.metric] for s in found["samples"][part.name]} for part in parts}
        return {part.name: [of[part.name][number] for number in part.numbers] for part in parts}

    def timed(variant, factors, parent):
        """Every example's score, the seconds, and what it cost in steps."""
        before = dict(vars(variants[variant].count)) if variant != HARNESS and variants[variant].count else None
        start = time.perf_counter()
        found = by_the_harness(factors) if variant == HARNESS else variants[variant](factors, parent).examples
        seconds = time.perf_counter() - start
        count = {k: v - before[k] for k, v in vars(variants[variant].count).items()} if before is not None else None
        return found, seconds, count

    L = fitness.num_layers
    ga = GeneticAlgorithm(
        Space(L, min(3, L - 1)), N_ps=8, N_pa=4, N_mu=4, N_cr=1, T=10_000, wide=not args.published_start, seed=args.seed
    )
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "arguments": vars(args),
        "machine": machine(lm),
        "packages": {**packages(), "python": platform.python_version()},
        "prompts_an_individual": fitness.prompts,
        "prompt_tokens_an_individual": fitness.prompt_tokens,
        "individuals": [],
    }
    records, known = result["individuals"], {}
    while len(known) < args.individuals:
        told = []
        for individual in ga.ask():
            factors = layer_factors("bezier", individual.points, L)
            parent = layer_factors("bezier", individual.parents[0], L) if individual.parents else None
            key = tuple(factors)
            record = {"factors": factors, "origin": individual.origin, "repeats": key in known}
            record |= {"seconds": {}, "counts": {}}
            if key not in known and len(known) < args.individuals:
                number = len(known)
                turn = [HARNESS, ALL]
                if args.switched_off is None or number < args.switched_off:
                    turn += without
                turn = turn[number % len(turn) :] + turn[: number % len(turn)]  # none is always the first
                scores = {}
                for variant in turn:
                    scores[variant], seconds, count = timed(variant, factors, parent)
                    record["seconds"][variant] = seconds
                    if count is not None:
                        record["counts"][variant] = count
                if "lm-eval's own loop" in turn:
                    start = time.perf_counter()
                    Fitness(lm, load())
                    record["seconds"][REBUILT] = record["seconds"][ALL] + time.perf_counter() - start
                for variant in turn:
                    for name in names:
                        pairs = zip(scores[HARNESS][name], scores[variant][name], strict=True)
                        if differing := [n for n, (theirs, ours) in enumerate(pairs) if theirs != ours]:
                            raise SystemExit(
                                f"{variant}, individual {number + 1}, {name}: examples {differing} score otherwise"
                            )
                record["scores_compared"] = sum(map(len, scores[HARNESS].values())) * (len(turn) - 1)
                known[key] = sum(
                    part.weight * part.sign * sum(scores[ALL][part.name]) / len(part.docs) for part in parts
                )
            if key in known:
                record["fitness"] = known[key]
                records.append(record)
                result["summary"] = summarise(records, without)
                write_atomically(args.json, json.dumps(result, indent=1) + "\n")
                seconds = ", ".join(f"{name} {value:.1f} s" for name, value in record["seconds"].items())
                print(
                    f"{len(records)}: {individual.origin}, fitness {known[key]:.3f}; {seconds or 'known'}", flush=True
                )
                told.append(known[key])
            else:
                told.append(-1.0)  # beyond the number asked for
        ga.tell(told)
    show(result["summary"], fitness.prompts)
    print(f"\nWritten to {args.json}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"search_speed: error: {error}", file=sys.stderr)
        sys.exit(2)
