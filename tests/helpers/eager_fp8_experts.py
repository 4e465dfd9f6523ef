"""Emulate experts in fp8 by torch on a CPU, where the interpreter of Triton takes seconds for each matmul."""

from stoker.kernels.fp8 import grouped

grouped._use_triton = lambda tensor, out_dtype: False
