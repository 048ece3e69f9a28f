"""``lpes-eval factors FILE``: check a factors file and show what it says, without a model."""

import argparse
from statistics import fmean

from lpes_eval import factors
from lpes_eval.errors import FactorsError, plain
from lpes_eval.flags import at_least


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand ``factors``."""
    parser = subparsers.add_parser(
        "factors",
        help="check a factors file, and show one factor a layer",
        description="Check a factors file as --model lpes would, and show one factor a layer and where they came from.",
    )
    parser.add_argument("file", metavar="FILE", help="a factors file, or one number")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="the model's depth, if the file has none")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the file's factors and their origin; returns 0."""
    loaded = factors.parse(args.file)
    try:
        values = loaded.per_layer(args.layers)
    except FactorsError as error:
        raise FactorsError(f"{args.file}: {error}") from None
    print(f"{plain(args.file)}: {len(values)} layers, mean factor {fmean(values):.4f}")
    print(f"sha256 {loaded.digest(len(values))}")
    for h, value in enumerate(values):
        print(f"  layer {h:3d}  {value:8.4f}")
    for name, value in loaded.origin.items():
        print(plain(f"  {name}: {value}"))
    return 0
