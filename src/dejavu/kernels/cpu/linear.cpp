// linear: dot products with stored rows, several projections in one phase.

#include "tiles.h"

namespace dejavu::DEJAVU_ISA {
namespace {

constexpr Size kMaxChunkRows = 256;

// About 32 KiB of weights an item: long enough to stream, short enough to share out evenly.
Size chunk_rows(const Matrix& weight) {
  const Size bytes = weight.dtype == Dtype::fp32 ? 4 : weight.dtype == Dtype::bf16 ? 2 : 1;
  const Size row = weight.columns * bytes;
  Size rows = 8;
  while (rows < kMaxChunkRows && 2 * rows * row <= 32768) rows *= 2;
  return rows;
}

Size chunks_of(const Matrix& weight) {
  const Size chunk = chunk_rows(weight);
  return (weight.rows + chunk - 1) / chunk;
}

}  // namespace

Scratch scratch_linear(const LinearArgs& a) {
  return {0, kMaxChunkRows * (a.rows + 1) + Inputs::floats(a.rows, a.width)};
}

void run_linear(const LinearArgs& a, Worker& worker) {
  int32_t* listed = (int32_t*)worker.local;
  float* results = worker.local + kMaxChunkRows;
  bool int8 = false;
  for (Size part = 0; part < a.part_count; ++part)
    int8 = int8 || a.parts[part].weight->dtype == Dtype::int8;
  const Inputs x(a.x, a.rows, a.width, int8, results + kMaxChunkRows * a.rows);
  Size total = 0;
  for (Size part = 0; part < a.part_count; ++part) total += chunks_of(*a.parts[part].weight);
  worker.share(total, [&](Size item) {
    Size part = 0;
    for (Size chunks; item >= (chunks = chunks_of(*a.parts[part].weight)); ++part) item -= chunks;
    const LinearPart& p = a.parts[part];
    const Size outputs = p.weight->rows, chunk = chunk_rows(*p.weight);
    const Size first = item * chunk;
    const Size last = first + chunk < outputs ? first + chunk : outputs;
    const Size block = p.selection ? outputs / p.selection->entries : 1;
    const Size count = list_range(p.selection, block, first, last, listed);
    if (count == last - first) {
      dots(*p.weight, listed, count, x, use_of(p.selection, block), p.bias,
           p.out + first, outputs);
      return;
    }
    dots(*p.weight, listed, count, x, use_of(p.selection, block), p.bias, results,
         kMaxChunkRows);
    for (Size r = 0; r < a.rows; ++r) {
      float* row = p.out + r * outputs;
      std::memset(row + first, 0, (size_t)(last - first) * sizeof(float));
      for (Size k = 0; k < count; ++k) row[listed[k]] = results[r * kMaxChunkRows + k];
    }
  });
}

}  // namespace dejavu::DEJAVU_ISA
