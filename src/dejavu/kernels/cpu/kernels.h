// What a kernel is called with: plain pointers and sizes, checked by native.py before.
// Shapes as in ops.py: N rows, D hidden size, H query heads, K key/value heads, d head_dim.
#pragma once

#include <cstddef>
#include <cstdint>

#include "team.h"

namespace dejavu {

using Size = std::ptrdiff_t;

constexpr Size kMaxRows = 16;

enum class Dtype : int { fp32, bf16, int8 };

struct Matrix {  // [rows, columns], row-major; scale [rows] for int8
  const void* data;
  const float* scale;
  Dtype dtype;
  Size rows, columns;
  // Rows that lie in slots: row i begins places[i] * stride elements from data on. Null: in order.
  const int32_t* places = nullptr;
  Size stride = 0;
  Size start(Size row) const { return places ? places[row] * stride : row * columns; }
};

struct Selection {  // see selection.py; select writes it, everything else reads it
  Size entries, tile;
  int32_t* indices;
  int32_t* counts;
  uint8_t* mask;    // [N, entries] or null
  int64_t* active;  // [1] or null: mlp adds the listed neurons that are not 0
  Size tiles() const { return (entries + tile - 1) / tile; }
};

enum class Activation : int { relu, relu2, silu, gelu, gelu_tanh, fatrelu };

struct EmbedArgs {
  const int64_t* ids;
  Size rows;
  const Matrix* table;
  float* out;
};

struct AddArgs {
  const float *x, *y;
  Size size;
  float* out;
};

struct NormArgs {  // weight and bias may be null
  const float *x, *weight, *bias;
  float eps;
  Size rows, width;
  float* out;
};

struct LinearPart {
  const Matrix* weight;
  const float* bias;
  const Selection* selection;  // among weight->rows / block blocks, or null
  float* out;                  // [N, weight->rows]
};

struct LinearArgs {
  const float* x;
  Size rows, width;
  const LinearPart* parts;
  Size part_count;
};

struct CombineArgs {
  const float* x;  // [N, weight->rows]
  Size rows;
  const Matrix* weight;
  const float *bias, *residual;
  const Selection* selection;
  Size tile;  // input channels a partial sum covers
  float* out;
};

struct MlpArgs {
  const float* x;
  Size rows;
  const Matrix *up, *gate, *down;  // gate may be null
  const float *up_bias, *gate_bias, *down_bias, *residual;
  Activation activation;
  float threshold;
  const Selection* selection;
  Size tile;
  float* out;
};

struct RopeArgs {
  const float* x;  // [N, heads, head_dim]
  const int64_t* positions;
  const float *cos, *sin;  // [max_positions, half]
  Size rows, heads, head_dim, half, max_positions;
  float* out;
};

struct AttentionArgs {
  const float *q, *k, *v;
  Size rows, heads, groups, head_dim;
  void *keys, *values;  // [blocks, block_size, K, d]
  Dtype cache;          // of keys and values: fp32 or bf16
  Size blocks, block_size;
  const int32_t *block_table, *lengths;
  Size max_blocks;
  float scale;
  Size window;  // 0: none
  const Selection* selection;
  int32_t* arrivals;  // [N, K], 0 between runs: spans finished of a row and group
  float* out;
};

struct SelectArgs {
  const float* x;  // [N, weight->columns]
  Size rows;
  const Matrix* weight;
  const float* bias;
  Selection out;
};

struct SelectSignsArgs {
  const float* x;  // [N, width]
  Size rows, width;
  const uint64_t* signs;  // [entries, words]
  const int32_t* thresholds;
  Selection out;
};

struct SelectNibblesArgs {
  const float* x;  // [N, width]
  Size rows, width, rank;
  const uint8_t *first, *second;  // 4-bit rows in blocks of 8, see nibbles.cpp
  const float *scales, *limits;   // [rank], [entries]
  Selection out;
};

struct TallyArgs {
  const Selection* selection;
  Size rows;
  int64_t* counter;
};

struct ArgmaxArgs {
  const float* x;
  Size rows, width;
  int64_t* out;
};

struct ChooseArgs {
  const float* x;  // [N, out.entries]
  Size rows;
  const float* floors;  // [out.entries]: magnitudes below are left out
  const int64_t* positions;  // [N] or null: rows at places before `whole` keep everything
  int64_t whole;
  Selection out;
  int64_t* counter;  // [3] or null: entries read, used and rows are added
};

constexpr Size kMaxParts = 3;

struct ProjectArgs {
  const float* x;  // [N, weight->rows]
  Size rows;
  const Matrix* weight;  // by input channel, its columns the outputs of all parts side by side
  const float* bias;     // [weight->columns] or null
  const Selection* selection;
  Size tile;  // input channels a partial sum covers
  bool gated;  // the halves are gate and up: outs[0] = activation(gate) * up
  Activation activation;
  float threshold;
  Size part_count;
  Size widths[kMaxParts];
  float* outs[kMaxParts];  // [N, widths[part]]
};

// Floats of scratch a kernel needs: `shared` once, `local` for each thread.
struct Scratch {
  Size shared = 0, local = 0;
};

#define DEJAVU_KERNELS(X)    \
  X(embed, EmbedArgs)        \
  X(add, AddArgs)            \
  X(layer_norm, NormArgs)    \
  X(rms_norm, NormArgs)      \
  X(linear, LinearArgs)      \
  X(combine, CombineArgs)    \
  X(mlp, MlpArgs)            \
  X(rope, RopeArgs)          \
  X(attention, AttentionArgs) \
  X(select, SelectArgs)      \
  X(select_signs, SelectSignsArgs) \
  X(select_nibbles, SelectNibblesArgs) \
  X(tally, TallyArgs)        \
  X(choose, ChooseArgs)      \
  X(project, ProjectArgs)    \
  X(argmax, ArgmaxArgs)

template <class Args>
struct Kernel {
  void (*run)(const Args&, Worker&);
  Scratch (*scratch)(const Args&);
};

struct KernelTable {
  const char* isa;
  float (*stream_sum)(const float* data, Size size);
#define DEJAVU_FIELD(name, Args) Kernel<Args> name;
  DEJAVU_KERNELS(DEJAVU_FIELD)
#undef DEJAVU_FIELD
};

#define DEJAVU_DECLARE_ISA(isa)                                    \
  namespace isa {                                                  \
  DEJAVU_KERNELS(DEJAVU_DECLARE_KERNEL)                            \
  float stream_sum(const float* data, Size size);                  \
  const KernelTable& table();                                      \
  }
#define DEJAVU_DECLARE_KERNEL(name, Args)  \
  void run_##name(const Args&, Worker&);   \
  Scratch scratch_##name(const Args&);

DEJAVU_DECLARE_ISA(portable)
DEJAVU_DECLARE_ISA(avx2)
DEJAVU_DECLARE_ISA(avx512)

}  // namespace dejavu
