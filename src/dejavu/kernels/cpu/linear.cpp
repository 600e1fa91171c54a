// linear: dot products with stored rows, several projections in one phase.

#include "tiles.h"

namespace dejavu::DEJAVU_ISA {
namespace {

constexpr Size kMaxChunkRows = 256, kMaxListed = kMaxChunkRows + kAheadRows;

// Rows an item: up to 1 MiB of a large matrix (items of 128 KiB reached 76 % of the rate of a
// streaming sum in bf16, of 1 MiB 81 %), less of a small one, so that the items share out evenly.
Size chunk_rows(const Matrix& weight, int threads) {
  const Size bytes = weight.dtype == Dtype::fp32 ? 4 : weight.dtype == Dtype::bf16 ? 2 : 1;
  const Size row = weight.columns * bytes, fair = weight.rows * row / (8 * threads);
  const Size target = fair < 16384 ? 16384 : fair > (1 << 20) ? 1 << 20 : fair;
  Size rows = 8;
  while (rows < kMaxChunkRows && 2 * rows * row <= target) rows *= 2;
  return rows;
}

Size chunks_of(const Matrix& weight, int threads) {
  const Size chunk = chunk_rows(weight, threads);
  return (weight.rows + chunk - 1) / chunk;
}

}  // namespace

Scratch scratch_linear(const LinearArgs& a) {
  return {0, kMaxChunkRows * a.rows + kMaxListed + Inputs::floats(a.rows, a.width)};
}

void run_linear(const LinearArgs& a, Worker& worker) {
  int32_t* listed = (int32_t*)worker.local;
  float* results = worker.local + kMaxListed;
  bool int8 = false;
  for (Size part = 0; part < a.part_count; ++part)
    int8 = int8 || a.parts[part].weight->dtype == Dtype::int8;
  const Inputs x(a.x, a.rows, a.width, int8, results + kMaxChunkRows * a.rows);
  const int threads = worker.threads();
  Size total = 0;
  for (Size part = 0; part < a.part_count; ++part)
    total += chunks_of(*a.parts[part].weight, threads);
  worker.share(total, [&](Size item) {
    Size part = 0;
    for (Size chunks; item >= (chunks = chunks_of(*a.parts[part].weight, threads)); ++part)
      item -= chunks;
    const LinearPart& p = a.parts[part];
    const Size outputs = p.weight->rows, chunk = chunk_rows(*p.weight, threads);
    const Size first = item * chunk;
    const Size last = first + chunk < outputs ? first + chunk : outputs;
    const Size block = p.selection ? outputs / p.selection->entries : 1;
    const Size count = list_range(p.selection, block, first, last, listed);
    const Size ahead = last + kAheadRows < outputs ? last + kAheadRows : outputs;
    const Size known = count + list_range(p.selection, block, last, ahead, listed + count);
    if (count == last - first) {
      dots(*p.weight, listed, count, known, x, use_of(p.selection, block), p.bias,
           p.out + first, outputs);
      return;
    }
    dots(*p.weight, listed, count, known, x, use_of(p.selection, block), p.bias, results,
         kMaxChunkRows);
    for (Size r = 0; r < a.rows; ++r) {
      float* row = p.out + r * outputs;
      std::memset(row + first, 0, (size_t)(last - first) * sizeof(float));
      for (Size k = 0; k < count; ++k) row[listed[k]] = results[r * kMaxChunkRows + k];
    }
  });
}

}  // namespace dejavu::DEJAVU_ISA
