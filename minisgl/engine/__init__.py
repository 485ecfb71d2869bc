"""What turns a model into an engine: sampling and, later, steps over batches."""
