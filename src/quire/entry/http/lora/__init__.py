"""Adapters (LoRA) of a server: their names, and the routes that change these."""
