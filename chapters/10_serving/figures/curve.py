"""Throughput, goodput and the time to the first token against the rate at which requests come, as recorded."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.record import load
from benchmarks.serving.report import targets
from chapters.figures import NEW, REQUESTS, Theme


def draw(theme: Theme) -> Figure:
    curve = load("ch10_serving")["data"]["curve"]
    points = sorted(curve["points"].values(), key=lambda point: point["rate"])
    rates = [point["rate"] for point in points]
    figure = Figure(figsize=(7.8, 3.5), layout="constrained")
    done, first = figure.subplots(1, 2)
    blue, orange, green = REQUESTS[:3]
    line = {"marker": "o", "markersize": 4}
    done.plot(rates, rates, color=theme.muted, linestyle=(0, (1, 2)), label="as many as come")
    done.plot(rates, [point["requests_per_s"] for point in points], color=blue, label="answered", **line)
    done.plot(rates, [point["goodput_per_s"] for point in points], color=green, label="goodput", **line)
    [most_ms] = targets(curve["slo"]).values()
    first.axhline(most_ms, color=NEW, linewidth=0.9, label="the target")
    for name, color in (("p50", blue), ("p90", orange), ("p99", green)):
        values = [point["first_token_ms"][name] for point in points]
        first.plot(rates, values, color=color, label=name, **line)
    first.set_yscale("log")
    first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    first.yaxis.set_major_formatter("{x:,.0f}")
    first.minorticks_off()
    done.set_ylabel("requests a second", color=theme.ink)
    first.set_ylabel("ms to the first token", color=theme.ink)
    for axes in (done, first):
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(theme.muted)
        axes.tick_params(which="both", colors=theme.muted, labelcolor=theme.ink)
        axes.grid(color=theme.faint, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("requests that come in a second", color=theme.ink)
        axes.legend(frameon=False, labelcolor=theme.ink, fontsize=8.5)
    return figure
