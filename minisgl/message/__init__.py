"""What the processes of a server say to each other."""
