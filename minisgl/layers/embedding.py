"""The embedding table: a row of hidden_size numbers for each token of the vocabulary."""

import torch
from minisgl_kernels import reference
from torch import nn


class Embedding(nn.Module):
    """Looks rows up on the way in; a model with tied embeddings multiplies by the same table on the way out."""

    ops = reference

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # [T] → [T, hidden]
        return self.ops.embedding(input_ids, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [T, hidden] → [T, vocab]
        return self.ops.linear(hidden, self.weight)
