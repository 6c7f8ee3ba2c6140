"""gemcheck: the rules an artifact has to meet."""
