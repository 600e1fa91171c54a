// Input sparsity: which channels of an input are large enough to be read, and projections stored by
// input channel, of which only those rows are read (TEAL, arXiv 2408.14690).

#include "activate.h"
#include "tiles.h"

namespace dejavu::DEJAVU_ISA {
namespace {

constexpr Size kColumns = 256;  // outputs an item adds up
constexpr Size kEntries = 1024;  // channels an item compares, at least a tile

// results[0..last - first) = the tiles' sums of row r in order + bias, for columns [first, last).
void add_tiles(const Partials& partials, const float* bias, Size r, Size first, Size last,
               float* results) {
  for_vectors(first, last, [&](Size at, Size lanes) {
    Vec total = partials.total(r, at, lanes);
    if (bias) total = total + load(bias + at, lanes);
    store(results + at - first, total, lanes);
  });
}

}  // namespace

Scratch scratch_choose(const ChooseArgs&) { return {}; }

void run_choose(const ChooseArgs& a, Worker& worker) {
  const Selection& out = a.out;
  const Size tiles = out.tiles(), at_once = out.tile < kEntries ? kEntries / out.tile : 1;
  worker.share((tiles + at_once - 1) / at_once, [&](Size item) {
    const Size end = (item + 1) * at_once < tiles ? (item + 1) * at_once : tiles;
    int64_t read = 0, used = 0;
    for (Size t = item * at_once; t < end; ++t)
      read += compact(out, t, a.rows, [&](Size r, Size i) {
        // Turned round, so that NaN is kept and shows.
        const bool small = std::fabs(a.x[r * out.entries + i]) < a.floors[i];
        const bool yes = !small || (a.positions && a.positions[r] < a.whole);
        used += yes;
        return yes;
      });
    if (!a.counter) return;
    __atomic_fetch_add(a.counter, read, __ATOMIC_RELAXED);
    __atomic_fetch_add(a.counter + 1, used, __ATOMIC_RELAXED);
    if (item == 0) __atomic_fetch_add(a.counter + 2, (int64_t)a.rows, __ATOMIC_RELAXED);
  });
}

Scratch scratch_project(const ProjectArgs& a) {
  return {Partials::floats(tile_count(a.weight->rows, a.tile), a.rows, a.weight->columns),
          a.tile * (a.rows + 1) + kColumns};
}

void run_project(const ProjectArgs& a, Worker& worker) {
  const Matrix& weight = *a.weight;
  const Size channels = weight.rows, tiles = tile_count(channels, a.tile);
  const Partials partials(worker.shared, tiles, a.rows, weight.columns);
  const Use use = use_of(a.selection, 1);
  int32_t* listed = (int32_t*)worker.local;
  float* coefficients = worker.local + a.tile;
  float* gates = coefficients + a.rows * a.tile;
  worker.share(tiles, [&](Size t) {
    const Size first = t * a.tile;
    const Size last = first + a.tile < channels ? first + a.tile : channels;
    const Size count = list_range(a.selection, 1, first, last, listed);
    gather_coefficients(a.x, a.rows, weight, use, listed, count, a.tile, coefficients);
    partials.fill(t, weight, listed, count, coefficients, a.tile, a.selection != nullptr);
  });
  if (a.gated) {
    const Size neurons = weight.columns / 2;
    worker.share((neurons + kColumns - 1) / kColumns, [&](Size item) {
      const Size first = item * kColumns;
      const Size last = first + kColumns < neurons ? first + kColumns : neurons;
      for (Size r = 0; r < a.rows; ++r) {
        float* out = a.outs[0] + r * neurons + first;
        add_tiles(partials, a.bias, r, first, last, gates);
        add_tiles(partials, a.bias, r, neurons + first, neurons + last, out);
        activate(a.activation, a.threshold, gates, last - first);
        for_vectors(0, last - first, [&](Size k, Size lanes) {
          store(out + k, load(out + k, lanes) * load(gates + k, lanes), lanes);
        });
      }
    });
    return;
  }
  worker.share((weight.columns + kColumns - 1) / kColumns, [&](Size item) {
    const Size begin = item * kColumns;
    const Size end = begin + kColumns < weight.columns ? begin + kColumns : weight.columns;
    for (Size part = 0, start = 0; part < a.part_count; start += a.widths[part++]) {
      const Size first = begin > start ? begin : start;
      const Size stop = start + a.widths[part], last = end < stop ? end : stop;
      if (first >= last) continue;
      for (Size r = 0; r < a.rows; ++r)
        add_tiles(partials, a.bias, r, first, last,
                  a.outs[part] + r * a.widths[part] + first - start);
    }
  });
}

}  // namespace dejavu::DEJAVU_ISA
