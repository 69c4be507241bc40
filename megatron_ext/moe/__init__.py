"""The pipelined, memory-reusing MoE layer (MPipeMoE, arXiv 2506.22175), on megatron-core's own."""
