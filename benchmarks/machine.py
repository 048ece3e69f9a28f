"""What a measurement names: the machine, and the versions that answers may depend on."""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    packages = ("lpes-eval", "lm-eval", "torch", "transformers")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def hardware(threads: int, device: str = "cpu") -> dict[str, Any]:
    """The processor, how much of it the measurement had, and the GPU if it ran there."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    processor = names[0] if names else platform.processor() or platform.machine()
    machine = {"processor": processor, "cores": os.cpu_count(), "threads": threads, "device": device}
    if device.startswith("cuda"):
        import torch

        machine["gpu"] = torch.cuda.get_device_name(device)
    return machine
