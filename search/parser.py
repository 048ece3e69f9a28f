"""The flags of ``python -m search.ga``, and how their texts are read."""

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import reduce
from operator import add, or_
from pathlib import Path
from typing import Any, NoReturn

from lpes_eval.curves import KINDS
from lpes_eval.errors import UserError
from lpes_eval.flags import amount, at_least, budget, mapping, numbers, share, truth, whole
from search import optimizers
from search.early_stopping import ERROR

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        **{"optimizer": "ga", "curve": "bezier", "lambdas": [0.2, 0.3, 0.5], "examples": 200},
        **{"held_out_examples": 500, "early_stopping": "off"},
    },
}
"""Values that other flags of the same command override: our own search, and Table 12's."""

EPILOG = """\
examples:
  python -m search.ga --tasks kv_retrieval
      minutes: a search on the model that is shipped with lpes-eval, one factor a layer
  python -m search.ga --tasks kv_retrieval --model_args pretrained=lmsys/vicuna-7b-v1.5,dtype=float16 --device cuda
      the same on your own model; add --dry_run to see its size first
  python -m search.ga --tasks mdqa_pos,gsm8k --task_weights 3,1 --metrics "best_subspan_em;exact_match,strict-match"
      any task, group or metric of lm-eval can be (a part of) the fitness
  python -m search.ga --tasks kv_retrieval --guard gsm8k --budget 2h --preset paper
      the published search (Table 12), for factors that do not make gsm8k worse, after two hours at most
After Ctrl-C, a crash or kill -9 the same command goes on.

It writes factors.json (best_effort.json, where the factors were not shown to help), summary.md, report.json and
pictures. docs/search.md says what a search costs, and how to choose examples.
"""


def _typed(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in values)


def build_parser() -> argparse.ArgumentParser:
    """The command line, with the defaults of no preset."""
    parser = _Parser(
        prog="python -m search.ga",
        description="Search one RoPE scaling factor a layer (LPES), with lm-evaluation-harness tasks as the fitness.",
        epilog=EPILOG,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    arguments: dict[str, Any] = {"nargs": "+", "action": _Collect, "type": mapping, "default": {}, "metavar": "ARGS"}
    # fmt: off
    add = parser.add_argument_group("what is measured").add_argument
    add("--tasks", nargs="+", action=_Collect, type=names, default=["kv_retrieval"], metavar="TASK",
        help="as for lm_eval, space or comma between: tasks, groups, tags, patterns ('mmlu_*'), YAML")
    add("--task_weights", type=numbers, metavar="W,W", help="one weight a --tasks name (default: equal)")
    add("--metrics", type=lambda text: [name.strip() for name in text.split(";")], metavar="M;M",
        help="METRIC or METRIC,FILTER for each --tasks name, semicolons between (default: its own)")
    add("--positions", type=numbers, default=[0.0, 50.0, 100.0], metavar="P,P,P",
        help="where the gold item stands, in percent, for tasks that come by position")
    add("--lambdas", type=numbers, metavar="B,M,E", help="weights of these positions (App. G; default: all the same)")
    add("--examples", type=at_least(1), default=96, metavar="N", help="search examples, at most")
    add("--search_seed", type=whole, default=0, metavar="N", help="draws other search examples (Table 8)")
    add("--include_path", metavar="DIR", help="as for lm_eval: a folder with further tasks")
    add("--metadata", **arguments, help="as for lm_eval: settings handed to the tasks, key=value or JSON")

    add = parser.add_argument_group("how it is asked (each as for lm_eval)").add_argument
    add("--num_fewshot", type=at_least(0), metavar="N", help="examples before the question")
    add("--fewshot_seed", type=whole, default=1234, metavar="N", help="draws these; the fourth of lm_eval's --seed")
    add("--apply_chat_template", nargs="?", const=True, default=False, metavar="NAME", help="use the model's template")
    add("--fewshot_as_multiturn", nargs="?", type=truth, const=True, metavar="BOOL",
        help="with a chat template, whether examples are turns of their own (default: true)")
    add("--system_instruction", metavar="TEXT", help="put before everything else")
    add("--gen_kwargs", **arguments, help="laid over the tasks' generation settings, key=value or JSON")
    add("--confirm_run_unsafe_code", action="store_true", help="allow tasks that run what the model writes")

    add = parser.add_argument_group("the model").add_argument
    add("--model_args", **arguments, help="as for lm_eval: pretrained=NAME,dtype=... (default: the shipped model)")
    add("--device", metavar="DEVICE", help="as for lm_eval: cuda, cuda:1, cpu, mps")
    add("--batch_size", type=batch_size, default="auto", metavar="N|auto",
        help="as for lm_eval; auto goes by tokens, or takes 1 where lm-eval's own loop answers on a CPU")

    add = parser.add_argument_group("the search").add_argument
    paper = ", ".join(f"{flag} {_typed(value)}" for flag, value in PRESETS["paper"].items())
    add("--preset", choices=PRESETS, default="default", help=f"other defaults (paper: {paper})")
    titles = "; ".join(f"{name}: {optimizers.load(name).title}" for name in optimizers.names())
    add("--optimizer", choices=optimizers.names(), default="layers", help=titles)
    add("--curve", choices=KINDS, default="free", help="how control points become factors; free: one factor a layer")
    add("--control_points", type=at_least(2), default=4, metavar="N", help="of the curve (Table 7: 2 to 5)")
    add("--continuous", action="store_true", help="search off the grid of Table 9 (1 in x, 0.1 in y)")
    add("--skip", type=at_least(0), default=0, metavar="N", help="leave the first N layers unscaled (the preprint: 2)")
    add("--start", metavar="Y|FILE",
        help="where to start: the same Y in every layer (default: 1 for layers, 1.5, Eq. 8, for others), "
        "or the control points of a factors file, moved to the grid unless --continuous")
    add("--generations", type=at_least(0), default=20, metavar="T", help="T, generations after the initial one")
    add("--epochs", dest="generations", type=at_least(0), default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--seed", type=whole, default=0, metavar="N", help="of the search's random numbers")
    for name in optimizers.names():
        group = parser.add_argument_group(f"the search, with --optimizer {name}")
        for each in fields(optimizers.load(name).Config):
            group.add_argument(f"--{each.name}", default=each.default, **each.metadata)

    add = parser.add_argument_group("giving individuals up early").add_argument
    add("--early_stopping", choices=("probable", "off"), default="probable",
        help="probable: stop measuring factors once their score is unlikely to reach the cutoff")
    add("--early_stopping_error", type=share, default=ERROR, metavar="P",
        help="how likely it may be, at most, to lose factors that would have been kept")

    add = parser.add_argument_group("speed (none of these changes an answer)").add_argument
    add("--engine", choices=("transformers", "vllm"), default="transformers",
        help="what answers; vLLM gives the same answers except for ties")
    add("--engine_args", **arguments, help="of vllm.LLM: tensor_parallel_size=2, gpu_memory_utilization=0.8, ...")

    add = parser.add_argument_group("several processes (Ray: pip install 'lpes-eval[ray]')").add_argument
    add("--workers", type=at_least(1), metavar="N", help="processes that measure one individual each")
    add("--gpus_per_worker", type=amount, default=0.0, metavar="N",
        help="GPUs of each worker, 0.5 for half of one (default: none, the workers share the cores)")
    add("--ray_address", metavar="ADDRESS", help="a running cluster to join: auto or HOST:PORT (default: a new one)")

    add = parser.add_argument_group("what it may cost").add_argument
    add("--budget", type=budget, metavar="10m|2h|20000prompts",
        help="end the search after so much, held-out evaluation apart; with a larger one it goes on (default: none)")
    add("--guard", nargs=1, action=_Collect, type=_guard, default=[], metavar="TASK[:METRIC[:MAX_DROP]]",
        help="a task of lm-eval that must not become worse by more than MAX_DROP (0.01), beyond chance. Tasks by "
        "position at half their length, and the share of answers that end, are guarded unless --guard none")
    add("--guard_examples", type=at_least(2), default=48, metavar="N", help="search examples of a guard, at most")

    add = parser.add_argument_group("the run").add_argument
    add("--output", type=Path, metavar="DIR", help="folder of the search (default: runs/TASKS-OPTIMIZER-SEED)")
    add("--dry_run", action="store_true", help="print the plan and how long it may take, and stop")
    add("--held_out_examples", type=at_least(0), default=100, metavar="N",
        help="held-out examples for the evaluation at the end, at most; 0 leaves it out")
    # fmt: on
    return parser


LM_EVALS = {
    "--config": "give the flags themselves",
    "--model": "a search always runs the lpes model, and --model_args says which weights",
    "--limit": "--examples and --held_out_examples say how many are used",
    "--samples": "--examples and --search_seed choose them",
    "--use_cache": "the journal of a search keeps what was measured",
    "--cache_requests": "a search builds its requests once",
    "--output_path": "--output names the folder",
    "--log_samples": "run the lm_eval command that the search prints at its end",
    "--predict_only": "a search needs scores",
    "--max_batch_size": "--batch_size N is the limit",
    "--trust_remote_code": "if you must, --model_args trust_remote_code=True",
}
"""Flags of lm_eval that a search does not take, and what does their work."""
GONE = {
    "--resume": "the command that began the search goes on with it, by the journal in its --output folder",
    "--choose": "--lambdas weigh the positions, and tradeoff.png and journal.jsonl have all individuals",
    "--lm_eval_loop": "--model_args fast=False lets lm-eval's own loop answer",
    "--no_cache": "a search remembers what its own journal has, and nothing else",
}
"""Flags of earlier versions, and what does their work."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        for flag, instead in {**LM_EVALS, **GONE}.items():
            if re.search(rf"unrecognized arguments:.*{flag}(?![\w])", message):
                what = "gone:" if flag in GONE else "lm_eval's;"
                raise UserError(f"{flag} is {what} {instead}")
        raise UserError(f"{message}; `{self.prog} --help` explains the flags")


class _Collect(argparse.Action):
    """Adds up the lists or dictionaries that a flag is given; its default is left out."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest, None)
        parts = values if before is None or before is self.default else [before, *values]
        setattr(namespace, self.dest, reduce(or_ if isinstance(parts[0], dict) else add, parts))


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Examples as they are written, defaults as they would be typed."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unset = action.default is None or action.default is False or action.default in ({}, [], argparse.SUPPRESS)
        if unset or "default:" in (action.help or ""):
            return action.help
        return f"{action.help} (default: {_typed(action.default)})"


def words(flags: Mapping[str, Any]) -> list[str]:
    """The command line of values that a program hands over by their flags' names."""
    argv = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        if name == "guard":
            argv += [f"--guard={task}" for task in value]
            continue
        if isinstance(value, dict):
            value = json.dumps(value)
        elif isinstance(value, list | tuple):
            value = (";" if name == "metrics" else ",").join(map(str, value))
        argv.append(f"--{name}" if value is True else f"--{name}={value}")
    return argv


def _guard(text: str) -> list[dict[str, Any]]:
    task, metric, drop = [*text.split(":", 2), "", ""][:3]
    try:
        return [{"task": task, "metric": metric or None, "max_drop": amount(drop) if drop else 0.01}]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def names(text: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def batch_size(text: str) -> int | str:
    """A number, or ``auto``."""
    return text if text == "auto" else at_least(1)(text)
