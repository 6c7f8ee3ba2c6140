"""The compiled engine module (gemrun/_build.py); context.py gives its functions types."""

from typing import Any

ffi: Any
lib: Any
