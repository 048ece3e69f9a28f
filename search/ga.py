"""The command: ``python -m search.ga --tasks kv_retrieval`` searches layer factors for a model and writes them down.

In this order: the plan, what there is to beat, the search, the factors file, and an evaluation on examples that the
search has not seen. Everything is kept in one folder, from which a search that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lpes_eval import factors as factors_file
from lpes_eval.curves import KINDS
from lpes_eval.data.draw import shuffled, stream
from lpes_eval.errors import FactorsError, UserError
from lpes_eval.factors import Factors, write_atomically
from search import loop
from search.journal import Journal
from search.optimizer import (
    CMAES,
    X_STEPS,
    Y_HIGH,
    Y_LOW,
    Y_START,
    Y_STEPS,
    GeneticAlgorithm,
    Individual,
    Optimizer,
    Points,
    RandomSearch,
    Space,
)

if TYPE_CHECKING:
    from search.fitness import Fitness, Measured, Part

OPTIMIZERS = ("ga", "cma-es", "random", "gradient")

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
  python -m search.ga --tasks kv_retrieval --preset quick
      a first look, in minutes: a small search on the model that is shipped with lpes-eval
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
    add("--task_weights", type=_numbers, metavar="W,W", help="one weight a --tasks name (default: equal)")
    add("--metrics", type=_metrics, metavar="M;M",
        help="one METRIC or METRIC,FILTER a --tasks name, semicolons between (default: each task's first)")  # fmt: skip
    add("--positions", type=_numbers, default=[0.0, 50.0, 100.0], metavar="P,P,P",
        help="where the gold item stands, in percent, for tasks that come by position")  # fmt: skip
    add("--lambdas", type=_numbers, default=[0.2, 0.3, 0.5], metavar="B,M,E",
        help="weights of these positions: lambda_B, lambda_M, lambda_E (App. G)")  # fmt: skip
    add("--examples", type=_at_least(1), default=200, metavar="N", help="search examples used, at most")
    add("--search_seed", type=_whole, default=0, metavar="N", help="draws other search examples (Table 8)")
    add("--include_path", metavar="DIR", help="as for lm_eval: a folder with further tasks")
    add("--metadata", nargs="+", action=_Mapping, default={}, metavar="ARGS",
        help="as for lm_eval: settings handed to the tasks, key=value or JSON")  # fmt: skip

    add = parser.add_argument_group("how it is asked (each as for lm_eval)").add_argument
    add("--num_fewshot", type=_at_least(0), metavar="N", help="examples before the question")
    add("--fewshot_seed", type=_whole, default=1234, metavar="N", help="draws them; the last of lm_eval's --seed")
    add("--apply_chat_template", nargs="?", const=True, default=False, metavar="NAME", help="use the model's template")
    add("--fewshot_as_multiturn", nargs="?", type=_truth, const=True, metavar="BOOL",
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
        help="as for lm_eval: prompts in a batch; auto goes by tokens")  # fmt: skip

    add = parser.add_argument_group("the search").add_argument
    add("--preset", choices=PRESETS, default=preset, help="defaults for all that follows, and for --examples")
    add("--optimizer", choices=OPTIMIZERS, default="ga", help="the published genetic algorithm, or a control")
    add("--curve", choices=KINDS, default="bezier", help="how control points become factors; free: one factor a layer")
    add("--control_points", type=_at_least(2), default=4, metavar="N",
        help="control points of the curve (Table 7: 2 to 5)")  # fmt: skip
    add("--continuous", action="store_true", help="search off the grid of Table 9 (1 in x, 0.1 in y)")
    add("--skip", type=_at_least(0), default=0, metavar="N", help="leave the first N layers unscaled (the preprint: 2)")
    add("--start", default="1.5", metavar="Y|wide|FILE",
        help="what the search sets out from: the same Y in every layer (Eq. 8); wide, for a first population of many "
        "curves; or the control points of a factors file")  # fmt: skip
    add("--population", type=_at_least(1), default=32, metavar="N", help="N_ps, size of the initial population")
    add("--parents", type=_at_least(1), default=12, metavar="N", help="N_pa, individuals that become parents")
    add("--epochs", type=_at_least(0), default=20, metavar="T", help="T, generations after the initial one")
    add("--mutations", type=_at_least(0), default=16, metavar="N", help="N_mu, offspring by mutation a generation")
    add("--crossovers", type=_at_least(0), default=4, metavar="N", help="N_cr, offspring by crossover a generation")
    add("--crossover_tries", type=_at_least(1), default=4, metavar="N", help="N_ct, attempts at a valid crossover")
    add("--max_dx", type=_amount, default=2, metavar="X", help="M_x, the most a mutation moves a point's x")
    add("--max_dy", type=_amount, default=0.2, metavar="Y", help="M_y, the most it moves a point's y")
    add("--seed", type=_whole, default=0, metavar="N", help="of the search's random numbers")

    add = parser.add_argument_group("gradient descent (App. C; one factor a layer, --epochs of it)").add_argument
    add("--learning_rate", type=_positive, default=1e-5, metavar="X", help="Adam's")
    add("--epoch_samples", type=_at_least(1), default=2000, metavar="N", help="examples an epoch, drawn by the lambdas")
    add("--gradient_batch", type=_at_least(1), default=32, metavar="N", help="examples a step")

    add = parser.add_argument_group("giving individuals up early").add_argument
    add("--early_stopping", nargs="?", choices=("bound", "probable"), const="bound", metavar="bound|probable",
        help="give an individual up once it provably cannot become a parent, which finds the same factors; or once it "
        "is improbable, which saves more (default: measure all in full; without a value: bound)")  # fmt: skip
    add("--early_stopping_error", type=_share, default=0.01, metavar="P",
        help="of probable: the share that is lost, at most, of individuals that could become parents")  # fmt: skip
    add("--early_stopping_check", type=_at_least(0), default=0, metavar="N",
        help="measure N of those given up in full after the search, to see how many were lost")  # fmt: skip

    add = parser.add_argument_group("speed (none of these changes an answer)").add_argument
    add("--tokens_per_batch", type=_at_least(1), metavar="N",
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
    add("--held_out_examples", type=_at_least(0), default=500, metavar="N",
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
    """Names set apart by spaces or commas, as lm_eval takes them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Keep them as one list."""
        setattr(namespace, self.dest, [name.strip() for text in values for name in text.split(",") if name.strip()])


class _Mapping(argparse.Action):
    """``key=value,key=value``, set apart by commas or spaces, or a JSON object, read as lm_eval reads it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Keep it as a dictionary."""
        from lm_eval._cli.utils import key_val_to_dict

        found: dict[str, Any] = {}
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
        if action.default in (None, False, {}, argparse.SUPPRESS) or "default:" in (action.help or ""):
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
        raise UserError(f"--start {args.start:g}: is not searched; expected {_heights(args)}")


def generation_size(args: argparse.Namespace) -> int:
    """Individuals that a generation of the genetic algorithm evaluates, and so one of a control."""
    return int(args.mutations + 2 * args.crossovers)


def _heights(args: argparse.Namespace) -> str:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's bars would tear up the display
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    folder: Path | None = None
    try:
        argv = sys.argv[1:] if argv is None else argv
        args = parse(argv)
        folder = args.output
        if idle := without_effect(argv, args):
            print(f"note: {', '.join(idle)}: no effect with --optimizer {args.optimizer} --curve {args.curve}")
        return run(args)
    except UserError as error:
        print(f"search: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        if folder is not None and (folder / "arguments.json").exists():
            command = shlex.join(["python", "-m", "search.ga", "--resume", str(folder)])
            print(f"What was evaluated is kept; go on with: {command}", file=sys.stderr)
        return 130


@dataclass
class Search:
    """What a run is made of, once the model and the tasks are there.

    Attributes:
        args: the command line.
        lm: the lm-eval model.
        fitness: measures factors on the search examples.
        optimizer: fresh; the journal brings it to where it was.
        settings: what decides the outcome, as plain data.
        held_out: the tasks on examples that the search does not see, for the evaluation at its end; none without one.
        entries: the journal's, once it is open.
        lost: of individuals that were given up, those that were measured in full later: whether that was a mistake.
    """

    args: argparse.Namespace
    lm: Any
    fitness: Fitness
    optimizer: Optimizer
    settings: dict[str, Any]
    held_out: Sequence[Part] = ()
    entries: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    lost: list[bool] = field(default_factory=list)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.fitness.num_layers

    def factors(self, individual: Individual) -> Factors:
        """An individual's factors, in the form that a factors file keeps."""
        points: Any = individual.points
        if self.args.curve == "free":
            points = [y for _, y in points]
        return Factors.from_curve(
            self.args.curve, points, num_layers=self.num_layers, unscaled_layers=range(self.args.skip)
        )

    def uniform(self, factor: float) -> Factors:
        """Position Interpolation on the layers that are searched."""
        options: dict[str, Any] = {"num_layers": self.num_layers}
        if self.args.skip:
            options["unscaled_layers"] = list(range(self.args.skip))
        return Factors.from_uniform(factor, **options)

    def pi(self, factor: float) -> str:
        """What ``uniform(factor)`` is called: it leaves the same layers alone as the search does, and says so."""
        return f"PI {factor:.3f}" + (f" from layer {self.args.skip}" if self.args.skip else "")

    def key(self, individual: Individual) -> str:
        """What individuals with the same factors have in common."""
        return self.factors(individual).digest()

    def evaluate(self, individual: Individual) -> dict[str, Any]:
        """An individual's entry in the journal."""
        parent = self.factors(Individual(individual.parents[0], "")) if individual.parents else None
        floor = self.optimizer.threshold if self.args.early_stopping else None
        rival = None
        if self.by_chance and (least_fit_parent := self.optimizer.rival) is not None:
            rival = self.entries.get(self.key(Individual(least_fit_parent, "")), {}).get("examples")
        error = self.args.early_stopping_error
        factors = self.factors(individual)
        entry = self.entry_of(self.fitness(factors, parent, floor, rival, error), factors)
        entry["seconds"] = round(entry["seconds"] + self.optimizer.asking_seconds, 3)
        return entry | {"floor": floor} if "stopped_after" in entry else entry

    @property
    def by_chance(self) -> bool:
        """Whether individuals are given up that could, improbably, have become parents."""
        return bool(self.args.early_stopping == "probable")

    def check_given_up(self, journal: Journal) -> list[bool]:
        """Measure some of the individuals that were given up in full: which would have reached the least fit parent."""
        given_up = [entry for entry in journal.entries.values() if "stopped_after" in entry]
        drawn = shuffled(given_up, stream("check", self.args.seed))[: self.args.early_stopping_check]
        found = []
        for number, entry in enumerate(drawn, 1):
            factors = self.factors(Individual.from_dict(entry))
            if (key := f"check {entry['key']}") not in journal.entries:
                print(f"  given up, now in full: {number} of {len(drawn)} ...", flush=True)
                measured = self.entry_of(self.fitness(factors), factors)
                journal.record(key, {"generation": None, "origin": "check", **measured})
            found.append(journal.entries[key]["fitness"] >= entry["floor"])
        return found

    def entry_of(self, measured: Measured, factors: Factors) -> dict[str, Any]:
        """What the journal keeps of a measurement; every example's score only where others are held against it.

        Raises:
            UserError: the fitness is not finite, so nothing can be held against it.
        """
        if not math.isfinite(measured.fitness):
            bad = ", ".join(f"{name} ({value})" for name, value in measured.scores.items() if not math.isfinite(value))
            raise UserError(
                f"the fitness of factors {', '.join(f'{s:g}' for s in factors.per_layer(self.num_layers))} is "
                f"{measured.fitness}, by {bad or 'its weights'}; take a metric that is always finite (--metrics) or, "
                "if the model overflows, a wider dtype (--model_args dtype=float32)"
            )
        entry: dict[str, Any] = {
            "fitness": measured.fitness,
            "scores": measured.scores,
            "seconds": round(measured.seconds, 3),
        }
        if measured.stopped_after:
            entry["stopped_after"] = measured.stopped_after
        elif self.by_chance:
            entry["examples"] = measured.examples
        return entry

    def measure(self, name: str, factors: Factors, journal: Journal) -> dict[str, Any]:
        """Measure factors that are no individual, unless the journal knows them."""
        if (key := factors.digest()) not in journal.entries:
            journal.record(key, {"generation": None, "origin": name, **self.entry_of(self.fitness(factors), factors)})
        return journal.entries[key]


def load(args: argparse.Namespace) -> Search:
    """Load the model and the tasks, and put the search together."""
    from search.fitness import Fitness, FitnessCache, load_parts, packages

    lm = load_model(args)
    parts = load_parts(lm, args.tasks, metadata=metadata_of(args), examples=args.examples, **task_options(args))
    held_out = load_held_out(args, lm)
    cache = None if args.no_cache else FitnessCache(cache_folder())
    fitness = Fitness(lm, parts, cache=cache, **speed_options(args))
    if args.early_stopping and (reason := fitness.why_unbounded()) is not None:
        raise UserError(f"--early_stopping: {reason}; leave it out")
    optimizer = make_optimizer(args, fitness)
    names = [*SETTINGS, *SETTINGS_OF[args.optimizer]]
    if args.early_stopping == "probable":  # proof changes nothing about the outcome, so it is no setting
        names += ["early_stopping", "early_stopping_error"]
    settings = {
        "search": {name: getattr(args, name) for name in names},
        "fitness": fitness.describe(),
        "packages": packages(),
    }
    return Search(args, lm, fitness, optimizer, settings, held_out)


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


def load_held_out(args: argparse.Namespace, lm: Any) -> list[Part]:
    """The tasks on held-out examples, at every position that they have: before the search, as they may be refused."""
    from search.fitness import load_parts

    if not args.held_out_examples:
        return []
    options = {**task_options(args), "positions": None}
    try:
        return load_parts(
            lm,
            args.tasks,
            split="held_out",
            metadata=metadata_of(args),
            examples=args.held_out_examples,
            **options,
        )
    except UserError as error:
        raise UserError(f"held-out examples: {error}; or leave these out (--held_out_examples 0)") from None


def load_model(args: argparse.Namespace) -> Any:
    """The ``lpes`` model, as lm-eval would make it."""
    from lpes_eval.models.lpes import LPES

    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(
            f"a search is one process, and this is one of {processes}; start it with python -m search.ga. One model on "
            "several GPUs: --model_args parallelize=True; several searches at once: another --seed on each GPU"
        )
    if "factors" in args.model_args:
        raise UserError("--model_args factors=...: a search makes its own factors; leave them out")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return LPES.create_from_arg_obj(args.model_args, {"batch_size": args.batch_size, "device": args.device})


def make_optimizer(args: argparse.Namespace, fitness: Fitness) -> Optimizer:
    """The optimiser that was asked for, over the layers that are searched."""
    num_layers = fitness.num_layers
    if not 0 <= args.skip < num_layers - 1:
        raise UserError(f"--skip {args.skip}: the model has {num_layers} layers, and at least 2 must be left to scale")
    L, grid = num_layers - args.skip, not args.continuous
    space = Space.free(L, grid) if args.curve == "free" else Space(L, args.control_points - 1, grid)
    start = start_points(args, space)
    if args.optimizer == "gradient":
        from search.gradient import AnswerLoss, GradientDescent

        return GradientDescent(
            space,
            AnswerLoss(fitness.lm, fitness.parts),
            unscaled=args.skip,
            T=args.epochs,
            samples=args.epoch_samples,
            batch=args.gradient_batch,
            learning_rate=args.learning_rate,
            start=start,
            seed=args.seed,
        )
    if args.optimizer == "random":
        return RandomSearch(space, N=generation_size(args), T=args.epochs, seed=args.seed)
    if args.optimizer == "cma-es":
        return CMAES(space, N=generation_size(args), T=args.epochs, start=start, seed=args.seed)
    return GeneticAlgorithm(
        space,
        N_ps=args.population,
        N_pa=args.parents,
        T=args.epochs,
        N_mu=args.mutations,
        N_cr=args.crossovers,
        N_ct=args.crossover_tries,
        M_x=args.max_dx,
        M_y=args.max_dy,
        start=start,
        wide=args.start == "wide",
        seed=args.seed,
    )


def start_points(args: argparse.Namespace, space: Space) -> Points:
    """The control points that ``--start`` stands for."""
    if args.start == "wide":
        return space.start()
    points = args.start
    if isinstance(points, float):
        points = [points] * (space.d + 1)
    if not any(isinstance(point, list) for point in points):
        points = list(zip([x for x, _ in space.start()], points, strict=False))
    points = tuple((float(x), float(y)) for x, y in points)
    if not space.contains(points):
        xs = f"{'whole ' if space.grid else ''}x from 0 to {space.L - 1}"
        raise UserError(
            f"--start: {[list(point) for point in points]} is not searched; expected {space.d + 1} control points with "
            f"{xs}, and for y {_heights(args)}"
        )
    return points


def metadata_of(args: argparse.Namespace) -> dict[str, Any]:
    """What lm-eval hands to the tasks: the model's arguments, then ``--metadata``."""
    return {**args.model_args, "search_seed": args.search_seed, **args.metadata}


def task_options(args: argparse.Namespace) -> dict[str, Any]:
    """The part of the command line that says how tasks are measured, on whichever split."""
    from search.fitness import Prompting

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


def cache_folder() -> Path:
    """Where measurements are kept across searches: ``$XDG_CACHE_HOME/lpes-eval/fitness``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lpes-eval" / "fitness"


def run(args: argparse.Namespace) -> int:
    """Plan, search, write, evaluate."""
    from search import report

    search = load(args)
    print(report.plan(search), flush=True)
    if args.dry_run:
        print(report.duration(search), flush=True)
        return 0
    with Journal(args.output, search.settings) as journal:
        search.entries = journal.entries
        kept = {name: value for name, value in vars(args).items() if name not in ("output", "resume", "dry_run")}
        write_atomically(args.output / "arguments.json", json.dumps(kept, indent=2) + "\n")
        loop.restore(search.optimizer, journal, search.key)
        for note in journal.notes:
            print(f"note: {note}", flush=True)
        to_beat = {
            "baseline": search.measure("baseline", search.uniform(1.0), journal),
            "PI": search.measure("PI", search.uniform(Y_START), journal),
        }
        print(report.to_beat(search, to_beat, journal), flush=True)
        with report.progress(search, journal, to_beat) as watch:
            fittest, best = loop.run(search.optimizer, search.evaluate, journal, search.key, watch)
        found = search.factors(fittest)
        write_factors(search, found, best)
        print(f"\nFactors found: {args.output / 'factors.json'}", flush=True)
        search.lost = search.check_given_up(journal) if args.early_stopping_check else []
        held_out = None
        report.write(search, journal, to_beat, best, found, held_out)  # the search's, whatever becomes of the rest
        if search.held_out:
            held_out = evaluate_held_out(search, found)
            report.write(search, journal, to_beat, best, found, held_out)
        print(report.summary(search, journal, to_beat, best, found, held_out), flush=True)
    return 0


def write_factors(search: Search, found: Factors, best: dict[str, Any]) -> None:
    """The factors file, with what the search can be repeated from. The same search always writes the same bytes."""
    args = search.args
    settings = dict(search.settings["search"])
    if args.curve == "free":
        del settings["control_points"]  # there is one on every layer, whatever the flag says
    settings |= {name: value for name in MEASURED if (value := getattr(args, name)) not in (None, False, {})}
    factors = Factors.from_curve(
        found.curve[0],  # type: ignore[index]
        found.curve[1],  # type: ignore[index]
        num_layers=search.num_layers,
        unscaled_layers=range(args.skip),
        origin={
            "model": model_name(args),
            "task": ",".join(args.tasks),
            "fitness": {"value": best["fitness"], "scores": best["scores"]},
            "search": settings | {"requests_sha256": search.settings["fitness"]["requests_sha256"]},
            "seed": args.seed,
            "packages": search.settings["packages"],
        },
    )
    factors.save(args.output / "factors.json")


def model_name(args: argparse.Namespace) -> Any:
    """The model as a factors file names it."""
    from lpes_eval.reference import NAMES

    name = args.model_args.get("pretrained", "reference")
    if name in NAMES:
        return name if "/" in name else f"lpes-eval/{name}"
    revision = args.model_args.get("revision")
    return {"name": name, "revision": revision} if revision else name


@dataclass
class HeldOut:
    """Scores on examples that the search has not seen.

    Attributes:
        parts: the tasks, at every position that they have.
        factors: what was measured: name -> factors.
        measured: the same names -> scores.
        comparisons: the found factors against each other name, paired by question, one for each task that comes by
            position or stands alone: (task, name) -> ``PairedComparison``.
    """

    parts: list[Any]
    factors: dict[str, Factors]
    measured: dict[str, Measured]
    comparisons: dict[tuple[str, str], Any]


FOUND = "found factors"


def evaluate_held_out(search: Search, found: Factors) -> HeldOut:
    """Measure baseline, PI at the mean of the found factors (section 4.1), and the found factors."""
    from lpes_eval.scoring import statistics
    from search import report
    from search.fitness import Fitness

    args, parts = search.args, list(search.held_out)
    fitness = Fitness(search.lm, parts, cache=search.fitness.cache, **speed_options(args))
    scaled = found.per_layer()[args.skip :]
    mean = sum(scaled) / len(scaled)
    factors = {
        "baseline": search.uniform(1.0),
        search.pi(mean): search.uniform(mean),
        FOUND: found,
    }
    kept = _Kept(args.output / "held_out.json", fitness.describe())
    measured: dict[str, Measured] = {}
    for name, values in factors.items():
        if (known := kept.get(values)) is not None:
            measured[name] = known
            continue
        print(f"  held-out examples: {name}, {fitness.prompts} prompts ...", flush=True)
        start = time.perf_counter()
        measured[name] = fitness(values, factors["baseline"])
        kept.put(values, measured[name])
        print(f"    {report.seconds(time.perf_counter() - start)}", flush=True)
    comparisons = {}
    for task, members in groups(parts).items():
        rows = {name: _matrix(members, found_scores.examples) for name, found_scores in measured.items()}
        if any(matrix is None for matrix in rows.values()):
            continue  # a corpus metric has no score of a single example to pair
        for name in factors:
            if name != FOUND:
                comparisons[task, name] = statistics.compare_paired(
                    rows[name], rows[FOUND], higher_is_better=members[0].sign > 0
                )
    if not all(own_split(part) for part in parts):
        numbers = {part.name: part.numbers for part in parts}
        write_atomically(args.output / HELD_OUT_NUMBERS, json.dumps(numbers) + "\n")
    return HeldOut(parts, factors, measured, comparisons)


class _Kept:
    """The held-out measurements of a search's folder: going on with a finished search measures none again.

    Args:
        path: a JSON file; one that cannot be read counts as not there.
        told: what is measured; measurements of anything else are dropped.
    """

    def __init__(self, path: Path, told: dict[str, Any]) -> None:
        self._path = path
        self._data: dict[str, Any] = {"told": json.loads(json.dumps(told)), "measured": {}}
        try:
            found = json.loads(path.read_bytes())
            if found["told"] == self._data["told"] and isinstance(found["measured"], dict):
                self._data = found
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def get(self, factors: Factors) -> Measured | None:
        from search.fitness import Measured

        found = self._data["measured"].get(factors.digest())
        return found and Measured(**found)

    def put(self, factors: Factors, measured: Measured) -> None:
        entry = {name: getattr(measured, name) for name in ("fitness", "scores", "examples", "seconds")}
        self._data["measured"][factors.digest()] = entry
        write_atomically(self._path, json.dumps(self._data, default=lambda number: number.item()) + "\n")  # numpy


HELD_OUT_NUMBERS = "held_out_samples.json"


def own_split(part: Any) -> bool:
    """Whether the task itself hands out the held-out examples; any other task's were picked by number."""
    return not part.divided


def groups(parts: Sequence[Any]) -> dict[str, list[Any]]:
    """Parts that are one task at several positions, under the name they share; any other part by itself."""
    found: dict[str, list[Any]] = {}
    for part in parts:
        found.setdefault(part.stem, []).append(part)
    return found


def _matrix(parts: Sequence[Any], examples: dict[str, list[Any]]) -> Any:
    """Scores of shape (questions, positions), a question's examples averaged; None where not all have finite ones."""
    from lpes_eval.scoring import statistics

    if not all(_is_finite(value) for part in parts for value in examples[part.name]):
        return None
    scores: dict[str, dict[Any, float]] = {}
    for part in parts:
        of_question: dict[Any, list[float]] = {}
        for question, value in zip(part.questions, examples[part.name], strict=True):
            of_question.setdefault(question, []).append(float(value))
        scores[part.name] = {question: sum(values) / len(values) for question, values in of_question.items()}
    return statistics.question_matrix(scores)[2]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def reproduce_command(args: argparse.Namespace, parts: Sequence[Any]) -> str:
    """The lm_eval command that gives the factors file's scores on the held-out examples of ``parts``."""
    model_args = {**args.model_args, "factors": str(args.output / "factors.json")}
    command = ["lm_eval", "--model", "lpes", "--model_args", _as_lm_eval_reads_it(model_args)]
    # A pattern stands here for tasks alone, to lm_eval also for their groups, which it then refuses.
    fitting = {name: fnmatch.filter([part.name for part in parts], name) for name in args.tasks}
    command += ["--tasks", ",".join(task for name in args.tasks for task in fitting[name] or [name])]
    for flag in ("device", "num_fewshot", "include_path", "system_instruction"):
        if (value := getattr(args, flag)) is not None:
            command += [f"--{flag}", str(value)]
    if args.batch_size != "auto":
        command += ["--batch_size", str(args.batch_size)]
    if args.apply_chat_template:
        command += [
            "--apply_chat_template",
            *([args.apply_chat_template] if args.apply_chat_template is not True else []),
        ]
    if args.fewshot_as_multiturn is False:
        command += ["--fewshot_as_multiturn", "false"]
    if args.fewshot_seed != 1234:
        command += ["--seed", f"0,1234,1234,{args.fewshot_seed}"]
    if args.confirm_run_unsafe_code:
        command += ["--confirm_run_unsafe_code"]
    for flag in ("metadata", "gen_kwargs"):
        if value := getattr(args, flag):
            command += [f"--{flag}", json.dumps(value)]
    if not all(own_split(part) for part in parts):
        command += ["--samples", str(args.output / HELD_OUT_NUMBERS)]
    elif args.held_out_examples < 500:
        command += ["--limit", str(args.held_out_examples)]
    return shlex.join(command)


def _as_lm_eval_reads_it(arguments: dict[str, Any]) -> str:
    """``key=value,key=value``, or JSON where that would be read as something else."""
    from lm_eval._cli.utils import key_val_to_dict

    text = ",".join(f"{key}={value}" for key, value in arguments.items())
    try:
        return text if "{" not in text and key_val_to_dict(text) == arguments else json.dumps(arguments)
    except ValueError:
        return json.dumps(arguments)


def _metrics(text: str) -> list[str]:
    return [name.strip() for name in text.split(";")]


def _numbers(text: str) -> list[float]:
    try:
        return [_finite(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, not {text!r}") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, not {text!r}") from None


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if (value := _whole(text)) < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, not {value}")
        return value

    return read


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, not {text!r}")
    return value


def _amount(text: str) -> float:
    if (value := _finite(text)) < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, not {value:g}")
    return value


def _positive(text: str) -> float:
    if (value := _finite(text)) <= 0:
        raise argparse.ArgumentTypeError(f"expected more than 0, not {value:g}")
    return value


def _share(text: str) -> float:
    if not 0 < (value := _finite(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, not {value:g}")
    return value


def _size(text: str) -> int | str:
    return text if text == "auto" else _at_least(1)(text)


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "1", "yes", "false", "0", "no"):
        raise argparse.ArgumentTypeError(f"expected true or false, not {text!r}")
    return text.lower() in ("true", "1", "yes")


if __name__ == "__main__":
    sys.exit(main())
