"""Decoders, their configs and the loading of their weights."""


class UnsupportedModel(ValueError):
    """A checkpoint that minisgl would run wrongly or not at all; the message names what stands in the way."""


class BadCheckpoint(ValueError):
    """Files that are damaged or incomplete, or whose tensors are not the model's; the message names them."""
