"""Run at Python's start-up by ``lpes_eval.pth``: extend lm_eval when, and only when, something imports it.

lm-eval looks for no models or tasks outside its own package. This puts a finder in front of Python's import system that
answers for five modules of lm_eval alone: it lets the ordinary finders find them, and calls
``lpes_eval.harness.plugin`` after they have run. ``LPES_EVAL_PLUGIN=0`` in the environment turns it off.
"""

import os
import sys

MODULES = frozenset(
    (
        "lm_eval.api.registry",
        "lm_eval.tasks.manager",
        "lm_eval.evaluator",
        "lm_eval.api.model",
        "lm_eval._cli.harness",
    )
)


class _Finder:
    """A finder on ``sys.meta_path`` that finds nothing itself."""

    def find_spec(self, name, path=None, target=None):
        if name not in MODULES:
            return None
        for finder in sys.meta_path:
            if finder is not self and (find_spec := getattr(finder, "find_spec", None)):
                spec = find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        _extend_after(spec.loader)
                    return spec
        return None


def _extend_after(loader):
    exec_module = loader.exec_module

    def exec_and_extend(module):
        exec_module(module)
        try:
            from lpes_eval.harness import plugin

            plugin.extend(module)
        except Exception as error:  # whatever another version of lm_eval has changed, lm_eval itself must still run
            sys.stderr.write(  # a warning would end lm_eval under -W error
                f"lpes-eval could not extend {module.__name__}: {type(error).__name__}: {error}. lm_eval goes on "
                "without it; LPES_EVAL_PLUGIN=0 turns all extensions off.\n"
            )

    loader.exec_module = exec_and_extend


def install():
    """Put the finder first, once."""
    if os.environ.get("LPES_EVAL_PLUGIN", "1") != "0" and not any(type(f) is _Finder for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


install()
