"""The compiled helper module (gemmake/_build.py); quant.py gives its functions types."""

from typing import Any

ffi: Any
lib: Any
