"""Training steps of frameworks on megatron-core, run on gloo ranks with a tiny GPT."""
