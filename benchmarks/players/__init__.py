"""Records what the interactive drawings replay: each script runs the engine and writes `results/player_<name>.json`."""
