"""Seconds of answering a chunk of questions, by the length of the prompts and the number of questions.

    python -m benchmarks.chunk_costs --shapes vicuna-7b --device cuda --dtype float16
    python -m benchmarks.chunk_costs --shapes small --records 25 --questions 1 4           on a CPU

With ``--workers`` a search cuts an individual into chunks (docs/cluster.md); this is what they cost a worker.
``benchmarks.workers`` replays these times. A chunk is answered as a worker answers it: the questions of
``kv_retrieval`` at the search's three positions, by the search's own engine. Weights are random, as time does not
depend on what they are, and every answer has ``--new_tokens`` tokens. Each chunk is answered ``--times`` times after
the first, which warms up, and a row keeps all of them.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks.efficiency_measure import SHAPES, build, free
from benchmarks.experiments import store
from lpes_eval import reference
from lpes_eval.flags import at_least
from lpes_eval.methods.lpes import LPES
from search.evaluator import Evaluator
from search.tasks import load_tasks


def measure(shape: str, args: argparse.Namespace) -> list[dict]:
    """A row for each number of records and of questions."""
    model = build(shape, args.device, args.dtype)
    model.generation_config.eos_token_id = None  # random weights may say anything, and no answer is to end early
    tokenizer = AutoTokenizer.from_pretrained(reference.path(), model_max_length=model.config.max_position_embeddings)
    lm = LPES(pretrained=model, tokenizer=tokenizer, factors=1.5, batch_size=1)
    what = {
        "shape": shape,
        "parameters": model.num_parameters(),
        "dtype": args.dtype,
        "new_tokens": args.new_tokens,
        "machine": store.hardware(torch.get_num_threads(), args.device),
        "versions": store.versions(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    rows = []
    for records in args.records:
        gen_kwargs = {"until": [], "max_gen_toks": args.new_tokens}
        options = {"metadata": {"num_keys": records}, "examples": max(args.questions), "gen_kwargs": gen_kwargs}
        evaluator = Evaluator(lm, load_tasks(lm, ["kv_retrieval"], **options))
        engine, asked = evaluator.engine, evaluator.in_order(range(max(args.questions)))
        assert evaluator.prompt_tokens is not None, evaluator.slow_because
        prompt = round(evaluator.prompt_tokens / evaluator.prompts)
        engine.set_factors([1.5] * engine.num_layers)
        for questions in args.questions:
            seconds = []
            for _ in range(1 + args.times):
                start = time.perf_counter()
                list(engine.answer(asked[:questions]))
                seconds.append(round(time.perf_counter() - start, 4))
            row = {"records": records, "prompt_tokens": prompt, "questions": questions, "seconds": seconds[1:]}
            print(shape, row, file=sys.stderr, flush=True)
            rows.append(what | row | {"prompts": sum(map(len, asked[:questions]))})
            if time.monotonic() > args.until:
                return rows
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure shape by shape; a shape's rows replace those of an earlier run on the same machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, numbers = parser.add_argument, {"type": at_least(1), "nargs": "+"}
    add("--shapes", nargs="+", choices=[name for name in SHAPES if name != "reference"], default=["small"])
    add("--records", **numbers, default=[50, 100, 200], help="of a prompt")
    add("--questions", **numbers, default=[1, 2, 4, 8, 25], help="of a chunk")
    add("--new_tokens", type=at_least(1), default=32, help="of an answer; a value of kv_retrieval has about so many")
    add("--times", type=at_least(1), default=3)
    add("--budget", type=float, default=float("inf"), help="seconds after which no further chunk is begun")
    add("--device", default="cpu")
    add("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    add("--output", type=Path, default=Path("runs/chunk_costs.jsonl"), metavar="FILE")
    args = parser.parse_args(argv)
    args.until = time.monotonic() + args.budget
    rows = store.rows(args.output, "shape", "machine")
    for shape in args.shapes:
        made = measure(shape, args)
        rows = [row for row in rows if (row["shape"], row["machine"]) != (shape, made[0]["machine"])] + made
        store.write(args.output, rows)
        free(args.device)


if __name__ == "__main__":
    main()
