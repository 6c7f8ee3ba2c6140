"""gemmake: compiles a checkpoint and a hardware description into one `.gembin` artifact."""

__version__ = "0.1.0"
