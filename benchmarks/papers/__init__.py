"""The papers' tables, published values beside simulated ones."""
