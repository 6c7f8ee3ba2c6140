"""Loaders: a checkpoint on disk becomes a frozen `Model`; they know nothing of targets."""
