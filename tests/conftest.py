"""Loads --mine, which replaces modules at their first import: nothing here imports minisgl outside a function."""

from __future__ import annotations

pytest_plugins = ["chapters.pytest_plugin"]
