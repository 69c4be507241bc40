"""Activations leave the device while nobody needs them: store, host arena, transfer engine."""
