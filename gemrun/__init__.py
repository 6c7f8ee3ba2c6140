"""The device side: the engine's Python class and the artifact format."""
