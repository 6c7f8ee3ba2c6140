"""What people and Prometheus see: figures, texts, the status page."""
