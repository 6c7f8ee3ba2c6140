"""gemctl: runs language models on a device: throttling, swaps without loss, figures, MQTT."""
