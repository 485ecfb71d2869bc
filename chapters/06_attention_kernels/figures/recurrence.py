"""The online softmax on a row of six scores in three tiles: computed by the engine's own `update`."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from minisgl_kernels.online_softmax import begin, finish, update

from chapters.figures import NEW, K, Q, Theme, V, arrow, box, diagram, label

SCORES, VALUES, TILE = [1.0, 0.0, 3.0, 1.0, 2.0, 0.0], [4.0, 8.0, 1.0, 5.0, 2.0, 6.0], 2


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(8.4, 3.55)
    left, wide, cell = 1.75, 1.9, 0.62
    for y, text in [(3.2, "scores"), (2.72, "values"), (1.45, "largest"), (0.98, "total"), (0.51, "acc")]:
        label(axes, theme, left - 0.25, y, text, ha="right", color=theme.muted)
    state = begin(1)
    states = [state]
    for tile in range(0, len(SCORES), TILE):
        x = left + tile // TILE * (wide + 0.32)
        for j in range(TILE):
            box(axes, theme, x + j * (cell + 0.06), 3.02, cell, 0.36, f"{SCORES[tile + j]:g}", Q)
            box(axes, theme, x + j * (cell + 0.06), 2.54, cell, 0.36, f"{VALUES[tile + j]:g}", V)
        before, state = state, update(state, SCORES[tile : tile + TILE], [[v] for v in VALUES[tile : tile + TILE]])
        states.append(state)
        arrow(axes, theme, (x + cell, 2.5), (x + cell, 1.72))
        shrink = math.exp(before.largest - state.largest)
        if tile:
            words = "stays:\n× 1" if shrink == 1 else f"shrinks:\n× {shrink:.2f}"
            label(axes, theme, x - 0.46, 1.25, words, fontsize=8, color=NEW)
            arrow(axes, theme, (x - 0.9, 0.98), (x - 0.04, 0.98), NEW)
        numbers = [f"{state.largest:g}", f"{state.total:.3f}", f"{state.acc[0]:.3f}"]
        for y, text in zip((1.27, 0.8, 0.33), numbers, strict=True):
            box(axes, theme, x, y, 2 * cell + 0.06, 0.36, text, K)
    [mean], log_sum = finish(state)
    label(
        axes, theme, 4.5, 0.1, f"at the end: acc / total = {mean:.3f}; largest + log total = {log_sum:.3f}", fontsize=9
    )
    return figure
