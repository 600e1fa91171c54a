// Decode attention over the paged cache: one query token a row, of one sequence or of several.
//
// The positions a token sees are cut into spans of kSpan, counted from the first one it sees. A
// span of a row and some neighbouring groups is an item of work; for each group it leaves the
// largest score, the sum of exponentials and the weighted values, and the thread that finishes the
// last span merges them in order. So long contexts spread over the threads even for one row, and
// the bits depend on the row alone. Groups go together because a position's heads lie together: one
// group alone reads a cache line or two here and there.

#include <cmath>

#include "dots.h"

namespace dejavu::DEJAVU_ISA {
namespace {

constexpr Size kSpan = 64;
constexpr Size kTogether = 16;   // positions whose keys (values) are handled in one go
constexpr Size kScoreRows = 32;  // rows of scores an item may hold
constexpr Size kItems = 4;       // a thread should get, where there are so many

struct Extent {
  Size first, length, spans;
};

Extent extent_of(const AttentionArgs& a, Size row) {
  const Size length = a.lengths[row];
  const Size first = a.window > 0 && length > a.window ? length - a.window : 0;
  return {first, length, (length - first + kSpan - 1) / kSpan};
}

Size max_spans(const AttentionArgs& a) {
  const Size capacity = a.max_blocks * a.block_size;
  const Size seen = a.window > 0 && a.window < capacity ? a.window : capacity;
  return (seen + kSpan - 1) / kSpan;
}

// A finished span: [queries of a group][largest, sum, then head_dim values].
Size part_size(const AttentionArgs& a) {
  return (a.heads / a.groups) * (a.head_dim + 2);
}

bool is_used(const AttentionArgs& a, Size row, Size group) {
  if (!a.selection) return true;
  const Selection& s = *a.selection;
  if (s.mask) return s.mask[row * s.entries + group];
  const Size t = group / s.tile;
  for (Size k = 0; k < s.counts[t]; ++k)
    if (s.indices[t * s.tile + k] == group) return true;
  return false;
}

Size slot_of(const AttentionArgs& a, Size row, Size position) {
  const Size block = a.block_table[row * a.max_blocks + position / a.block_size];
  return block * a.block_size + position % a.block_size;
}

// Every length and every block in use lies inside the cache.
Fault check(const AttentionArgs& a) {
  for (Size row = 0; row < a.rows; ++row) {
    const Size length = a.lengths[row];
    if (length < 0 || length > a.max_blocks * a.block_size) return Fault::length;
    for (Size b = 0; b * a.block_size < length; ++b) {
      const Size block = a.block_table[row * a.max_blocks + b];
      if (block < 0 || block >= a.blocks) return Fault::block;
    }
  }
  return Fault::none;
}

// Where positions [first, last) of a row lie in the cache: their first group's keys and values.
void locate(const AttentionArgs& a, Size row, Size first, Size last, Size* at) {
  const int32_t* block = a.block_table + row * a.max_blocks + first / a.block_size;
  Size offset = first % a.block_size;
  for (Size p = first; p < last; ++p) {
    *at++ = (*block * a.block_size + offset) * a.groups * a.head_dim;
    if (++offset == a.block_size) {
      offset = 0;
      ++block;
    }
  }
}

// The step's own key or value enters the cache.
void enter(const AttentionArgs& a, void* cache, Size to, const float* from) {
  if (a.cache == Dtype::bf16) {
    Bf16* rounded = (Bf16*)cache + to;
    for (Size i = 0; i < a.head_dim; ++i) rounded[i] = to_bf16(from[i]);
  } else {
    std::memcpy((float*)cache + to, from, (size_t)a.head_dim * sizeof(float));
  }
}

void enter(const AttentionArgs& a, Size row, Size group) {
  const Size to = (slot_of(a, row, a.lengths[row] - 1) * a.groups + group) * a.head_dim;
  const Size from = (row * a.groups + group) * a.head_dim;
  enter(a, a.keys, to, a.k + from);
  enter(a, a.values, to, a.v + from);
}

// Scaled scores to exponentials below the largest, in place; {largest, their sum}.
void soften(float* scores, Size size, float scale, float* result) {
  Vec tops = broadcast(-__builtin_inff());
  Size p = 0;
  for (; p + Vec::width <= size; p += Vec::width) {
    const Vec scaled = load(scores + p) * broadcast(scale);
    store(scores + p, scaled);
    tops = max(scaled, tops);  // in this order a NaN is passed over, and comes back below
  }
  float top = largest(tops);
  for (; p < size; ++p) {
    scores[p] *= scale;
    top = scores[p] > top ? scores[p] : top;
  }
  Vec total = zero();
  for_vectors(0, size, [&](Size at, Size n) {
    const Vec weight = exp(load(scores + at, n) - broadcast(top));
    store(scores + at, weight, n);
    total = total + (n == Vec::width ? weight : load(scores + at, n));
  });
  result[0] = top;
  result[1] = sum(total);
}

// Fetches a span's keys, then its values, in the order in which they lie in memory.
template <class K>
class SpanFetch {
 public:
  SpanFetch(const K* keys, const K* values, const Size* at, Size size, const Size* groups,
            Size group_count, Size dim)
      : cache_(keys), values_(values), at_(at), size_(size), groups_(groups),
        group_count_(group_count), dim_(dim) {}

  // So many more pieces, each the keys (values) of one group at one position.
  void next(Size pieces) {
    while (pieces > 0 && position_ < size_) {
      const K* row = cache_ + at_[position_];
      const Size left = group_count_ - group_, taken = pieces < left ? pieces : left;
      pieces -= taken;
      for (const Size stop = group_ + taken; group_ < stop; ++group_) {
        const K* piece = row + groups_[group_] * dim_;
        for (Size i = 0; i < dim_; i += kLine / (Size)sizeof(K)) prefetch(piece + i);
      }
      if (group_ < group_count_) return;
      group_ = 0;
      if (++position_ < size_ || cache_ == values_) continue;
      position_ = 0;
      cache_ = values_;
    }
  }

 private:
  const K *cache_, *values_;
  const Size* at_;
  Size size_;
  const Size* groups_;
  Size group_count_, dim_, position_ = 0, group_ = 0;
};

// out[p] = keys[p] . query for p < count, N whole vectors long: the sums of dot_grid, without what
// it does for long rows, which takes longer than a head's few vectors.
template <class K, int N>
DEJAVU_LOOP void score(const K* const* keys, Size offset, const float* query, Size count,
                       float* out) {
  Vec q[N];
  for (int i = 0; i < N; ++i) q[i] = load(query + i * Vec::width);
  const auto four = [&](const K* const* from, float* to) __attribute__((always_inline)) {
    Vec totals[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      Vec chain[kChains] = {zero(), zero()};
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i)
        chain[i % kChains] =
            fma(q[i], load(from[j] + offset + i * Vec::width), chain[i % kChains]);
      totals[j] = chain[0] + chain[1];
    }
    sum_four(totals, to);
  };
  Size p = 0;
  for (; p + 4 <= count; p += 4) four(keys + p, out + p);
  if (p == count) return;
  const K* last[4];
  float results[4];
  for (Size k = 0; k < 4; ++k) last[k] = keys[p + k < count ? p + k : count - 1];
  four(last, results);
  for (Size k = 0; p + k < count; ++k) out[p + k] = results[k];
}

// Scores of `count` queries of a group with `together` keys, [count][kSpan].
template <class K>
inline void score_rows(const K* const* keys, Size offset, Size together, const float* const* q,
                       Size count, Size dim, float* out) {
  if (count == 1 && dim == 4 * Vec::width)
    return score<K, 4>(keys, offset, q[0], together, out);
  if (count == 1 && dim == 8 * Vec::width)
    return score<K, 8>(keys, offset, q[0], together, out);
  const K* own[kTogether];
  for (Size k = 0; k < together; ++k) own[k] = keys[k] + offset;
  dot_grid(own, together, together, q, count, dim, out, kSpan);
}

// out[0..N vectors) += sum over p < count of weights[p] * rows[p], in order.
template <class K, int N>
DEJAVU_LOOP void weigh(const K* const* rows, Size offset, const float* weights, Size count,
                       float* out) {
  Vec total[N];
  for (int i = 0; i < N; ++i) total[i] = load(out + i * Vec::width);
  for (Size p = 0; p < count; ++p) {
    const Vec weight = broadcast(weights[p]);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i)
      total[i] = fma(weight, load(rows[p] + offset + i * Vec::width), total[i]);
  }
  for (int i = 0; i < N; ++i) store(out + i * Vec::width, total[i]);
}

// From element `offset` of the rows on, `dim` long.
template <class K>
inline void weigh_rows(const K* const* rows, Size offset, const float* weights, Size count,
                       float* out, Size dim) {
  Size at = 0;
  const auto pass = [&](auto vectors) {
    constexpr int N = decltype(vectors)::value;
    for (; at + N * Vec::width <= dim; at += N * Vec::width)
      weigh<K, N>(rows, offset + at, weights, count, out + at);
  };
  pass(std::integral_constant<int, 8>());
  pass(std::integral_constant<int, 4>());
  pass(std::integral_constant<int, 2>());
  pass(std::integral_constant<int, 1>());
  if (const Size rest = dim - at) {
    Vec total = load_partial(out + at, rest);
    for (Size p = 0; p < count; ++p)
      total = fma(broadcast(weights[p]), load_partial(rows[p] + offset + at, rest), total);
    store_partial(out + at, total, rest);
  }
}

// One span of the numbered groups; their results go to part(group). K: of the cache, fp32 or bf16.
template <class K, class Part>
void attend_span(const AttentionArgs& a, Size row, const Size* groups, Size group_count, Size first,
                 Size last, float* scores, Part&& part) {
  const Size queries = a.heads / a.groups, dim = a.head_dim, size = last - first;
  Size at[kSpan];
  locate(a, row, first, last, at);
  const K* const all_keys = (const K*)a.keys;
  const K* const all_values = (const K*)a.values;
  SpanFetch<K> ahead(all_keys, all_values, at, size, groups, group_count, dim);
  ahead.next(kTogether * group_count);
  for (Size h = 0; h < queries; h += kMaxRows) {
    const Size count = queries - h < kMaxRows ? queries - h : kMaxRows;
    const float* q[kMaxRows];
    const K* stored[kTogether];
    const auto point = [&](const K* cache, Size from) {
      const Size together = size - from < kTogether ? size - from : kTogether;
      for (Size k = 0; k < together; ++k) stored[k] = cache + at[from + k];
      return together;
    };
    for (Size from = 0; from < size; from += kTogether) {
      const Size together = point(all_keys, from);
      for (Size n = 0; n < group_count; ++n) {
        if (!h) ahead.next(kTogether);
        for (Size i = 0; i < count; ++i)
          q[i] = a.q + (row * a.heads + groups[n] * queries + h + i) * dim;
        score_rows(stored, groups[n] * dim, together, q, count, dim,
                   scores + n * count * kSpan + from);
      }
    }
    for (Size n = 0; n < group_count; ++n)
      for (Size i = 0; i < count; ++i) {
        float* result = part(groups[n]) + (h + i) * (dim + 2);
        soften(scores + (n * count + i) * kSpan, size, a.scale, result);
        std::memset(result + 2, 0, (size_t)dim * sizeof(float));
      }
    for (Size from = 0; from < size; from += kTogether) {
      const Size together = point(all_values, from);
      for (Size n = 0; n < group_count; ++n) {
        if (!h) ahead.next(kTogether);
        for (Size i = 0; i < count; ++i)
          weigh_rows(stored, groups[n] * dim, scores + (n * count + i) * kSpan + from, together,
                     part(groups[n]) + (h + i) * (dim + 2) + 2, dim);
      }
    }
  }
}

void merge(const AttentionArgs& a, Size row, Size group, Size spans, const float* parts) {
  const Size queries = a.heads / a.groups, dim = a.head_dim;
  for (Size h = 0; h < queries; ++h) {
    const auto part = [&](Size s) { return parts + s * part_size(a) + h * (dim + 2); };
    float top = part(0)[0];
    for (Size s = 1; s < spans; ++s) top = part(s)[0] > top ? part(s)[0] : top;
    float* out = a.out + (row * a.heads + group * queries + h) * dim;
    float total = 0;
    for (Size s = 0; s < spans; ++s) {
      const float factor = std::exp(part(s)[0] - top);
      total += part(s)[1] * factor;
      for (Size i = 0; i < dim; ++i)
        out[i] = (s ? out[i] : 0.0f) + part(s)[2 + i] * factor;
    }
    const float inverse = 1.0f / total;
    for (Size i = 0; i < dim; ++i) out[i] *= inverse;
  }
}

// Groups an item: neighbours, but with so many spans in all enough items for every thread.
Size groups_together(const AttentionArgs& a, Size spans, int threads) {
  const Size queries = a.heads / a.groups;
  const Size room = kScoreRows / (queries < kMaxRows ? queries : kMaxRows);
  const Size fair = a.groups * spans / (kItems * threads);
  const Size most = fair < room ? fair : room;
  return most < 1 ? 1 : most > a.groups ? a.groups : most;
}

}  // namespace

Scratch scratch_attention(const AttentionArgs& a) {
  return {a.rows * a.groups * max_spans(a) * part_size(a), kScoreRows * kSpan};
}

void run_attention(const AttentionArgs& a, Worker& worker) {
  // Every thread checks for itself: reading a few hundred numbers is cheaper than a phase.
  if (const Fault fault = check(a); fault != Fault::none) {
    worker.fail(fault);
    return;
  }
  // Several rows may be tokens of one sequence: what they see must be there before any looks.
  const bool before = a.rows > 1;
  if (before)
    worker.share(a.rows, [&](Size row) {
      for (Size group = 0; a.lengths[row] && group < a.groups; ++group) enter(a, row, group);
    });
  const Size queries = a.heads / a.groups, dim = a.head_dim, capacity = max_spans(a);
  Size spans = 0;
  for (Size row = 0; row < a.rows; ++row) spans += extent_of(a, row).spans;
  const Size together = groups_together(a, spans, worker.threads());
  const Size bundles = (a.groups + together - 1) / together;
  // An empty row still has its outputs to clear: one item a bundle.
  const auto items_of = [&](const Extent& e) { return bundles * (e.spans ? e.spans : 1); };
  Size total = 0;
  for (Size row = 0; row < a.rows; ++row) total += items_of(extent_of(a, row));
  worker.share(total, [&](Size item) {
    Size row = 0;
    Extent extent = extent_of(a, row);
    while (item >= items_of(extent)) {
      item -= items_of(extent);
      extent = extent_of(a, ++row);
    }
    const Size bundle = item % bundles, span = item / bundles;
    const Size group_end = (bundle + 1) * together < a.groups ? (bundle + 1) * together : a.groups;
    Size used[kScoreRows], used_count = 0;
    for (Size group = bundle * together; group < group_end; ++group) {
      // The new token lies in the last span; no other item of this step reads it.
      if (!before && span == extent.spans - 1) enter(a, row, group);
      if (extent.spans && is_used(a, row, group))
        used[used_count++] = group;
      else if (span == 0)
        std::memset(a.out + (row * a.heads + group * queries) * dim, 0,
                    (size_t)(queries * dim) * sizeof(float));
    }
    if (!used_count) return;
    const auto parts = [&](Size group) {
      return worker.shared + (row * a.groups + group) * capacity * part_size(a);
    };
    const Size first = extent.first + span * kSpan;
    const Size last = first + kSpan < extent.length ? first + kSpan : extent.length;
    const auto part = [&](Size group) { return parts(group) + span * part_size(a); };
    if (a.cache == Dtype::bf16)
      attend_span<Bf16>(a, row, used, used_count, first, last, worker.local, part);
    else
      attend_span<float>(a, row, used, used_count, first, last, worker.local, part);
    if (extent.spans > 1) {
      int32_t* arrivals = a.arrivals + row * a.groups + bundle;
      if (__atomic_add_fetch(arrivals, 1, __ATOMIC_ACQ_REL) < extent.spans) return;
      __atomic_store_n(arrivals, 0, __ATOMIC_RELAXED);
    }
    for (Size n = 0; n < used_count; ++n) merge(a, row, used[n], extent.spans, parts(used[n]));
  });
}

}  // namespace dejavu::DEJAVU_ISA
