"""Run at Python's start-up by ``lpes_eval.pth``: extend lm_eval when, and only when, something imports it.

lm-eval looks for no models or tasks outside its own package. This puts a finder in front of Python's import system that
answers for five modules of lm_eval alone, and calls ``lpes_eval.harness.plugin`` after each has run.
``LPES_EVAL_PLUGIN=0`` in the environment turns it off.
"""

import os
import sys

MODULES = (
    "lm_eval.api.registry",
    "lm_eval.tasks.manager",
    "lm_eval.evaluator",
    "lm_eval.api.model",
    "lm_eval._cli.harness",
)


class _Finder:
    """A finder on ``sys.meta_path``."""

    def find_spec(self, name, path=None, target=None):
        if name not in MODULES:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)  # the package's own path, so also that of an editable lm_eval
        if spec and spec.loader:
            _extend_after(spec.loader)
        return spec


def _extend_after(loader):
    exec_module = loader.exec_module

    def exec_and_extend(module):
        exec_module(module)
        try:
            from lpes_eval.harness import plugin

            plugin.extend(module)
        except Exception as error:  # whatever another version of lm_eval has changed, lm_eval itself must still run
            import warnings

            message = f"lpes-eval could not extend {module.__name__}: {type(error).__name__}: {error}"
            warnings.warn(f"{message}. LPES_EVAL_PLUGIN=0 turns all its extensions off.", stacklevel=2)

    loader.exec_module = exec_and_extend


if os.environ.get("LPES_EVAL_PLUGIN") != "0" and not any(type(finder) is _Finder for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
