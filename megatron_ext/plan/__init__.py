"""From a model and a memory budget to flags: cost and memory models, and the search under them."""
