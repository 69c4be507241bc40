"""The commands of ``megatron-ext``, one module each; ``add`` declares the parser, sets ``run``."""
