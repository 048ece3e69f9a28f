"""The command line of ``python -m search.ga``: its flags, what they mean together, and what is refused at once.

Nothing here needs a model, so ``--help`` and a refusal come within a second.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lpes_eval import factors as factors_file
from lpes_eval.curves import KINDS
from lpes_eval.errors import FactorsError, UserError
from lpes_eval.flags import amount, at_least, numbers, positive, share, truth, whole
from search.optimizer import X_STEPS, Y_HIGH, Y_LOW, Y_START, Y_STEPS, Space

OPTIMIZERS = ("ga", "cma-es", "random", "gradient")

SETTINGS = ("optimizer", "curve", "control_points", "continuous", "skip", "seed", "epochs")
"""Flags that decide what a search finds, whatever the optimiser."""
SETTINGS_OF = {
    "ga": ("mutations", "crossovers", "start", "population", "parents", "crossover_tries", "max_dx", "max_dy"),
    "cma-es": ("mutations", "crossovers", "start"),
    "random": ("mutations", "crossovers"),
    "gradient": ("learning_rate", "epoch_samples", "gradient_batch", "start"),
}
"""Flags that decide it for one optimiser."""
MEASURED = (
    "examples",
    "search_seed",
    "positions",
    "lambdas",
    "task_weights",
    "metrics",
    "metadata",
    "num_fewshot",
    "fewshot_seed",
    "apply_chat_template",
    "fewshot_as_multiturn",
    "system_instruction",
    "gen_kwargs",
)
"""Flags that decide what a search measures; of the settings, ``fitness`` says what came of them."""

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "quick": {
        "start": "wide",
        "population": 12,
        "parents": 5,
        "epochs": 4,
        "mutations": 6,
        "crossovers": 2,
        "examples": 30,
        "held_out_examples": 60,
    },
}
"""Values that other flags of the same command override: Table 12, or a search of minutes for the reference model."""

EPILOG = """\
examples:
  python -m search.ga --tasks kv_retrieval --preset quick --curve free --start 1
      a first look, in minutes: a small search on the model that is shipped with lpes-eval, one factor a layer
  python -m search.ga --tasks kv_retrieval --model_args pretrained=lmsys/vicuna-7b-v1.5,dtype=float16 --device cuda
      the published search (Table 12) on your own model; add --dry_run to see its size first
  python -m search.ga --tasks mdqa_pos,gsm8k --task_weights 3,1 --metrics "best_subspan_em;exact_match,strict-match"
      any task, group or metric of lm-eval can be (a part of) the fitness
  python -m search.ga --resume runs/kv_retrieval-ga-0
      go on after Ctrl-C, a crash or kill -9; the same command as before does the same

what it writes to the output folder:
  factors.json    the factors found: lm_eval --model lpes --model_args factors=.../factors.json
  summary.md      what was found, and how baseline, PI and these factors do on held-out examples
  report.json     the same as data
  *.png           convergence, the curve over the layers, scores by position
  journal.jsonl   every individual evaluated; state.json, settings.json, arguments.json and held_out.json: to go on from

More in docs/search.md: what a search costs, and how to choose examples and weights.
"""


def build_parser(preset: str = "paper") -> argparse.ArgumentParser:
    """The command line; ``preset`` decides the defaults."""
    parser = _Parser(
        prog="python -m search.ga",
        description="Search one RoPE scaling factor a layer (LPES), with lm-evaluation-harness tasks as the fitness.",
        epilog=EPILOG,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what is measured").add_argument
    add("--tasks", nargs="+", action=_Split, default=["kv_retrieval"], metavar="TASK",
        help="as for lm_eval, space or comma between: tasks, groups, tags, patterns ('mmlu_*'), YAML")  # fmt: skip
    add("--task_weights", type=numbers, metavar="W,W", help="one weight a --tasks name (default: equal)")
    add("--metrics", type=_metrics, metavar="M;M",
        help="one METRIC or METRIC,FILTER a --tasks name, semicolons between (default: each task's first)")  # fmt: skip
    add("--positions", type=numbers, default=[0.0, 50.0, 100.0], metavar="P,P,P",
        help="where the gold item stands, in percent, for tasks that come by position")  # fmt: skip
    add("--lambdas", type=numbers, default=[0.2, 0.3, 0.5], metavar="B,M,E",
        help="weights of these positions: lambda_B, lambda_M, lambda_E (App. G)")  # fmt: skip
    add("--examples", type=at_least(1), default=200, metavar="N", help="search examples used, at most")
    add("--search_seed", type=whole, default=0, metavar="N", help="draws other search examples (Table 8)")
    add("--include_path", metavar="DIR", help="as for lm_eval: a folder with further tasks")
    add("--metadata", nargs="+", action=_Mapping, default={}, metavar="ARGS",
        help="as for lm_eval: settings handed to the tasks, key=value or JSON")  # fmt: skip

    add = parser.add_argument_group("how it is asked (each as for lm_eval)").add_argument
    add("--num_fewshot", type=at_least(0), metavar="N", help="examples before the question")
    add("--fewshot_seed", type=whole, default=1234, metavar="N", help="draws them; the last of lm_eval's --seed")
    add("--apply_chat_template", nargs="?", const=True, default=False, metavar="NAME", help="use the model's template")
    add("--fewshot_as_multiturn", nargs="?", type=truth, const=True, metavar="BOOL",
        help="with a chat template, whether examples are turns of their own (default: true)")  # fmt: skip
    add("--system_instruction", metavar="TEXT", help="put before everything else")
    add("--gen_kwargs", nargs="+", action=_Mapping, default={}, metavar="ARGS",
        help="laid over the tasks' generation settings, key=value or JSON")  # fmt: skip
    add("--confirm_run_unsafe_code", action="store_true", help="allow tasks that run what the model writes")

    add = parser.add_argument_group("the model").add_argument
    add("--model_args", nargs="+", action=_Mapping, default={}, metavar="ARGS",
        help="as for lm_eval: pretrained=NAME,dtype=... (default: the model shipped with lpes-eval)")  # fmt: skip
    add("--device", metavar="DEVICE", help="as for lm_eval: cuda, cuda:1, cpu, mps")
    add("--batch_size", type=_size, default="auto", metavar="N|auto",
        help="as for lm_eval: prompts in a batch; auto goes by tokens, or on a CPU takes 1 where lm-eval's own loop "
        "answers")  # fmt: skip

    add = parser.add_argument_group("the search").add_argument
    quick = ", ".join(f"{name} {value}" for name, value in PRESETS["quick"].items())
    add("--preset", choices=PRESETS, default=preset,
        help=f"defaults for what follows and for --examples: Table 12, or a search of minutes ({quick})")  # fmt: skip
    add("--optimizer", choices=OPTIMIZERS, default="ga", help="the published genetic algorithm, or a control")
    add("--curve", choices=KINDS, default="bezier", help="how control points become factors; free: one factor a layer")
    add("--control_points", type=at_least(2), default=4, metavar="N",
        help="control points of the curve (Table 7: 2 to 5)")  # fmt: skip
    add("--continuous", action="store_true", help="search off the grid of Table 9 (1 in x, 0.1 in y)")
    add("--skip", type=at_least(0), default=0, metavar="N", help="leave the first N layers unscaled (the preprint: 2)")
    add("--start", default="1.5", metavar="Y|wide|FILE",
        help="what the search sets out from: the same Y in every layer (Eq. 8); wide, for a first population of many "
        "curves; or the control points of a factors file, moved to the grid unless --continuous")  # fmt: skip
    add("--population", type=at_least(1), default=32, metavar="N", help="N_ps, size of the initial population")
    add("--parents", type=at_least(1), default=12, metavar="N", help="N_pa, individuals that become parents")
    add("--epochs", type=at_least(0), default=20, metavar="T", help="T, generations after the initial one")
    add("--mutations", type=at_least(0), default=16, metavar="N", help="N_mu, offspring by mutation a generation")
    add("--crossovers", type=at_least(0), default=4, metavar="N", help="N_cr, offspring by crossover a generation")
    add("--crossover_tries", type=at_least(1), default=4, metavar="N", help="N_ct, attempts at a valid crossover")
    add("--max_dx", type=amount, default=2, metavar="X", help="M_x, the most a mutation moves a point's x")
    add("--max_dy", type=amount, default=0.2, metavar="Y", help="M_y, the most it moves a point's y")
    add("--seed", type=whole, default=0, metavar="N", help="of the search's random numbers")

    add = parser.add_argument_group("gradient descent (App. C; one factor a layer, --epochs of it)").add_argument
    add("--learning_rate", type=positive, default=1e-5, metavar="X", help="Adam's")
    add("--epoch_samples", type=at_least(1), default=2000, metavar="N", help="examples an epoch, drawn by the lambdas")
    add("--gradient_batch", type=at_least(1), default=32, metavar="N", help="examples a step")

    add = parser.add_argument_group("giving individuals up early").add_argument
    add("--early_stopping", nargs="?", choices=("bound", "probable"), const="bound", metavar="bound|probable",
        help="give an individual up once it provably cannot become a parent, which finds the same factors; or once it "
        "is improbable, which saves more (default: measure all in full; without a value: bound)")  # fmt: skip
    add("--early_stopping_error", type=share, default=0.01, metavar="P",
        help="of probable: the share that is lost, at most, of individuals that could become parents")  # fmt: skip
    add("--early_stopping_check", type=at_least(0), default=0, metavar="N",
        help="measure N of those given up in full after the search, to see how many were lost")  # fmt: skip

    add = parser.add_argument_group("speed (none of these changes an answer)").add_argument
    add("--tokens_per_batch", type=at_least(1), metavar="N",
        help="with --batch_size auto; halved when memory runs out")  # fmt: skip
    add("--no_drafts", action="store_true", help="decode every answer token by token")
    add("--no_lookup", action="store_true", help="draft from past answers only, not from what an answer repeats")
    add("--no_shared_prefixes", action="store_true", help="prefill every prompt on its own")
    add("--lm_eval_loop", action="store_true", help="let lm-eval's own loop answer")
    add("--no_cache", action="store_true", help="neither look up nor keep what was measured, beyond this search")

    add = parser.add_argument_group("the run").add_argument
    add("--output", type=Path, metavar="DIR", help="folder of the search (default: runs/TASKS-OPTIMIZER-SEED)")
    add("--resume", type=Path, metavar="DIR", help="go on with the search in DIR; no other flag is needed")
    add("--dry_run", action="store_true", help="print the plan and how long it may take, and stop")
    add("--held_out_examples", type=at_least(0), default=500, metavar="N",
        help="held-out examples for the evaluation at the end, at most; 0 leaves it out")  # fmt: skip
    parser.set_defaults(**PRESETS[preset])
    return parser


OF_LM_EVAL = {
    "--config": "give the flags themselves",
    "--model": "a search always runs the lpes model; --model_args says which weights",
    "--limit": "--examples and --held_out_examples say how many are used",
    "--samples": "--examples and --search_seed choose them",
    "--use_cache": "a search keeps and looks up what it measured by itself (--no_cache)",
    "--cache_requests": "a search builds its requests once",
    "--output_path": "--output names the folder",
    "--log_samples": "run the lm_eval command that the search prints at its end",
    "--predict_only": "a search needs scores",
    "--max_batch_size": "--tokens_per_batch is the limit",
    "--trust_remote_code": "if you must, --model_args trust_remote_code=True",
}
"""Flags of lm_eval that a search does not take, and what serves instead."""


class _Parser(argparse.ArgumentParser):
    """Ends in one line, without the usage of fifty flags before it."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and what serves instead of a flag that only lm_eval has."""
        for flag, instead in OF_LM_EVAL.items():
            if re.search(rf"unrecognized arguments:.*{flag}(?![\w])", message):
                raise UserError(f"{flag} is a flag of lm_eval that a search does not take: {instead}")
        raise UserError(f"{message}; `{self.prog} --help` explains the flags")


class _Split(argparse.Action):
    """Names set apart by spaces or commas, as lm_eval takes them: a flag that is given again adds to them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Keep them as one list."""
        before = getattr(namespace, self.dest)
        names = [name.strip() for text in values for name in text.split(",") if name.strip()]
        setattr(namespace, self.dest, names if before is self.default else before + names)


class _Mapping(argparse.Action):
    """``key=value,key=value``, set apart by commas or spaces, or a JSON object, read as lm_eval reads it.

    A flag that is given again adds to them.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Keep it as a dictionary."""
        from lm_eval._cli.utils import key_val_to_dict

        before = getattr(namespace, self.dest)
        found: dict[str, Any] = {} if before is self.default else dict(before)
        for text in values:
            try:
                part = json.loads(text) if text.lstrip().startswith("{") else key_val_to_dict(text)
            except ValueError as error:
                raise argparse.ArgumentError(self, f"{text!r}: expected key=value or a JSON object ({error})") from None
            found |= part
        setattr(namespace, self.dest, found)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Examples as they are written, defaults where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """Add the default, in the form in which it would be typed."""
        unset = action.default is None or action.default is False or action.default in ({}, argparse.SUPPRESS)
        if unset or "default:" in (action.help or ""):
            return action.help
        value = action.default
        if isinstance(value, list):
            value = ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
        return f"{action.help} (default: {value})"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, the preset's values first; ``--resume`` reads it from the search's folder instead."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(argv)
    args = build_parser(args.preset).parse_args(argv)
    given = _given(argv)
    if args.resume is not None:
        if given - {"resume", "preset"}:
            raise UserError(f"--resume takes all settings from {args.resume}; leave the other flags out")
        path = args.resume / "arguments.json"
        try:
            kept = json.loads(path.read_text())
        except FileNotFoundError:
            raise UserError(f"{args.resume}: holds no search to go on with (arguments.json is missing)") from None
        except ValueError:
            kept = None
        if not isinstance(kept, dict):
            raise UserError(f"{path}: damaged; give the search's own command again instead of --resume")
        folder = args.resume
        args = build_parser().parse_args([])
        args.__dict__.update(kept, output=folder)
    if args.optimizer == "gradient":
        args.curve, args.continuous = "free", True
    if args.start == "wide" and args.optimizer != "ga" and "start" not in given:
        args.start = Y_START  # a preset's wide start is for a population
    if isinstance(args.start, str) and args.start != "wide":
        args.start = _start(args)
    if args.output is None:
        # Of a pattern or a path, what can name a folder.
        tasks = re.sub(r"[^\w.+-]+", "_", "+".join(args.tasks)).strip("_")
        args.output = Path("runs") / f"{tasks}-{args.optimizer}-{args.seed}"
    _check_flags(args)
    return args


def _given(argv: Sequence[str]) -> set[str]:
    """The flags that stand on the command line, as attributes of what ``parse`` returns."""
    parser, unset = build_parser(), object()
    parser.set_defaults(**dict.fromkeys(vars(parser.parse_args([])), unset))
    return {name for name, value in vars(parser.parse_args(argv)).items() if value is not unset}


def without_effect(argv: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Flags on the command line that ``args.optimizer``, or the curve, does not look at."""
    of_some = {name for names in SETTINGS_OF.values() for name in names}
    idle = of_some - set(SETTINGS_OF[args.optimizer])
    if args.optimizer == "gradient":
        idle |= {"curve", "continuous"}
    if args.curve == "free":
        idle |= {"control_points", "max_dx"}
    return sorted(f"--{name}" for name in _given(argv) & idle)


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse what cannot be searched with any model.

    Raises:
        UserError: one line that names the flag.
    """
    if "split" in args.metadata:
        raise UserError("--metadata split=...: a search takes its own split, and then the held-out one; leave it out")
    if len(args.lambdas) != len(args.positions):
        raise UserError(
            f"--lambdas: {len(args.lambdas)} weights for {len(args.positions)} --positions "
            f"({', '.join(f'{position:g}' for position in args.positions)}); expected one each"
        )
    if args.output.exists() and not args.output.is_dir():
        raise UserError(f"--output {args.output}: is a file; expected a folder, or a name that is not there yet")
    if args.fewshot_as_multiturn and not args.apply_chat_template:
        raise UserError("--fewshot_as_multiturn: only a chat template has turns; add --apply_chat_template")
    if args.early_stopping_check and not args.early_stopping:
        raise UserError("--early_stopping_check: nothing is given up that could be checked; add --early_stopping")
    if args.early_stopping and args.optimizer in ("cma-es", "gradient"):
        raise UserError(f"--early_stopping: {args.optimizer} needs every individual's fitness; leave it out")
    if args.optimizer == "ga" and args.parents > args.population:
        raise UserError(f"--parents {args.parents}: expected at most as many as --population, {args.population}")
    if args.optimizer == "cma-es" and (as_many := generation_size(args)) < 4:
        raise UserError(
            f"--mutations {args.mutations} --crossovers {args.crossovers}: CMA-ES needs 4 individuals a generation or "
            f"more, and mutations and twice the crossovers are {as_many}"
        )
    if args.optimizer == "gradient" and args.epoch_samples < args.gradient_batch:
        raise UserError(f"--epoch_samples {args.epoch_samples}: less than one --gradient_batch, {args.gradient_batch}")
    if args.start == "wide" and args.optimizer != "ga":
        raise UserError(f"--start wide: {args.optimizer} has no population to begin with; leave it out")
    if args.start != Y_START and args.optimizer == "random":
        raise UserError(f"--start {args.start}: a random search sets out from nowhere; leave it out")
    steps = {"max_dx": X_STEPS, "max_dy": Y_STEPS} if args.optimizer == "ga" and not args.continuous else {}
    for name, steps_in_one in steps.items():
        if not math.isclose(steps_in_one * getattr(args, name), round(steps_in_one * getattr(args, name))):
            raise UserError(
                f"--{name} {getattr(args, name):g}: the grid has steps of {1 / steps_in_one:g} (Table 9); take a "
                "multiple, or leave the grid (--continuous)"
            )
    if isinstance(args.start, float) and not Space.allows(args.start, grid=not args.continuous):
        raise UserError(f"--start {args.start:g}: is not searched; expected {heights(args)}")


def generation_size(args: argparse.Namespace) -> int:
    """Individuals that a generation of the genetic algorithm evaluates, and so one of a control."""
    return int(args.mutations + 2 * args.crossovers)


def heights(args: argparse.Namespace) -> str:
    """The factors that a search may try, as a refusal names them."""
    span = f"{Y_LOW:g} to {Y_HIGH:g}"
    return f"a factor from {span}" if args.continuous else f"tenths from {span} (--continuous leaves the grid)"


def _start(args: argparse.Namespace) -> float | list[Any]:
    """A number for all layers; or, read from a factors file, control points or, for ``free``, one number a layer."""
    try:
        factors = factors_file.parse(args.start)
    except FactorsError as error:
        raise UserError(f"--start: {error}") from None
    if factors.uniform is not None:
        return factors.uniform
    kind, points = factors.curve or ("free", factors.factors or ())
    if kind != args.curve:
        raise UserError(f"--start {args.start}: holds a {kind} curve; add --curve {kind}, or start from another file")
    points = points[args.skip :] if factors.factors else points
    if list(factors.unscaled_layers) != list(range(args.skip)) and not factors.factors:
        raise UserError(
            f"--start {args.start}: leaves layers {list(factors.unscaled_layers)} unscaled, the search the first "
            f"{args.skip}; let --skip fit the file"
        )
    return [list(point) if isinstance(point, tuple) else point for point in points]


def metadata_of(args: argparse.Namespace) -> dict[str, Any]:
    """What lm-eval hands to the tasks: the model's arguments, then ``--metadata``."""
    return {**args.model_args, "search_seed": args.search_seed, **args.metadata}


def task_options(args: argparse.Namespace) -> dict[str, Any]:
    """The part of the command line that says how tasks are measured, on whichever split."""
    from search.parts import Prompting

    return {
        "positions": args.positions,
        "lambdas": args.lambdas,
        "weights": args.task_weights,
        "metrics": args.metrics,
        "prompting": Prompting(
            num_fewshot=args.num_fewshot,
            fewshot_random_seed=args.fewshot_seed,
            apply_chat_template=args.apply_chat_template,
            fewshot_as_multiturn=args.fewshot_as_multiturn is not False,
            system_instruction=args.system_instruction,
            gen_kwargs=args.gen_kwargs,
            confirm_run_unsafe_code=args.confirm_run_unsafe_code,
        ),
        "include_path": args.include_path,
    }


def speed_options(args: argparse.Namespace) -> dict[str, Any]:
    """The part of the command line that changes no answer."""
    return {
        "fast": not args.lm_eval_loop,
        "share_prefixes": not args.no_shared_prefixes,
        "draft": not args.no_drafts,
        "look_up": not (args.no_drafts or args.no_lookup),
        "tokens_per_batch": args.tokens_per_batch,
        "prompts_per_batch": None if args.batch_size == "auto" else args.batch_size,
    }


def model_name(args: argparse.Namespace) -> Any:
    """The model as a factors file names it."""
    from lpes_eval.reference import NAMES

    name = args.model_args.get("pretrained", "reference")
    if name in NAMES:
        return name if "/" in name else f"lpes-eval/{name}"
    revision = args.model_args.get("revision")
    return {"name": name, "revision": revision} if revision else name


def _metrics(text: str) -> list[str]:
    return [name.strip() for name in text.split(";")]


def _size(text: str) -> int | str:
    return text if text == "auto" else at_least(1)(text)
