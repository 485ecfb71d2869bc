"""The engine's ops as Triton kernels, for NVIDIA GPUs from sm_75 on, and for a CPU in Triton's interpreter.

One module an op; names and arguments are those of `minisgl_kernels.reference`. No function here waits for the GPU, so
each can be captured in a CUDA graph. TRITON_INTERPRET=1, set before the first import, runs the kernels on CPU tensors:
slowly, in float32 and float16 only (the interpreter's bfloat16 is wrong).
"""

from minisgl_kernels.reference import linear
from minisgl_kernels.triton.activation import linear_silu_mul, silu_and_mul
from minisgl_kernels.triton.attention import flash_attention, paged_attention
from minisgl_kernels.triton.available import why_unavailable
from minisgl_kernels.triton.decode import paged_decode
from minisgl_kernels.triton.embedding import embedding
from minisgl_kernels.triton.norm import add_rms_norm, rms_norm
from minisgl_kernels.triton.qkv import apply_rope, qk_norm_rope_store
from minisgl_kernels.triton.rows import decode_rows, keep_tokens, rope_angles
from minisgl_kernels.triton.sampling import sample

__all__ = ["add_rms_norm", "apply_rope", "embedding", "flash_attention", "linear", "paged_attention", "paged_decode"]
__all__ += ["decode_rows", "keep_tokens", "linear_silu_mul", "rope_angles"]
__all__ += ["qk_norm_rope_store", "rms_norm", "sample", "silu_and_mul", "why_unavailable"]
