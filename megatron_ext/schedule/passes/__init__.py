"""Passes over a schedule: check it, add offload, lower it to messages."""
