"""A draw in two levels: a block by its log-sum-exp with noise, then one of its tokens. The noise is the engine's."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from minisgl_kernels.reference import gumbel_noise

from chapters.figures import NEW, Q, Theme, arrow, diagram, label, tint

LOGITS = torch.tensor([1.0, 2.2, 0.3, -0.5, 0.1, 0.8, 2.9, 1.2, -1.0, 0.0, 0.4, -0.2, 1.9, 0.6, -0.8, 2.4])
SEED, POSITION, BLOCK = torch.tensor([16]), torch.tensor([5]), 4
LEFT, CELL, GAP = 1.25, 0.35, 0.16


def place(token: int) -> float:
    return LEFT + token * CELL + token // BLOCK * GAP


def draw(theme: Theme) -> Figure:
    powers = LOGITS * 1.442695  # of two, at temperature 1
    blocks = powers.view(-1, BLOCK)
    sums = blocks.exp2().sum(1).log2()
    noise = gumbel_noise(SEED, POSITION, -1 - torch.arange(len(blocks))[None])[0]
    scores = sums + noise
    chosen = int(scores.argmax())
    tokens = chosen * BLOCK + torch.arange(BLOCK)
    token_noise = gumbel_noise(SEED, POSITION, tokens[None])[0]
    token_scores = powers[tokens] + token_noise
    token = int(tokens[token_scores.argmax()])

    figure, axes = diagram(7.6, 3.7)
    y_of = [3.2, 2.4, 2.12, 1.84, 1.12, 0.84, 0.56]
    texts = ["logits", "log₂ Σ", "+ noise", "= score", "log₂", "+ noise", "= score"]
    for y, text in zip(y_of, texts, strict=True):
        label(axes, theme, LEFT - 0.15, y, text, ha="right", fontsize=9, color=theme.muted)
    label(axes, theme, 0.1, 2.12, "level 1", ha="left", weight="bold", fontsize=9)
    label(axes, theme, 0.1, 0.84, "level 2", ha="left", weight="bold", fontsize=9)
    largest = float(powers.max())
    for i, power in enumerate(powers.tolist()):
        fill = tint(theme, NEW if i == token else Q, 0.12 + 0.7 * 2 ** (power - largest))
        axes.add_patch(Rectangle((place(i), 3.05), CELL, 0.32, facecolor=fill, edgecolor=theme.faint))
        label(axes, theme, place(i) + CELL / 2, 3.2, f"{LOGITS[i]:.1f}", fontsize=7.5)
    for b in range(len(blocks)):
        middle = place(b * BLOCK) + 2 * CELL
        color = NEW if b == chosen else theme.muted
        arrow(axes, theme, (middle, 3.05), (middle, 2.55), "" if b != chosen else NEW)
        look = {"fontsize": 9, "color": theme.ink if b == chosen else theme.muted}
        for y, value in zip(y_of[1:3], (sums[b], noise[b]), strict=True):
            label(axes, theme, middle, y, f"{value:.2f}", **look)
        label(axes, theme, middle, y_of[3], f"{scores[b]:.2f}", fontsize=9, color=color, weight="bold")
    for i, t in enumerate(tokens.tolist()):
        x = place(t) + CELL / 2 + (i - 1.5) * 0.2  # a little apart: numbers are wider than cells
        color = NEW if t == token else theme.muted
        for y, value in zip(y_of[4:6], (powers[t], token_noise[i]), strict=True):
            label(axes, theme, x, y, f"{value:.2f}", fontsize=8.5)
        label(axes, theme, x, y_of[6], f"{token_scores[i]:.2f}", fontsize=8.5, color=color, weight="bold")
    middle = place(chosen * BLOCK) + 2 * CELL
    arrow(axes, theme, (middle, 1.72), (middle, 1.3), NEW)
    noises = f"{len(blocks)} + {BLOCK} numbers of noise, not {len(LOGITS)}"
    note = f"token {token} is drawn. Every logit is read once, then one block again; {noises}"
    label(axes, theme, 3.8, 0.18, note, color=theme.muted, fontsize=9)
    return figure
