"""A server: the front, which knows text and HTTP, and the engine in a process of its own."""
