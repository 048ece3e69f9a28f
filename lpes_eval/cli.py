"""The ``lpes-eval`` command: a module's ``add_parser`` sets ``run``, which imports what is heavy."""

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points

import lpes_eval
from lpes_eval.compare.tables import ignore_broken_pipe
from lpes_eval.errors import UserError, program

SUBCOMMANDS = (
    "lpes_eval.show",
    "lpes_eval.compare.command",
    "lpes_eval.compare.regress",
    "lpes_eval.report.page",
    "lpes_eval.report.watch",
    "lpes_eval.attention.command",
    "lpes_eval.push",
    "lpes_eval.harness.plugin",
)
HELP = {"diagnose": "say whether a search is likely to help a model", "search": "search layer factors for a model"}
"""One line for each of the search's commands, which are not imported for it."""


@program("lpes-eval")
def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status: for a user's error, printed as one line, 2 or the error's own."""
    parser = argparse.ArgumentParser(prog="lpes-eval", description="Layer factors and results of lm_eval.")
    parser.add_argument("--version", action="version", version=f"lpes-eval {lpes_eval.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in SUBCOMMANDS:
        import_module(module).add_parser(subparsers)
    argv = sys.argv[1:] if argv is None else argv
    for command in entry_points(group="lpes_eval.commands"):  # it reads its own flags
        subparsers.add_parser(command.name, help=HELP.get(command.name), add_help=False)
        if argv and argv[0] == command.name:
            return int(command.load()(argv[1:]))
    args = parser.parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # it may lack the minus sign
    try:
        with ignore_broken_pipe():
            status = int(args.run(args))
            sys.stdout.flush()
            return status
        return 0  # the reader left before the command was done
    except (UserError, OSError):
        raise
    except KeyboardInterrupt:
        print("\nlpes-eval: stopped", file=sys.stderr)
        return 130
    except Exception:  # 1 is a verdict, and this is none
        traceback.print_exc()
        return 2


if __name__ == "__main__":
    sys.exit(main())
