"""One model over several processes: who they are, what they say to each other, and how."""
