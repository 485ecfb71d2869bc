"""Decoders, their configs and the loading of their weights."""
