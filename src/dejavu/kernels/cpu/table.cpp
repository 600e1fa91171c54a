#include "simd.h"

#define DEJAVU_STRING(x) #x
#define DEJAVU_NAME(x) DEJAVU_STRING(x)

namespace dejavu::DEJAVU_ISA {

const KernelTable& table() {
  static const KernelTable kernels = {
      DEJAVU_NAME(DEJAVU_ISA),
      stream_sum,
#define DEJAVU_ENTRY(name, Args) {run_##name, scratch_##name},
      DEJAVU_KERNELS(DEJAVU_ENTRY)
#undef DEJAVU_ENTRY
  };
  return kernels;
}

}  // namespace dejavu::DEJAVU_ISA
