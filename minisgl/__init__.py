"""minisgl: a small, complete LLM inference engine, built chapter by chapter in the course beside it."""

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams

__all__ = ["LLM", "EngineConfig", "SamplingParams"]


def __getattr__(name: str) -> object:
    # LLM needs torch; the scheduler and the command line's --help do not.
    if name == "LLM":
        from minisgl.llm import LLM

        return LLM
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
