"""Models from files that people have, as Megatron's arguments by name."""
