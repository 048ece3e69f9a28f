"""Run at Python's start-up by ``lpes_eval.start`` (Python 3.15, PEP 829) or ``lpes_eval.pth``: extend lm_eval.

lm-eval looks for no models or tasks outside its own package. ``install`` puts a finder in front of Python's import
system that answers for two modules of lm_eval alone, and calls ``lpes_eval.harness.plugin`` after each has run.
``LPES_EVAL_PLUGIN`` set to 0, false, off, no or nothing turns it off.
"""

import os
import sys

MODULES = ("lm_eval.api.registry", "lm_eval.tasks.manager")
OFF = ("", "0", "false", "off", "no")


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in MODULES:
            return None
        from functools import partial
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)  # also of an editable lm_eval
        if spec and spec.loader:
            spec.loader.exec_module = partial(_exec_and_extend, spec.loader.exec_module)
        return spec


def _exec_and_extend(exec_module, module):
    exec_module(module)
    try:
        from lpes_eval.harness import plugin

        plugin.extend(module)
    except (Exception, SystemExit) as error:  # lm_eval itself must still run
        sys.stderr.write(  # a warning would end lm_eval under -W error
            f"lpes-eval could not extend {module.__name__}: {type(error).__name__}: {error}. lm_eval goes on "
            "without it; LPES_EVAL_PLUGIN=0 turns all extensions off.\n"
        )


def install():
    """Put the finder in place, once."""
    off = os.environ.get("LPES_EVAL_PLUGIN", "1").strip().lower() in OFF
    if not off and not any(type(finder) is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
