"""Pipeline schedules with controllable memory for stock Megatron-LM.

Importing this package has no side effects: no torch, no CUDA, no Megatron, nothing patched.
"""

__version__ = "0.1.0.dev0"
