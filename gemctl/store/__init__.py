"""What is kept: artifacts by their content, the wanted state, trusted keys."""
