// Partial sums a tile, written by whoever takes the tile and added up in tile order.
#pragma once

#include "dots.h"

namespace dejavu::DEJAVU_ISA {

inline Size padded(Size width) { return (width + kSumColumns - 1) / kSumColumns * kSumColumns; }

inline Size tile_count(Size entries, Size tile) { return (entries + tile - 1) / tile; }

// List the entries of tile t that any row keeps; `kept(r, entry)` is asked once each. How many.
template <class Kept>
Size compact(const Selection& out, Size t, Size rows, Kept&& kept) {
  const Size first = t * out.tile;
  const Size last = first + out.tile < out.entries ? first + out.tile : out.entries;
  int32_t* listed = out.indices + first;
  Size count = 0;
  for (Size entry = first; entry < last; ++entry) {
    bool any = false;
    for (Size r = 0; r < rows; ++r) {
      const bool yes = kept(r, entry);
      any = any || yes;
      if (out.mask) out.mask[r * out.entries + entry] = yes;
    }
    listed[count] = (int32_t)entry;  // overwritten by the next one unless kept
    count += any;
  }
  out.counts[t] = (int32_t)count;
  return count;
}

// Numbers in [first, last) of a selection over blocks of `block`, expanded; all of them when null.
inline Size list_range(const Selection* selection, Size block, Size first, Size last,
                       int32_t* listed) {
  Size count = 0;
  if (!selection) {
    for (Size i = first; i < last; ++i) listed[count++] = (int32_t)i;
    return count;
  }
  const Size cut = first + selection->tile < selection->entries ? first + selection->tile
                                                                : selection->entries;
  if (block == 1 && first < last && first % selection->tile == 0 && last == cut) {
    count = selection->counts[first / selection->tile];
    std::memcpy(listed, selection->indices + first, (size_t)count * sizeof(int32_t));
    return count;
  }
  const Size begin = first / block, end = (last - 1) / block + 1;
  for (Size t = begin / selection->tile; t * selection->tile < end; ++t) {
    const int32_t* entries = selection->indices + t * selection->tile;
    for (Size k = 0; k < selection->counts[t]; ++k) {
      const Size entry = entries[k];
      if (entry < begin || entry >= end) continue;
      Size i = entry * block, stop = i + block;
      if (i < first) i = first;
      if (stop > last) stop = last;
      for (; i < stop; ++i) listed[count++] = (int32_t)i;
    }
  }
  return count;
}

inline Use use_of(const Selection* selection, Size block) {
  if (!selection || !selection->mask) return {};
  return {selection->mask, selection->entries, block};
}

// coefficients[r * tile + k] = input listed[k] of row r where the row uses it, with its stored
// row's scale.
inline void gather_coefficients(const float* x, Size rows, const Matrix& weight, const Use& use,
                                const int32_t* listed, Size count, Size tile,
                                float* coefficients) {
  if (count && !use.mask && listed[count - 1] - listed[0] == count - 1) {
    const Size first = listed[0];
    for (Size r = 0; r < rows; ++r)
      for_vectors(0, count, [&](Size k, Size lanes) {
        const Vec value = load(x + r * weight.rows + first + k, lanes);
        store(coefficients + r * tile + k,
              weight.scale ? value * load(weight.scale + first + k, lanes) : value, lanes);
      });
    return;
  }
  for (Size r = 0; r < rows; ++r)
    for (Size k = 0; k < count; ++k) {
      const Size i = listed[k];
      const float value = use(r, i) ? x[r * weight.rows + i] : 0.0f;
      coefficients[r * tile + k] = weight.scale ? value * weight.scale[i] : value;
    }
}

// Partial sums [tiles][N][padded width] in shared scratch, with a flag a tile: 0 when it is empty.
struct Partials {
  float* data;
  int32_t* filled;
  Size tiles, rows, width, stride;

  // Rows' distance: some more than a width, which may be a power of two, or the same columns of 16
  // rows fall into one set of the first cache.
  static Size apart(Size width) { return padded(width) + kSumColumns; }
  static Size floats(Size tiles, Size rows, Size width) {
    return tiles * rows * apart(width) + padded(tiles);
  }
  Partials(float* scratch, Size tiles, Size rows, Size width)
      : data(scratch), filled((int32_t*)(scratch + tiles * rows * apart(width))), tiles(tiles),
        rows(rows), width(width), stride(apart(width)) {}
  float* tile(Size t) const { return data + t * rows * stride; }

  // Row r's sums at `at`, tiles in their order.
  Vec total(Size r, Size at, Size lanes) const {
    Vec sum = zero();
    for (Size t = 0; t < tiles; ++t)
      if (filled[t]) sum = sum + load(data + (t * rows + r) * stride + at, lanes);
    return sum;
  }

  // Make tile t the sum of coefficients times listed rows.
  void fill(Size t, const Matrix& weight, const int32_t* listed, Size count,
            const float* coefficients, Size coefficient_stride, bool skip) const {
    filled[t] = count > 0;
    if (!count) return;
    std::memset(tile(t), 0, (size_t)(rows * stride) * sizeof(float));
    sums(weight, listed, count, coefficients, coefficient_stride, rows, skip, tile(t), stride);
  }

  // out = tiles in order + bias + residual; a phase of its own.
  void reduce(const float* bias, const float* residual, float* out, Worker& worker) const;
};

}  // namespace dejavu::DEJAVU_ISA
