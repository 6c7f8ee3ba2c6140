"""Packages of extras that are missing, and those that are there and broken: two sentences."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from gemrun import extras

BROKEN = {
    "raise ImportError('libcrypto.so.9: cannot open shared object file')":
        "ImportError: libcrypto.so.9: cannot open shared object file",
    "import a_module_that_nobody_has":
        "ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
    "def broken(": "SyntaxError: ",
    "raise OSError(5, 'Input/output error')": "OSError: [Errno 5] Input/output error",
}  # fmt: skip
# What uses an extra -> the package's folder, its name, and the words before.
USES = {
    "from gemctl.show.metrics import Prometheus; Prometheus()":
        ("prometheus_client", "prometheus-client", "metrics: "),
    "from gemctl import mqtt; mqtt.make_bridge(mqtt.MqttConfig(host='localhost'), None, None)":
        ("aiomqtt", "aiomqtt", "mqtt.host: "),
    "import asyncio; from gemctl import fleet;"
    "asyncio.run(fleet.status(fleet.MqttConfig(host='localhost'), ''))":
        ("aiomqtt", "aiomqtt", "fleet: "),
    "from gemrun.format.sign import SecretKey; SecretKey(bytes(32)).public()":
        ("cryptography", "cryptography", "signature: "),
}  # fmt: skip


def told(folder: Path, work: str) -> str:
    """The sentence of the error that a line ends with, where `folder` comes first on the path."""
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        f"try:\n    exec({work!r})\nexcept Exception as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")


@pytest.mark.parametrize("work", USES, ids=[words[2].split(":")[0] for words in USES.values()])
def test_one_that_is_broken_is_not_called_missing(tmp_path: Path, work: str) -> None:
    module, package, place = USES[work]
    (tmp_path / module).mkdir()
    for source, said in BROKEN.items():
        (tmp_path / module / "__init__.py").write_text(f"{source}\n", encoding="utf-8")
        sentence = told(tmp_path, work)
        assert sentence.startswith(f"{place}{package} is installed, but cannot be imported ({said}")
        assert f"; pip install --force-reinstall {package}" in sentence
        assert "\n" not in sentence
    missing = told(tmp_path, f"import sys; sys.modules[{module!r}] = None; {work}")
    assert missing.startswith(f"{place}{package} is not installed; ")


def test_one_that_is_there() -> None:
    assert extras.problem(asyncio.__name__, "asyncio", "none") is None
