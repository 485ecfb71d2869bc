"""What runs in each step, decided in plain integers. Nothing here imports torch."""
