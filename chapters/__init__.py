"""The course machine: stubs, hints, progress and checks, from the chapters' tables. See `python -m chapters --help`."""
