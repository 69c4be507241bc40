"""Pipelined MoE layers that reuse memory (MPipeMoE): chunks, restore strategies, their choice."""
