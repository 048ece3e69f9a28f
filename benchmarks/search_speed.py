"""How much faster the search answers than ``simple_evaluate``, and the share of each measure.

    python benchmarks/search_speed.py --individuals 20 --examples 200

A small genetic search is run, and every individual that it asks for is measured by ``lm_eval.simple_evaluate``, by the
search's evaluator, and by the same evaluator with one measure switched off at a time: in turns, on the same machine,
model and examples. It stops where a single example's score differs. Rows are written after every individual, so a run
that is cut short loses none: first the run's own, with command, machine and versions, then one an individual.
``python -m benchmarks.experiments.page`` makes the table of ``docs/results.md`` from them.
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
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lm_eval
import torch
from lm_eval.tasks import TaskManager

from benchmarks.experiments.figures import speed_of
from benchmarks.experiments.store import hardware
from lpes_eval import files
from lpes_eval.curves import layer_factors
from lpes_eval.errors import UserError
from lpes_eval.files import write_atomically
from lpes_eval.flags import at_least, whole
from lpes_eval.harness.plugin import tasks_folder
from lpes_eval.methods.lpes import LPES
from search.evaluator import Evaluator
from search.identity import packages
from search.optimizers.ga import GeneticAlgorithm, GeneticConfig
from search.space import Space
from search.tasks import POSITIONS, load_tasks

HARNESS, ALL, REBUILT = "simple_evaluate", "all measures", "requests built for every individual"


def switched_off(batch_size):
    """One measure at a time: what it is called without it, and the arguments of ``Evaluator``."""
    return {
        "no shared prefixes": {"share_prefixes": False},
        "batches of a fixed number": {"prompts_per_batch": batch_size},  # --batch_size, as simple_evaluate has it
        "lm-eval's own loop": {"fast": False},
    }


def json_object(text):
    """A flag's JSON object."""
    if not isinstance(found := json.loads(text), dict):
        raise ValueError
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--individuals", type=at_least(1), default=20, help="with different factors")
    add("--examples", type=at_least(1), default=200)
    add("--switched_off", type=at_least(0), metavar="N",
        help="switch measures off for the first N individuals only (default: all)")  # fmt: skip
    add("--batch_size", type=at_least(1), default=16, help="simple_evaluate's, and of fixed batches")
    add("--pretrained", default="reference")
    add("--device", default="cpu")
    add("--task", default="kv_retrieval")
    add("--metadata", type=json_object, default={}, metavar="JSON", help="as lm_eval's")
    add("--seed", type=whole, default=0)
    add("--published_start", action="store_true", help="from Eq. 8 instead of a diverse population")
    add("--all_tasks", action="store_true", help="let simple_evaluate index all tasks, as by default")
    add("--run", default="mine", metavar="NAME", help="what the run is called in the table; docs/results.md shows "
        "speed and exact")  # fmt: skip
    add("--out", type=Path, default=Path("runs/search_speed.jsonl"), metavar="FILE",
        help="the table to write to; rows of other runs stay")  # fmt: skip
    args = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    lm = LPES(pretrained=args.pretrained, batch_size=args.batch_size, device=args.device)
    load = lambda: load_tasks(lm, [args.task], metadata=args.metadata, examples=args.examples)  # noqa: E731
    objectives, without = load(), switched_off(args.batch_size)
    variants = {name: Evaluator(lm, objectives, **options) for name, options in {ALL: {}, **without}.items()}
    evaluator = variants[ALL]
    if evaluator.slow_because is not None:
        raise SystemExit(f"nothing to compare: lm-eval's own loop answers, because {evaluator.slow_because}")
    metadata = {**args.metadata, "split": "search", "positions": list(POSITIONS)}

    def by_the_harness(factors):
        """Every example's score, by column."""
        lm.set_factors(factors)
        manager = None
        if not args.all_tasks:
            manager = TaskManager(include_path=str(tasks_folder()), include_defaults=False, metadata=metadata)
        found = lm_eval.simple_evaluate(
            model=lm, tasks=[args.task], limit=args.examples, task_manager=manager, metadata=metadata
        )
        scores = {}
        for name, (objective, column) in evaluator.columns.items():
            of = {sample["doc_id"]: sample[column.metric] for sample in found["samples"][objective.name]}
            scores[name] = [of[number] for number in objective.numbers]
        return scores

    def timed(variant, factors):
        """Every example's score, the seconds, and what it cost in steps."""
        count = getattr(variants[variant].engine, "count", None) if variant != HARNESS else None
        before = dict(vars(count)) if count else {}
        start = time.perf_counter()
        found = by_the_harness(factors) if variant == HARNESS else variants[variant](factors).examples
        seconds = time.perf_counter() - start
        return found, seconds, {name: value - before[name] for name, value in vars(count).items()} if count else None

    def measured(factors, number):
        """A row: seconds and counts by variant, in turns, so that none is always the first."""
        turn = [HARNESS, ALL, *(without if args.switched_off is None or number < args.switched_off else ())]
        turn = turn[number % len(turn) :] + turn[: number % len(turn)]
        row, scores = {"seconds": {}, "counts": {}}, {}
        for variant in turn:
            scores[variant], row["seconds"][variant], count = timed(variant, factors)
            row["counts"] |= {variant: count} if count is not None else {}
        if "lm-eval's own loop" in turn:
            start = time.perf_counter()
            Evaluator(lm, load())
            row["seconds"][REBUILT] = row["seconds"][ALL] + time.perf_counter() - start
        for variant, column in ((variant, column) for variant in turn for column in evaluator.columns):
            pairs = zip(scores[HARNESS][column], scores[variant][column], strict=True)
            if differing := [n for n, (theirs, ours) in enumerate(pairs) if theirs != ours]:
                raise SystemExit(f"{variant}, individual {number + 1}, {column}: examples {differing} score otherwise")
        row["scores_compared"] = sum(map(len, scores[HARNESS].values())) * (len(turn) - 1)
        row["fitness"] = sum(
            column.weight * objective.sign * sum(scores[ALL][name]) / len(objective.docs)
            for name, (objective, column) in evaluator.columns.items()
        )
        return row

    head = {
        "run": args.run,
        "command": shlex.join(["python", *sys.argv]),
        "arguments": {name: value for name, value in vars(args).items() if name not in ("run", "out")},
        "machine": hardware(torch.get_num_threads(), str(lm.device))
        | ({"gpu": torch.cuda.get_device_name(lm.device)} if lm.device.type == "cuda" else {}),
        "packages": {**packages(), "python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "prompts_an_individual": evaluator.prompts,
        "prompt_tokens_an_individual": evaluator.prompt_tokens,
    }
    others = [row for row in files.read_jsonl(args.out) if row["run"] != args.run] if args.out.exists() else []
    L = evaluator.num_layers
    config = GeneticConfig(population=8, parents=4, mutations=4, crossovers=1, diverse=not args.published_start)
    ga = GeneticAlgorithm(Space(L, min(3, L - 1)), config, generations=10_000, seed=args.seed)
    rows, known = [], {}
    while len(known) < args.individuals:
        fitness = []
        for individual in ga.ask():
            factors = layer_factors("bezier", individual.points, L)
            if (key := tuple(factors)) not in known and len(known) == args.individuals:
                fitness.append(-1.0)  # beyond the number asked for
                continue
            row = {"run": args.run, "factors": factors, "origin": individual.origin, "repeats": key in known}
            if key in known:
                row |= {"seconds": {}, "counts": {}, "fitness": known[key]}
            else:
                row |= measured(factors, len(known))
            known[key] = row["fitness"]
            rows.append(row)
            fitness.append(row["fitness"])
            head["load_average"] = os.getloadavg()[0]
            write_atomically(args.out, "".join(json.dumps(one) + "\n" for one in (*others, head, *rows)))
            seconds = ", ".join(f"{name} {value:.1f} s" for name, value in row["seconds"].items())
            print(f"{len(rows)}: {row['origin']}, fitness {row['fitness']:.3f}; {seconds or 'known'}", flush=True)
        ga.tell(fitness)
    print()
    for name, row in (found := speed_of([head, *rows]))["rows"].items():
        print(
            f"{name:36} {row['seconds']:8.2f} s an individual, {row['times']:.2f} times {ALL}; {row['steps']:,} steps"
        )
    print(f"{found['times']:.1f} times as fast as {HARNESS}; every example's score was equal. Written to {args.out}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"search_speed: error: {error}", file=sys.stderr)
        sys.exit(2)
