"""The activations, elementwise in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, threshold, NAME: tl.constexpr):
    """See `kernels.ops.Activation`; NAME is its name."""
    if NAME == "relu":
        y = tl.where(x > 0, x, tl.where(x != x, x, 0.0))
    elif NAME == "relu2":
        y = tl.where(x > 0, x * x, tl.where(x != x, x, 0.0))
    elif NAME == "fatrelu":
        y = tl.where(x > threshold, x, 0.0)
    elif NAME == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(NAME == "gelu_tanh")
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * inner))
    return y
