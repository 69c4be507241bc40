"""Activation offloading: store, host arena, transfer engine."""
