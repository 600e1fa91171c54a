"""Triton kernels: `ops.TritonOps` implements `kernels.ops.Ops` for decode steps on a GPU."""
