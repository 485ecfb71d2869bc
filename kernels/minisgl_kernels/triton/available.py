"""Where the Triton kernels run. Imports no Triton."""

import os

import torch


def why_unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels cannot be used for tensors of this device and dtype; empty if they can."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return "the kernels know float32, float16 and bfloat16"
    if os.environ.get("TRITON_INTERPRET") == "1":
        if device.type != "cpu":
            return "TRITON_INTERPRET=1 is set, which is for a CPU"
        return "the interpreter computes bfloat16 wrong" if dtype == torch.bfloat16 else ""
    if device.type != "cuda":
        return "it is for a GPU; on a CPU its interpreter runs it, with TRITON_INTERPRET=1"
    capability = torch.cuda.get_device_capability(device)
    if capability < (7, 5):
        return f"it needs a GPU of sm_75 or newer, and this is sm_{capability[0]}{capability[1]}"
    if dtype == torch.bfloat16 and capability < (8, 0):
        return "this GPU has no bfloat16: choose --dtype float16"
    return ""
