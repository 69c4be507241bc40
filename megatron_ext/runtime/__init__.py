"""Executes a lowered schedule on ``torch.distributed``; knows nothing about Megatron."""
