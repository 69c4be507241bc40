"""``python -m megatron_ext``: the command line of ``cli``, also without an installation."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
