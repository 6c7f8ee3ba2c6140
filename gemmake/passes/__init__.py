"""Passes: pure functions on `Model` and compile state; they open no file, socket or clock."""
