"""The command line of ``python -m search.ga``: what its flags mean together, and what is refused before any model."""

import argparse
import os
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lpes_eval import factors as factors_file
from lpes_eval.errors import FactorsError, UserError
from search import optimizers
from search.optimizers.base import Optimizer
from search.parser import PRESETS, build_parser
from search.space import Space

SETTINGS = ("optimizer", "curve", "control_points", "continuous", "skip", "seed", "generations", "start")
"""Flags that decide what a search finds, beside its optimiser's own."""
MEASURED = (
    "examples", "search_seed", "positions", "lambdas", "task_weights", "metrics", "metadata", "num_fewshot",
    "fewshot_seed", "apply_chat_template", "fewshot_as_multiturn", "system_instruction", "gen_kwargs", "guard",
    "budget",
)  # fmt: skip
"""Flags that decide what a search measures; of the settings, ``fitness`` says what came of them."""
LOADS_CODE = {"custom_generate", "trust_remote_code"}
"""Arguments of ``generate`` by which it runs code from a folder or the Hub."""
WHOLE = {"autogptq", "delta", "gguf_file", "gptqmodel", "load_in_4bit", "load_in_8bit", "peft", "quantization_config"}
"""Arguments of models that cannot be put together without their weights."""


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Every flag's value: what is given overrides the preset."""
    parser = build_parser()
    parser.set_defaults(**PRESETS[parser.parse_args(argv).preset])
    return parser.parse_args(argv)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line, and refuse what cannot be searched."""
    return complete(read(argv))


def prepare_process() -> None:
    """Silence what would stand between a command's lines, and let a cluster's notice end it as Ctrl-C does."""
    quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "LMEVAL_LOG_LEVEL": "ERROR"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def command(argv: Sequence[str]) -> str:
    """The search's own command, without the token of the Hub."""
    words = [re.sub(r"""(\btoken["']?\s*[=:]\s*["']?)[^,"'}\s]+""", r"\1...", word) for word in argv]
    return shlex.join(["python", "-m", "search.ga", *words])


def complete(args: argparse.Namespace, kind: type[Optimizer] | None = None) -> argparse.Namespace:
    """Fill in what depends on other flags, and refuse in one line what cannot be searched with any model.

    ``kind`` is an optimiser of the caller's instead of the one that ``--optimizer`` names.
    """
    optimizer = kind or optimizers.load(args.optimizer)
    optimizer.settle(args)
    if optimizer.free:
        args.curve = "free"
    if args.early_stopping == "off":
        args.early_stopping = None
    if args.start is None:
        args.start = optimizer.default_start
    if isinstance(args.start, str):
        args.start = _start(args, optimizer)
    if args.output is None:
        # Of a pattern or a path, what can name a folder.
        tasks = re.sub(r"[^\w.+-]+", "_", "+".join(args.tasks)).strip("_")
        seeds = f"{args.seed}-{args.search_seed}" if args.search_seed else f"{args.seed}"
        args.output = Path("runs") / f"{tasks}-{args.optimizer}-{seeds}"
    if "split" in args.metadata:
        raise UserError("--metadata split=...: a search takes its own splits; leave it out")
    if "positions" in args.metadata:
        raise UserError("--metadata positions=...: give them as --positions, with --lambdas")
    if args.lambdas is None:
        args.lambdas = [1.0] * len(args.positions)
    if len(args.lambdas) != len(args.positions):
        numbers = f"{len(args.lambdas)} weights for {len(args.positions)} --positions"
        raise UserError(f"--lambdas: {numbers}; expected one each")
    if sorted({p for p in args.positions if 0 <= p <= 100}) != [*args.positions]:
        positions = ", ".join(f"{position:g}" for position in args.positions)
        raise UserError(f"--positions: found {positions}; expected different percentages from 0 to 100 in rising order")
    if args.output.exists() and not args.output.is_dir():
        raise UserError(f"--output {args.output}: is a file; expected a folder, or a name that is not there yet")
    if args.fewshot_as_multiturn and not args.apply_chat_template:
        raise UserError("--fewshot_as_multiturn: only a chat template has turns; add --apply_chat_template")
    code = [f"--gen_kwargs {name}=..." for name in sorted(LOADS_CODE & args.gen_kwargs.keys())]
    if "/" in str(args.model_args.get("attn_implementation", "")):
        code.append("--model_args attn_implementation=OWNER/REPO")
    if code and not args.model_args.get("trust_remote_code"):
        raise UserError(f"{code[0]}: runs code; if you trust it, add --model_args trust_remote_code=True")
    if args.engine == "vllm" and args.workers:
        raise UserError("--engine vllm: it answers alone; leave --workers out")
    if args.engine == "vllm" and (named := sorted(args.model_args.keys() & {*WHOLE, "subfolder"})):
        raise UserError(f"--engine vllm: it would load the model without --model_args {named[0]}=...; leave one out")
    if args.engine_args and args.engine != "vllm":
        raise UserError("--engine_args: they are vLLM's; add --engine vllm")
    if args.ray_address and not args.workers:
        raise UserError("--ray_address: only workers join a cluster; add --workers N")
    space = Space(2, 1, grid=not args.continuous, low=optimizer.lowest)
    if isinstance(args.start, float) and not space.allows(args.start):
        raise UserError(f"--start {args.start:g}: is not searched; expected {space.heights}")
    return args


def _start(args: argparse.Namespace, optimizer: type[Optimizer]) -> float | list[Any]:
    """A number for all layers; or, read from a factors file, control points or, for ``free``, one number a layer."""
    try:
        factors = factors_file.parse(args.start)
    except FactorsError as error:
        raise UserError(f"--start: {error}") from None
    if factors.uniform is not None:
        return factors.uniform
    kind, points = factors.curve or ("free", (factors.factors or ())[args.skip :])
    if kind != args.curve:
        also = "--optimizer ga " if optimizer.free else ""
        way = f"add {also}--curve {kind}, or start from another file"
        raise UserError(f"--start {args.start}: holds a {kind} curve, and the search has a {args.curve} one; {way}")
    if factors.curve and list(factors.unscaled_layers) != list(range(args.skip)):
        layers = f"layers {list(factors.unscaled_layers)} unscaled, the search the first {args.skip}"
        raise UserError(f"--start {args.start}: leaves {layers}; let --skip fit the file")
    return [list(point) if isinstance(point, tuple) else point for point in points]


def shown(model_args: Mapping[str, Any]) -> dict[str, Any]:
    """The model's arguments for files, tasks and printed commands: without the token of the Hub."""
    return {name: value for name, value in model_args.items() if name != "token"}


def task_options(args: argparse.Namespace) -> dict[str, Any]:
    """The part of the command line that says how tasks are measured, on whichever split."""
    same = ["positions", "lambdas", "metrics", "include_path", "num_fewshot", "apply_chat_template"]
    same += ["system_instruction", "gen_kwargs", "confirm_run_unsafe_code"]
    return {name: getattr(args, name) for name in same} | {
        "metadata": {**shown(args.model_args), "search_seed": args.search_seed, **args.metadata},
        "weights": args.task_weights,
        "fewshot_random_seed": args.fewshot_seed,
        "fewshot_as_multiturn": args.fewshot_as_multiturn is not False,
    }


def model_name(args: argparse.Namespace) -> Any:
    """The model as a factors file names it."""
    from lpes_eval.reference import NAMES

    name = args.model_args.get("pretrained", "reference")
    if name in NAMES:
        return name if "/" in name else f"lpes-eval/{name}"
    revision = args.model_args.get("revision")
    return {"name": name, "revision": revision} if revision else name
