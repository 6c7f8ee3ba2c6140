"""The `.gembin` format in Python: written and read from csrc/FORMAT.md."""
