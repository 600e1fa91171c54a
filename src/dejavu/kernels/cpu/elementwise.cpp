// What is small beside the matrices: embedding, sums, norms, rotary positions, argmax, tally.

#include <cmath>

#include "dots.h"

namespace dejavu::DEJAVU_ISA {
namespace {

// Numbers an item: a few of them cost about what handing out an item does.
constexpr Size kPiece = 4096;

Size pieces_of(Size size) { return (size + kPiece - 1) / kPiece; }

Size end_of(Size piece, Size size) {
  return (piece + 1) * kPiece < size ? (piece + 1) * kPiece : size;
}

// each(r) for every row, short rows several an item.
template <class Each>
void share_rows(Worker& worker, Size rows, Size width, Each&& each) {
  const Size together = width < kPiece ? kPiece / width : 1;
  worker.share((rows + together - 1) / together, [&](Size item) {
    for (Size r = item * together; r < rows && r < (item + 1) * together; ++r) each(r);
  });
}

// The first n lanes, 0 in the others.
inline Vec first_lanes(Vec a, Size n) {
  if (n == Vec::width) return a;
  float lanes[Vec::width] = {};
  store_partial(lanes, a, n);
  return load(lanes);
}

template <class Term>
float sum_over(Size width, Term&& term) {
  Vec acc[2] = {zero(), zero()};
  Size i = 0;
  for (; i + 2 * Vec::width <= width; i += 2 * Vec::width) {
    acc[0] = acc[0] + term(i, (Size)Vec::width);
    acc[1] = acc[1] + term(i + Vec::width, (Size)Vec::width);
  }
  if (i + Vec::width <= width) {
    acc[0] = acc[0] + term(i, (Size)Vec::width);
    i += Vec::width;
  }
  if (i < width) acc[1] = acc[1] + term(i, width - i);
  return sum(acc[0] + acc[1]);
}

template <class W>
void embed_row(const Matrix& table, Size id, float* out) {
  const W* row = (const W*)table.data + id * table.columns;
  const Vec scale = broadcast(table.scale ? table.scale[id] : 1.0f);
  for_vectors(0, table.columns, [&](Size i, Size lanes) {
    store(out + i, load(row + i, lanes) * scale, lanes);
  });
}

// Greater, a NaN being greater than any number, as in torch.argmax; never between equals.
inline bool beats(float challenger, float holder) {
  return challenger > holder || (challenger != challenger && holder == holder);
}

}  // namespace

Scratch scratch_embed(const EmbedArgs&) { return {}; }
Scratch scratch_add(const AddArgs&) { return {}; }
Scratch scratch_layer_norm(const NormArgs&) { return {}; }
Scratch scratch_rms_norm(const NormArgs&) { return {}; }
Scratch scratch_rope(const RopeArgs&) { return {}; }
Scratch scratch_tally(const TallyArgs&) { return {}; }

void run_embed(const EmbedArgs& a, Worker& worker) {
  const Matrix& table = *a.table;
  worker.share(a.rows, [&](Size r) {
    const int64_t id = a.ids[r];
    if (id < 0 || id >= table.rows) return worker.fail(Fault::token_id);
    with_dtype(table.dtype, [&](auto* type) {
      using W = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
      embed_row<W>(table, id, a.out + r * table.columns);
    });
  });
}

void run_add(const AddArgs& a, Worker& worker) {
  worker.share(pieces_of(a.size), [&](Size piece) {
    for_vectors(piece * kPiece, end_of(piece, a.size), [&](Size i, Size lanes) {
      store(a.out + i, load(a.x + i, lanes) + load(a.y + i, lanes), lanes);
    });
  });
}

void run_layer_norm(const NormArgs& a, Worker& worker) {
  share_rows(worker, a.rows, a.width, [&](Size r) {
    const float* x = a.x + r * a.width;
    float* out = a.out + r * a.width;
    const float total = sum_over(a.width, [&](Size i, Size n) { return load(x + i, n); });
    const Vec mean = broadcast(total / (float)a.width);
    const float squares = sum_over(a.width, [&](Size i, Size n) {
      const Vec d = first_lanes(load(x + i, n) - mean, n);
      return d * d;
    });
    const Vec factor = broadcast(1.0f / std::sqrt(squares / (float)a.width + a.eps));
    for_vectors(0, a.width, [&](Size i, Size n) {
      Vec y = (load(x + i, n) - mean) * factor;
      if (a.weight) y = y * load(a.weight + i, n);
      if (a.bias) y = y + load(a.bias + i, n);
      store(out + i, y, n);
    });
  });
}

void run_rms_norm(const NormArgs& a, Worker& worker) {
  share_rows(worker, a.rows, a.width, [&](Size r) {
    const float* x = a.x + r * a.width;
    float* out = a.out + r * a.width;
    const float squares = sum_over(a.width, [&](Size i, Size n) {
      const Vec v = load(x + i, n);
      return v * v;
    });
    const Vec factor = broadcast(1.0f / std::sqrt(squares / (float)a.width + a.eps));
    for_vectors(0, a.width, [&](Size i, Size n) {
      store(out + i, load(x + i, n) * factor * load(a.weight + i, n), n);
    });
  });
}

void run_rope(const RopeArgs& a, Worker& worker) {
  share_rows(worker, a.rows, a.heads * a.head_dim, [&](Size r) {
    const int64_t position = a.positions[r];
    if (position < 0 || position >= a.max_positions) return worker.fail(Fault::position);
    const float* cos = a.cos + position * a.half;
    const float* sin = a.sin + position * a.half;
    for (Size head = 0; head < a.heads; ++head) {
      const float* x = a.x + (r * a.heads + head) * a.head_dim;
      float* out = a.out + (r * a.heads + head) * a.head_dim;
      for_vectors(0, a.half, [&](Size i, Size n) {
        const Vec low = load(x + i, n), high = load(x + a.half + i, n);
        const Vec c = load(cos + i, n), s = load(sin + i, n);
        store(out + i, low * c - high * s, n);
        store(out + a.half + i, high * c + low * s, n);
      });
      for (Size i = 2 * a.half; i < a.head_dim; ++i) out[i] = x[i];
    }
  });
}

void run_tally(const TallyArgs& a, Worker& worker) {
  worker.share(1, [&](Size) {
    const Selection& s = *a.selection;
    int64_t read = 0, used = 0;
    for (Size t = 0; t < s.tiles(); ++t) read += s.counts[t];
    if (s.mask) {
      for (Size i = 0; i < a.rows * s.entries; ++i) used += s.mask[i];
    } else {
      used = read * a.rows;
    }
    a.counter[0] += read;
    a.counter[1] += used;
    a.counter[2] += a.rows;
  });
}

// The best place of each row and piece, as int32 in the scratch of floats.
Scratch scratch_argmax(const ArgmaxArgs& a) { return {a.rows * pieces_of(a.width), 0}; }

void run_argmax(const ArgmaxArgs& a, Worker& worker) {
  const Size pieces = pieces_of(a.width);
  int32_t* places = (int32_t*)worker.shared;
  worker.share(a.rows * pieces, [&](Size item) {
    const float* x = a.x + item / pieces * a.width;
    const Size first = item % pieces * kPiece;
    Size best = first;
    for_vectors(first, end_of(item % pieces, a.width), [&](Size i, Size n) {
      constexpr uint32_t all = (1u << Vec::width) - 1;
      if (n == Vec::width && less_bits(load(x + i), broadcast(x[best])) == all) return;
      for (Size k = i; k < i + n; ++k)
        if (beats(x[k], x[best])) best = k;
    });
    places[item] = (int32_t)best;
  });
  worker.share(1, [&](Size) {
    for (Size r = 0; r < a.rows; ++r) {
      const float* x = a.x + r * a.width;
      const int32_t* place = places + r * pieces;
      Size best = place[0];
      for (Size piece = 1; piece < pieces; ++piece)
        if (beats(x[place[piece]], x[best])) best = place[piece];
      a.out[r] = best;
    }
  });
}

float stream_sum(const float* data, Size size) {
  Vec acc[8];
  for (auto& v : acc) v = zero();
  for (Size i = 0; i + 8 * Vec::width <= size; i += 8 * Vec::width)
    for (Size k = 0; k < 8; ++k) acc[k] = acc[k] + load(data + i + k * Vec::width);
  Vec total = zero();
  for (auto& v : acc) total = total + v;
  return sum(total);
}

}  // namespace dejavu::DEJAVU_ISA
