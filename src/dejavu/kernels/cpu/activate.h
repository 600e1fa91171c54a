// Activations, elementwise and in place.
#pragma once

#include <cmath>

#include "simd.h"

namespace dejavu::DEJAVU_ISA {

inline Vec logistic(Vec a) {
  return broadcast(1.0f) / (broadcast(1.0f) + exp(zero() - a));
}

// a[0..count) = activation(a), in place.
inline void activate(Activation activation, float threshold, float* a, Size count) {
  if (activation == Activation::gelu) {
    for (Size k = 0; k < count; ++k)
      a[k] = 0.5f * a[k] * (1.0f + ::erff(a[k] * 0.70710678f));
    return;
  }
  for_vectors(0, count, [&](Size k, Size lanes) {
    const Vec x = load(a + k, lanes);
    Vec y = x;
    switch (activation) {
      case Activation::relu: y = select_less(x, zero(), zero(), x); break;
      case Activation::relu2: y = select_less(x, zero(), zero(), x * x); break;
      case Activation::silu: y = x * logistic(x); break;
      case Activation::gelu_tanh: {
        // 0.5 (1 + tanh u) is the logistic of 2u, without the cancellation for negative u.
        const Vec u = fma(x * x * x, broadcast(0.044715f), x) * broadcast(1.5957691216f);
        y = x * logistic(u);
        break;
      }
      case Activation::fatrelu: y = select_less(broadcast(threshold), x, x, zero()); break;
      case Activation::gelu: break;
    }
    store(a + k, y, lanes);
  });
}

}  // namespace dejavu::DEJAVU_ISA
