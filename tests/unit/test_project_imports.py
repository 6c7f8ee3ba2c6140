"""Imports point one way, passes do no I/O, commands hold no logic; read from the syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [name for name in ("gemmake", "gemrun", "gemctl") if (ROOT / name).is_dir()]
MODULES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))

# package or module prefix -> what it must never import
FORBIDDEN = {
    "gemrun": ("gemmake", "gemctl", "torch", "transformers", "safetensors", "gguf"),
    "gemctl": ("gemmake", "torch", "numpy", "gemrun._engine", "gemrun.context", "cffi"),
    "gemrun.format": ("gemmake", "gemctl", "numpy", "cffi", "gemrun._engine", "gemrun.context"),
    "gemmake": ("gemctl", "transformers"),
    "gemmake.load": ("gemmake.hdf", "gemmake.passes", "gemmake.check", "gemrun.context"),
    "gemmake.passes": ("gemmake.load", "gemmake.cli", "gemmake.pipeline"),
}
# Heavy, or not on a device: imported inside the function that needs it, never at the top.
LAZY = {
    "gemmake": ("torch",),
    "gemrun": ("numpy",),
}
NO_IO = ("gemmake.passes", "gemctl.core")
IO_MODULES = (
    *("os", "io", "socket", "ssl", "subprocess", "shutil", "tempfile", "mmap"),
    *("time", "datetime", "random", "secrets", "uuid", "urllib", "http", "asyncio", "locale"),
)
IO_CALLS = {"open", "input", "print", "exec", "eval", "__import__"}
# Methods of Path that reach the disk; a Path may be handed on.
IO_METHODS = {
    *("open", "read_bytes", "read_text", "write_bytes", "write_text", "exists", "stat", "is_file"),
    *("is_dir", "mkdir", "unlink", "rename", "iterdir", "glob", "rglob", "resolve", "touch"),
}
CLI_MAX_STATEMENTS = 15  # of one function in a cli module


def dotted(path: Path) -> str:
    """The module's dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def inside(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def imported(path: Path, top_level_only: bool = False) -> set[str]:
    """Dotted names that a file imports; `from a import b` counts as a and a.b."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(tree.body) if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_point_one_way(path: Path) -> None:
    module = dotted(path)
    for prefix, forbidden in FORBIDDEN.items():
        if not inside(module, prefix):
            continue
        for name in imported(path):
            wrong = [bad for bad in forbidden if inside(name, bad)]
            assert not wrong, f"{module} imports {name}: {prefix} must not use {wrong[0]}"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    module = dotted(path)
    for prefix, lazy in LAZY.items():
        if inside(module, prefix) and not module.endswith("pt_worker"):
            wrong = [n for n in imported(path, top_level_only=True) if n.split(".")[0] in lazy]
            assert not wrong, f"{module} imports {wrong[0]} at the top; import it in the function"


@pytest.mark.parametrize(
    "path", [p for p in MODULES if any(inside(dotted(p), n) for n in NO_IO)], ids=dotted
)
def test_passes_open_no_file_socket_or_clock(path: Path) -> None:
    for name in imported(path):
        assert name.split(".")[0] not in IO_MODULES, f"{dotted(path)} imports {name}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in IO_CALLS, f"{path.name}:{node.lineno}: {node.func.id}()"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in IO_METHODS, (
                f"{path.name}:{node.lineno}: {node.func.attr}()"
            )


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.stem == "cli" or p.stem.startswith("cli_")], ids=dotted
)
def test_command_files_hold_no_logic(path: Path) -> None:
    """They parse, call and render: few statements a function, no loops over data, no arithmetic."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, (ast.While, ast.BinOp)) or _is_text_or_type(node), (
            f"{where}: logic in a command file; move it to a module"
        )
        if isinstance(node, ast.FunctionDef):
            count = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
            assert count <= CLI_MAX_STATEMENTS, f"{where}: {node.name} has {count} statements"


def _is_text_or_type(node: ast.AST) -> bool:
    """A union of types, or text put together."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.Add, ast.Mod))


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_functions_stay_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines < 60, f"{path.name}:{node.lineno}: {node.name} has {lines} lines"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_modules_say_what_they_are(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path}: no docstring"
