// Selections made on the CPU: scores above 0, or enough agreeing signs, compacted tile by tile.

#include "tiles.h"

namespace dejavu::DEJAVU_ISA {
namespace {

// One batch row and short int8 rows: scores and list of a tile, eight at a time. False: not this.
bool select_narrow(const SelectArgs& a, const Inputs& x, Size first, Size count, float* scores,
                   int32_t* listed, int32_t* listed_count) {
  const Matrix& weight = *a.weight;
  const int8_t* rows = (const int8_t*)weight.data + first * weight.columns;
  if (!try_narrow_dots(rows, count, x.digits[0], weight.columns, scores)) return false;
  int32_t found = 0;
  for_vectors(0, count, [&](Size k, Size lanes) {
    const Vec scaled = load(scores + k, lanes) * load(weight.scale + first + k, lanes);
    const Vec score = scaled + load(a.bias + first + k, lanes);
    const uint32_t above = less_bits(zero(), score);
    for (Size i = 0; i < lanes; ++i) {
      listed[found] = (int32_t)(first + k + i);  // overwritten by the next one unless kept
      found += above >> i & 1;
    }
  });
  *listed_count = found;
  return true;
}

}  // namespace

Scratch scratch_select(const SelectArgs& a) {
  return {0, a.out.tile * (a.rows + 1) + Inputs::floats(a.rows, a.weight->columns)};
}

void run_select(const SelectArgs& a, Worker& worker) {
  const Selection& out = a.out;
  int32_t* all = (int32_t*)worker.local;
  float* scores = worker.local + out.tile;
  const Inputs x(a.x, a.rows, a.weight->columns, a.weight->dtype == Dtype::int8,
                 scores + out.tile * a.rows);
  const bool narrow = a.rows == 1 && a.weight->dtype == Dtype::int8 && a.weight->scale && a.bias &&
                      !out.mask;
  worker.share(out.tiles(), [&](Size t) {
    const Size first = t * out.tile;
    const Size count = out.entries - first < out.tile ? out.entries - first : out.tile;
    if (narrow && select_narrow(a, x, first, count, scores, out.indices + first, out.counts + t))
      return;
    for (Size k = 0; k < count; ++k) all[k] = (int32_t)(first + k);
    dots(*a.weight, all, count, count, x, {}, a.bias, scores, out.tile);
    compact(out, t, a.rows,
            [&](Size r, Size entry) { return scores[r * out.tile + entry - first] > 0; });
  });
}

// Sign words of every row, in each thread's own scratch: packing is cheaper than a phase.
Scratch scratch_select_signs(const SelectSignsArgs& a) {
  return {0, a.rows * ((a.width + 63) / 64) * 2};
}

// Neurons whose weights agree in sign with the input often enough (SparseInfer, arXiv 2411.12692).
void run_select_signs(const SelectSignsArgs& a, Worker& worker) {
  const Size words = (a.width + 63) / 64;
  uint64_t* packed = (uint64_t*)worker.local;
  for (Size r = 0; r < a.rows; ++r)
    for (Size word = 0; word < words; ++word) {
      const float* x = a.x + r * a.width + word * 64;
      const Size count = a.width - word * 64 < 64 ? a.width - word * 64 : 64;
      uint64_t bits = 0;
      for (Size i = 0; i < count; i += Vec::width) {
        const Size lanes = count - i < Vec::width ? count - i : (Size)Vec::width;
        bits |= (uint64_t)less_bits(load(x + i, lanes), zero()) << i;
      }
      packed[r * words + word] = bits;
    }
  worker.share(a.out.tiles(), [&](Size t) {
    compact(a.out, t, a.rows, [&](Size r, Size entry) {
      Size differing = 0;
      for (Size word = 0; word < words; ++word)
        differing +=
            __builtin_popcountll(packed[r * words + word] ^ a.signs[entry * words + word]);
      return a.width - differing >= a.thresholds[entry];
    });
  });
}

}  // namespace dejavu::DEJAVU_ISA
