"""What lies in a folder of checkpoints, read without torch and without running anything of it."""
