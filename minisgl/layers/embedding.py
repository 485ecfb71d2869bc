"""The embedding table: a row of hidden_size numbers for each token of the vocabulary."""

import torch
from minisgl_kernels import reference
from torch import nn

from minisgl.distributed.comm import ALONE, Comm
from minisgl.layers.shard import even_shard


class Embedding(nn.Module):
    """Looks rows up on the way in; a model with tied embeddings multiplies by the same table on the way out.

    An untied head is another such table. A rank holds ceil(vocab_size / size) rows, the last ones padded with zeros.
    """

    ops = reference

    def __init__(self, vocab_size: int, hidden_size: int, comm: Comm = ALONE) -> None:
        super().__init__()
        self.vocab_size, self.comm = vocab_size, comm
        self.shards = {"weight": even_shard(vocab_size, comm)}
        self.weight = nn.Parameter(torch.empty(-(-vocab_size // comm.size), hidden_size))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # [T] → [T, hidden]
        return self.ops.embedding(input_ids, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [T, hidden] → [T, vocab]
        logits = self.comm.all_gather(self.ops.linear(hidden, self.weight))
        return logits[:, : self.vocab_size]  # padding, which is behind the last rank's rows, cannot be sampled


class SplitEmbedding(Embedding):
    """The same over several ranks: each looks up the tokens that it holds, and the sum has all of them."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # [T] → [T, hidden]
        rows = input_ids - self.comm.rank * len(self.weight)
        foreign = (rows < 0) | (rows >= len(self.weight))
        found = self.ops.embedding(rows.masked_fill(foreign, 0), self.weight)
        return self.comm.all_reduce(found.masked_fill(foreign.unsqueeze(1), 0))
