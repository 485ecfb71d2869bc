"""Compile one case of a Triton module with other constants, and write Triton's IR of it. A child process of the tests.

python -m chapters.replace tests.ch06_attention_kernels.compiled MODULE ARCH DTYPE CONSTANTS
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys

from minisgl_kernels.triton import compile as ahead

module, arch, dtype, constants = sys.argv[1:]
sm = int(arch.removeprefix("sm_"))
cases = importlib.import_module(module).COMPILE_CASES
case = next(case for case in cases if case.types["q"] == f"*{dtype}" and case.runs_on(sm))
case = dataclasses.replace(case, constants=case.constants | json.loads(constants))
try:
    print(ahead.compile_case(case, sm).asm["ttir"])
except Exception as error:  # of any kind: the compiler's or ptxas's
    sys.exit(f"{arch}  {case.name}: does not compile\n{ahead._told(error)}")
