"""Attention over the paged pool: one module a backend."""
