"""How much faster the search answers than ``simple_evaluate``, and the share of each measure.

    python benchmarks/search_speed.py --individuals 20 --examples 200
    python benchmarks/search_speed.py --every 4 --examples 96

The first individuals that the default search asks for, or with ``--every`` some of a whole search, are measured by
``lm_eval.simple_evaluate``, by the search's evaluator, and by the same evaluator with one measure switched off at a
time: in turns, on the same machine, model and examples. ``simple_evaluate`` is spared its report on the environment,
and every side a start from cold: each answers one question before the first row. It stops where a single example's
score differs. Rows are written after every individual: first the run's own, with command, machine and versions, then
one an individual.
``python -m benchmarks.experiments.page`` makes the table of ``docs/results.md`` from them.
"""

import argparse
import json
import logging
import math
import os
import platform
import shlex
import sys
import time
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lm_eval.evaluator
import torch

from benchmarks.experiments import store
from benchmarks.experiments.figures import ALL_LAYERS, speed_of
from lpes_eval.errors import UserError, program
from lpes_eval.flags import at_least
from lpes_eval.harness.plugin import own_tasks
from lpes_eval.methods.lpes import LPES
from search.evaluator import Evaluator
from search.identity import packages
from search.optimizers.bands import BandScan
from search.space import Space
from search.tasks import POSITIONS, load_tasks

HARNESS, ALL, OWN_LOOP = "simple_evaluate", "all measures", "lm-eval's own loop"
REBUILT = "requests built for every individual"


@program("search_speed")
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--individuals", type=at_least(1), default=20, help="with different factors")
    add("--every", type=at_least(1), metavar="N", help="run a whole search, and compare every Nth individual")
    add("--examples", type=at_least(1), default=200, help="with --every, a scan's first steps ask a quarter of them")
    add("--switched_off", type=at_least(0), default=sys.maxsize, metavar="N", help="for N individuals, evenly spread")
    add("--batch_size", type=at_least(1), default=16, help="simple_evaluate's, and of fixed batches")
    add("--pretrained", default="reference")
    add("--device", default="cpu")
    add("--task", default="kv_retrieval")
    add("--metadata", type=json.loads, default={}, metavar="JSON", help="as lm_eval's")
    add("--run", default="mine", metavar="NAME", help="its name; an earlier run of it is replaced")
    add("--out", type=Path, default=Path("runs/search_speed.jsonl"), metavar="FILE", help="rows of other runs stay")
    args = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    model = lambda: LPES(pretrained=args.pretrained, batch_size=args.batch_size, device=args.device)  # noqa: E731
    own = args.device == "cpu"  # a model each there, as the outputs of a model's layers serve all engines
    lm = model()
    load = lambda: load_tasks(lm, [args.task], metadata=args.metadata, examples=args.examples)  # noqa: E731
    objectives = load()
    run_all = {"reuse_layers": False}  # the others would find fewer layers' outputs, as they see fewer individuals
    without = {
        **({ALL_LAYERS: run_all} if own else {"steps not recorded": {"record_steps": False}}),
        "no shared prefixes": {"share_prefixes": False, **run_all},
        "batches of a fixed number": {"prompts_per_batch": args.batch_size, **run_all},
        OWN_LOOP: {"fast": False},
    }
    variants = {
        name: Evaluator(model() if own else lm, objectives, **options) for name, options in {ALL: {}, **without}.items()
    }
    evaluator = variants[ALL]
    if evaluator.slow_because is not None:
        raise UserError(f"nothing to compare: lm-eval's own loop answers, because {evaluator.slow_because}")
    metadata = {**args.metadata, "split": "search", "positions": list(POSITIONS)}

    def by_the_harness(factors, limit):
        """Every example's score, by column; None of those that are not asked."""
        lm.set_factors(factors)
        options = {"limit": limit, "task_manager": own_tasks(metadata), "metadata": metadata}
        found = lm_eval.simple_evaluate(model=lm, tasks=[args.task], **options)["samples"]
        scores = {}
        for name, (objective, column) in evaluator.columns.items():
            of = {sample["doc_id"]: sample[column.metric] for sample in found[objective.name]}
            scores[name] = [of.get(number) for number in objective.numbers]
        return scores

    space = Space.free(evaluator.num_layers)
    scan = BandScan(space, start=space.line(1.0, 1.0))
    most = math.ceil(scan.max_evaluations / args.every) if args.every else args.individuals
    apart = max(1, most // max(1, args.switched_off))

    def measured(factors, number, part):
        """A row: seconds and counts by variant, in turns, so that none is always the first."""
        turn = [HARNESS, ALL, *(without if args.switched_off and number % apart == 0 else ())]
        row, scores = {"seconds": {}, "counts": {}}, {}
        for variant in turn[number % len(turn) :] + turn[: number % len(turn)]:
            count = getattr(getattr(variants.get(variant), "engine", None), "count", None)
            before, start = dict(vars(count)) if count else {}, time.perf_counter()
            if variant == HARNESS:
                scores[variant] = by_the_harness(factors, len(part or evaluator.questions))
            else:
                found = variants[variant](factors, part=part)
                scores[variant] = found.examples
            row["seconds"][variant] = time.perf_counter() - start
            row |= {"fitness": found.fitness} if variant == ALL else {}
            if count:
                row["counts"][variant] = {name: value - before[name] for name, value in vars(count).items()}
        if OWN_LOOP in turn:
            start = time.perf_counter()
            Evaluator(lm, load())
            row["seconds"][REBUILT] = row["seconds"][ALL] + time.perf_counter() - start
        for variant, by_column in scores.items():
            if differing := [name for name in evaluator.columns if by_column[name] != scores[HARNESS][name]]:
                raise UserError(f"{variant}, comparison {number + 1}: examples of {differing} score otherwise")
        row["prompts"] = evaluator.asked(part)
        asked = sum(score is not None for by_example in scores[HARNESS].values() for score in by_example)
        row["scores_compared"] = asked * (len(turn) - 1)
        return row

    lm_eval.evaluator.add_env_info = lambda storage: None
    cold = [1.01] * evaluator.num_layers
    by_the_harness(cold, 1)
    for variant in variants.values():
        variant(cold, part=[0])
    head = {
        "run": args.run,
        "command": shlex.join(["python", *sys.argv]),
        "arguments": {name: value for name, value in vars(args).items() if name not in ("run", "out")},
        "machine": store.hardware(torch.get_num_threads(), str(lm.device)),
        "packages": {**packages(), "python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "prompts_an_individual": evaluator.prompts,  # at most
        "prompt_tokens_an_individual": evaluator.prompt_tokens,
    }
    others = [row for row in store.rows(args.out, "run") if row["run"] != args.run]
    known, rows = {}, []
    while len(rows) < most and not scan.done:
        part = evaluator.part(scan.effort) if args.every else None
        fitness = []
        for individual in scan.ask():
            factors = tuple(y for _, y in individual.points)
            if (asked := (factors, len(part or ()))) not in known and len(rows) < most:
                if len(known) % (args.every or 1):
                    known[asked] = evaluator(factors, part=part).fitness
                else:
                    row = {"run": args.run, "factors": factors, "origin": individual.origin}
                    rows.append(row | measured(factors, len(rows), part))
                    known[asked] = rows[-1]["fitness"]
                    head["load_average"] = os.getloadavg()[0]
                    store.write(args.out, [*others, head, *rows])
                    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in rows[-1]["seconds"].items())
                    print(f"{len(rows)}: {individual.origin}, fitness {known[asked]:.3f}; {seconds}", flush=True)
            fitness.append(known.get(asked, -1.0))  # -1: beyond the number asked for
        scan.tell(fitness)
    found = speed_of([head, *rows])
    for name, seconds in found["seconds"].items():
        print(f"{name:36} {seconds:8.2f} s an individual, {found['slower'][name]:.2f} times as long as with it")
    print(f"{found['median']:.1f} times as fast as {HARNESS} (median); every example's score was equal")


if __name__ == "__main__":
    sys.exit(main())
