"""The compiled engine module (gemrun/_build.py); context.py, handle.py give its functions types."""

from typing import Any

ffi: Any
lib: Any
