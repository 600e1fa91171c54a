// Sums of int8 rows for several batch rows, without partial sums in memory.
//
// Partial sums of 16 batch rows are 0.6 MB for 16 tiles of 512 columns: written, rounded and read
// again, half of them by another core, they took longer than the products. So a first phase leaves
// whole coefficients only, and in a second one an item is some columns of all batch rows, or some
// batch rows where most coefficients are 0, and goes through the tiles in their order by itself.
// Sums of a tile are exact, so the bits are those of partial sums.
#pragma once

#include "tiles.h"

namespace dejavu::DEJAVU_ISA {

// What the second phase needs, in shared scratch.
struct Coefficients {
  Size tiles, tile, rows;
  const int8_t** stored;  // [tiles][tile]: rows of the matrix, the last again up to a whole pass
  int16_t* q;             // [tiles][rows][tile], 0 up to a whole pass
  float* steps;           // [tiles][rows]
  int32_t* counts;        // [tiles]: of stored rows
  int32_t* used;          // [tiles]: coefficients of all rows that are not 0

  static Size floats(Size entries, Size tile, Size rows) {
    const Size tiles = tile_count(entries, tile);
    return tiles * (2 * padded(tile) + rows * padded(tile) / 2 + padded(rows) + 2);
  }
  Coefficients(float* scratch, Size entries, Size tile, Size rows)
      : tiles(tile_count(entries, tile)), tile(tile), rows(rows),
        stored((const int8_t**)scratch), q((int16_t*)(stored + tiles * padded(tile))),
        steps((float*)(q + tiles * rows * padded(tile))),
        counts((int32_t*)(steps + tiles * padded(rows))), used(counts + tiles) {}

  const int16_t* of(Size t, Size r) const { return q + (t * rows + r) * padded(tile); }
  float step(Size t, Size r) const { return steps[t * padded(rows) + r]; }

  // Tile t: coefficients[r * tile + k], with its scale, of row listed[k] of the matrix.
  void put(const Matrix& weight, Size t, const int32_t* listed, Size count,
           const float* coefficients) const {
    counts[t] = (int32_t)count;
    const int8_t** at = stored + t * padded(tile);
    for (Size k = 0; k < count; ++k) at[k] = (const int8_t*)weight.data + weight.start(listed[k]);
    for (Size k = count; k % kSumRows; ++k) at[k] = at[count - 1];
    int32_t total = 0;
    for (Size r = 0; r < rows; ++r) {
      const Steps how = steps_of(coefficients + r * tile, count, tile);
      int16_t* whole = q + (t * rows + r) * padded(tile);
      whole_coefficients(coefficients + r * tile, count, how, whole);
      for (Size k = 0; k < count; ++k) total += whole[k] != 0;
      steps[t * padded(rows) + r] = how.step;
    }
    used[t] = total;
  }

  // out[r] = sums of stored rows, tiles in order, + bias + residual; a phase of its own.
  void add_up(const Matrix& weight, const float* bias, const float* residual, float* out,
              Worker& worker) const;

  // Floats that add_up needs of each thread.
  static Size local_floats(Size width) { return 2 * padded(width); }

 private:
  bool dense() const;  // whether all batch rows together are faster
  void columns(const Matrix& weight, Size first, Size last, const float* bias,
               const float* residual, float* out) const;
  void picked(const Matrix& weight, Size r, Size first, Size last, const float* bias,
              const float* residual, float* out, float* scratch) const;
};

}  // namespace dejavu::DEJAVU_ISA
