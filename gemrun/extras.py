"""Packages that only some uses need: whether they are there, and what is wrong with one that fails.

problem("aiomqtt", "aiomqtt", "mqtt")    None, or "aiomqtt is not installed; install .."
"""

from __future__ import annotations

import importlib


def problem(module: str, package: str, extra: str, install: str = "install") -> str | None:
    """Import a module; why it cannot be used, and what to do. A package that is there and cannot be
    imported is not called missing: its own word for it is told."""
    top = module.partition(".")[0]
    try:
        importlib.import_module(top)
        importlib.import_module(module)
    except Exception as error:  # a broken package may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == top:
            return f"{package} is not installed; {install} gembin-toolchain[{extra}]"
        said = " ".join(str(error).split())[:200]
        what = f"{type(error).__name__}: {said}" if said else type(error).__name__
        return (
            f"{package} is installed, but cannot be imported ({what}); "
            f"pip install --force-reinstall {package}"
        )
    return None
