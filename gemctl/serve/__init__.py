"""Models, their workers, replacement and probation; programs that attach themselves."""
