// combine and mlp: sums of stored rows over fixed tiles of input channels or neurons.

#include "activate.h"
#include "batch_sums.h"

namespace dejavu::DEJAVU_ISA {

void Partials::reduce(const float* bias, const float* residual, float* out,
                      Worker& worker) const {
  constexpr Size kColumns = 256;
  worker.share((width + kColumns - 1) / kColumns, [&](Size item) {
    const Size first = item * kColumns;
    const Size last = first + kColumns < width ? first + kColumns : width;
    for (Size r = 0; r < rows; ++r)
      for_vectors(first, last, [&](Size at, Size lanes) {
        Vec sum = total(r, at, lanes);
        if (bias) sum = sum + load(bias + at, lanes);
        if (residual) sum = sum + load(residual + r * width + at, lanes);
        store(out + r * width + at, sum, lanes);
      });
  });
}

namespace {

// Whether it returns exact zeros for a half-line of inputs.
inline bool closes(Activation activation) {
  return activation == Activation::relu || activation == Activation::relu2 ||
         activation == Activation::fatrelu;
}

constexpr Size kDropped = 128;  // entries looked at in one go

// Whether sums of stored rows leave whole coefficients, not partial sums: from so many batch rows
// on that is faster, sooner where partial sums are many or most coefficients 0.
bool in_batch(const Matrix& weight, Size tile, Size rows, const Selection* selection) {
  return weight.dtype == Dtype::int8 && rows >= (selection || tile <= 64 ? 4 : 8);
}

// Of the first phase, and what each thread needs for the second.
Scratch sums_scratch(const Matrix& weight, Size tile, Size rows, const Selection* selection) {
  if (in_batch(weight, tile, rows, selection))
    return {Coefficients::floats(weight.rows, tile, rows),
            Coefficients::local_floats(weight.columns)};
  return {Partials::floats(tile_count(weight.rows, tile), rows, weight.columns), 0};
}

// any[k]: whether values[k] of some row is not 0, k < size <= kDropped.
inline void mark_used(const float* values, Size size, Size stride, Size rows, uint8_t* any) {
  std::memset(any, 0, (size_t)size);
  for (Size r = 0; r < rows; ++r)
    for (Size k = 0; k < size; ++k) any[k] |= values[r * stride + k] != 0;
}

// Take out of `listed` (and of the values beside it) what is 0 for every row; what is left.
Size drop_zeros(int32_t* listed, float* values, Size count, Size stride, Size rows) {
  Size left = 0;
  for (Size first = 0; first < count; first += kDropped) {
    const Size size = count - first < kDropped ? count - first : kDropped;
    uint8_t any[kDropped];
    mark_used(values + first, size, stride, rows, any);
    Size end = left;
    const auto close_up = [&](auto* row) {
      end = left;
      for (Size k = 0; k < size; ++k) {
        row[end] = row[first + k];
        end += any[k];
      }
    };
    for (Size r = 0; r < rows; ++r) close_up(values + r * stride);
    close_up(listed);
    left = end;
  }
  return left;
}

// How many of them drop_zeros would leave.
Size count_used(const float* values, Size count, Size stride, Size rows) {
  Size used = 0;
  for (Size first = 0; first < count; first += kDropped) {
    const Size size = count - first < kDropped ? count - first : kDropped;
    uint8_t any[kDropped];
    mark_used(values + first, size, stride, rows, any);
    for (Size k = 0; k < size; ++k) used += any[k];
  }
  return used;
}

}  // namespace

Scratch scratch_combine(const CombineArgs& a) {
  const Scratch sums = sums_scratch(*a.weight, a.tile, a.rows, a.selection);
  const Size local = a.tile * (a.rows + 1);
  return {sums.shared, local > sums.local ? local : sums.local};
}

void run_combine(const CombineArgs& a, Worker& worker) {
  const Matrix& weight = *a.weight;
  const Size channels = weight.rows, tiles = tile_count(channels, a.tile);
  const bool batch = in_batch(weight, a.tile, a.rows, a.selection);
  const Coefficients whole(worker.shared, channels, a.tile, a.rows);
  const Partials partials(worker.shared, tiles, a.rows, weight.columns);
  const Size block = a.selection ? channels / a.selection->entries : 1;
  const Use use = use_of(a.selection, block);
  int32_t* listed = (int32_t*)worker.local;
  float* coefficients = worker.local + a.tile;
  worker.share(tiles, [&](Size t) {
    const Size first = t * a.tile;
    const Size last = first + a.tile < channels ? first + a.tile : channels;
    Size count = list_range(a.selection, block, first, last, listed);
    gather_coefficients(a.x, a.rows, weight, use, listed, count, a.tile, coefficients);
    const bool skip = a.selection != nullptr;
    // A batch leaves it to every row to pass over its own zeros.
    if (batch) return whole.put(weight, t, listed, count, coefficients);
    if (skip) count = drop_zeros(listed, coefficients, count, a.tile, a.rows);
    partials.fill(t, weight, listed, count, coefficients, a.tile, skip);
  });
  if (batch) return whole.add_up(weight, a.bias, a.residual, a.out, worker);
  partials.reduce(a.bias, a.residual, a.out, worker);
}

Scratch scratch_mlp(const MlpArgs& a) {
  const Scratch sums = sums_scratch(*a.down, a.tile, a.rows, a.selection);
  const Size local = a.tile * (2 * a.rows + 1) + Inputs::floats(a.rows, a.up->columns);
  return {sums.shared, local > sums.local ? local : sums.local};
}

void run_mlp(const MlpArgs& a, Worker& worker) {
  const Size neurons = a.down->rows, tiles = tile_count(neurons, a.tile);
  const bool batch = in_batch(*a.down, a.tile, a.rows, a.selection);
  const Coefficients whole(worker.shared, neurons, a.tile, a.rows);
  const Partials partials(worker.shared, tiles, a.rows, a.down->columns);
  const Use use = use_of(a.selection, 1);
  int32_t* listed = (int32_t*)worker.local;
  float* active = worker.local + a.tile;
  float* linear = active + a.rows * a.tile;
  const bool int8 = a.up->dtype == Dtype::int8 || (a.gate && a.gate->dtype == Dtype::int8);
  const Inputs x(a.x, a.rows, a.up->columns, int8, linear + a.rows * a.tile);
  const Matrix& inner = a.gate ? *a.gate : *a.up;
  const float* inner_bias = a.gate ? a.gate_bias : a.up_bias;
  worker.share(tiles, [&](Size t) {
    const Size first = t * a.tile;
    const Size last = first + a.tile < neurons ? first + a.tile : neurons;
    Size count = list_range(a.selection, 1, first, last, listed);
    dots(inner, listed, count, count, x, use, inner_bias, active, a.tile);
    // A neuron that a row does not use comes as 0, and every activation leaves 0 at 0.
    for (Size r = 0; r < a.rows; ++r)
      activate(a.activation, a.threshold, active + r * a.tile, count);
    // Without a selection everything is read: the dense arm must not profit from zeros.
    const bool skip = a.selection != nullptr;
    if (skip && a.gate && closes(a.activation))
      count = drop_zeros(listed, active, count, a.tile, a.rows);
    if (a.gate) {
      dots(*a.up, listed, count, count, x, use, a.up_bias, linear, a.tile);
      for (Size r = 0; r < a.rows; ++r)
        for (Size k = 0; k < count; ++k) active[r * a.tile + k] *= linear[r * a.tile + k];
    }
    Size used = count;
    if (skip && batch && a.selection->active)
      used = count_used(active, count, a.tile, a.rows);
    else if (skip && !batch)
      used = count = drop_zeros(listed, active, count, a.tile, a.rows);
    if (skip && a.selection->active)
      __atomic_fetch_add(a.selection->active, (int64_t)used, __ATOMIC_RELAXED);
    if (a.down->scale) {
      float* scale = linear;
      for (Size k = 0; k < count; ++k) scale[k] = a.down->scale[listed[k]];
      for (Size r = 0; r < a.rows; ++r)
        for (Size k = 0; k < count; ++k) active[r * a.tile + k] *= scale[k];
    }
    if (batch) return whole.put(*a.down, t, listed, count, active);
    partials.fill(t, *a.down, listed, count, active, a.tile, skip);
  });
  if (batch) return whole.add_up(*a.down, a.down_bias, a.residual, a.out, worker);
  partials.reduce(a.down_bias, a.residual, a.out, worker);
}

}  // namespace dejavu::DEJAVU_ISA
