"""setuptools, plus what it has no setting for.

- ``_lpes_eval_hook.py`` in ``site-packages``, after an ordinary and an editable install, and what runs it at Python's
  start-up: ``lpes_eval.pth``, and ``lpes_eval.start`` for Python 3.15 and later;
- the folder ``tasks`` inside the installed package (``package_dir`` would slow down every start of Python).
"""

from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the rest of the interface, PEP 517 and 660)
from wheel.wheelfile import WheelFile

ROOT = Path(__file__).resolve().parents[1]
# `site` runs this line at every start; if the hook is gone it must not print a traceback into every program.
PTH = r"import sys; exec('try:\n import _lpes_eval_hook as h\nexcept ImportError:\n pass\nelse: h.install()')" + "\n"
START = "_lpes_eval_hook:install\n"  # PEP 829


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Build the ordinary wheel."""
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    tasks = sorted(path for path in ROOT.glob("tasks/**/*") if path.is_file() and "__pycache__" not in path.parts)
    _add(Path(wheel_directory, name), {f"lpes_eval/{path.relative_to(ROOT).as_posix()}": path for path in tasks})
    return name


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Build the wheel of an editable install."""
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    _add(Path(wheel_directory, name), {})
    return name


def _add(wheel, added):
    """Write the wheel anew, with the hook and ``added``: name in the wheel -> path."""
    with WheelFile(wheel) as old:
        contents = {name: old.read(name) for name in old.namelist() if name != old.record_path}
    contents |= {name: path.read_bytes() for name, path in added.items()}
    contents |= {"lpes_eval.pth": PTH.encode(), "lpes_eval.start": START.encode()}
    contents["_lpes_eval_hook.py"] = ROOT.joinpath("build_backend", "_lpes_eval_hook.py").read_bytes()
    with WheelFile(wheel, "w") as new:  # which writes the record
        for name, content in contents.items():
            new.writestr(name, content)
