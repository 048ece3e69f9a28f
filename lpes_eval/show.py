"""``lpes-eval factors FILE``: check a factors file and show what it says, without a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

from lpes_eval import factors, files
from lpes_eval.compare.results import well_formed
from lpes_eval.errors import FactorsError, plain
from lpes_eval.files import entry
from lpes_eval.flags import at_least


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand ``factors``."""
    parser = subparsers.add_parser(
        "factors",
        help="check a factors file, and show one factor a layer",
        description="Check a factors file as --model lpes would, and show one factor a layer and where they came from.",
    )
    file = "a factors file, the folder of a model that carries some, or one number"
    parser.add_argument("file", metavar="FILE", help=file)
    depth = "the model's depth, where the file does not name it"
    parser.add_argument("--layers", type=at_least(1), metavar="N", help=depth)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the file's factors as bars from 1 to the largest; returns 0."""
    loaded = _carried(arguments.file) if Path(arguments.file).is_dir() else factors.parse(arguments.file)
    try:
        values = loaded.per_layer(arguments.layers)
    except FactorsError as error:
        hint = "" if arguments.layers or loaded.num_layers else " (--layers N)"
        raise FactorsError(f"{arguments.file}: {error}{hint}") from None
    reach = max(max(values) - 1, 1e-9)
    print(f"{plain(str(arguments.file))}: {len(values)} layers, mean factor {loaded.mean(len(values)):.4f}")
    print(f"sha256 {loaded.digest(len(values))}")
    for h, value in enumerate(values):
        print(f"  layer {h:3d}  {value:8.4f}  {'#' * round(40 * max(value - 1, 0) / reach)}".rstrip())
    for name, value in loaded.origin.items():
        print(plain(f"  {name}: {value}"))
    return 0


def _carried(folder: str) -> factors.Factors:
    path = Path(folder, "config.json")
    with well_formed(path, "not a model's configuration", "give a factors file, or the folder of a model"):
        config = dict(entry(files.read_json(path)))
        config |= entry(config, "text_config")
    if (found := factors.carried(SimpleNamespace(**config))) is None:
        raise FactorsError(f"{path}: has no {factors.FIELD}, so the model carries no factors")
    return found
