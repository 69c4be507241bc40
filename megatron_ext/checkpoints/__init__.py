"""Checkpoint folders, read without torch and without running anything of their pickles."""
