// Neurons of one file in a fixed number of slots, and which of them to give up for others.
//
// One budget for all layers: every record costs the same to read, so the neuron that is least
// likely to be wanted soon leaves, whichever layer it is of. Likely is what was wanted often and
// lately: a use counts 2^(now / half_life), so a neuron's value is the sum over its uses, each
// halved for every `half_life` steps since, and the order of two values never changes by waiting
// (LRFU, Lee et al. 2001; the window of LLM in a flash, section 3.1, is its short half-life).
// A neuron enters and leaves by its slot alone: the kernels find it through `places`.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "flash.h"
#include "kernels.h"

namespace dejavu {

struct CacheCounters {
  int64_t wanted = 0, missed = 0;  // neurons
};

enum class NeuronStep : int { begin, finish, start, release };

struct StepFailure {
  Outcome outcome;    // of reading
  Size crowded = -1;  // or the layer for which there were too few slots
};

class NeuronCache {
 public:
  // arena: [slots, record] bytes. first: [layers + 1], a layer's first neuron among all. offsets:
  // of every neuron's record in the file. places: of every neuron, its slot or -1; read by the
  // kernels through Matrix. All of them outlive the cache.
  NeuronCache(FlashReader& reader, uint8_t* arena, Size slots, Size record, Size layers,
              const int64_t* first, const int64_t* offsets, int32_t* places, double half_life);
  ~NeuronCache();  // waits for what is under way to the arena
  NeuronCache(const NeuronCache&) = delete;
  NeuronCache& operator=(const NeuronCache&) = delete;

  // Find slots for what a layer needs (all of it for null) and start reading what is missing. What
  // is begun stays in its slots until release(). False when there are too few slots.
  bool begin(Size layer, const Selection* selection);
  // Everything begun for the layer lies in its slots when this returns without a fault.
  Outcome finish(Size layer);
  bool help() { return reader_.help(); }  // of threads that wait for another one's finish()
  void start() { reader_.start(); }  // reading what was begun and had to wait for this layer's
  void release(Size layer);
  // Never give up these neurons of all layers while others can go.
  void pin(const int64_t* neurons, Size count);

  // The same as parts of a recorded step. Threads may be in different ones; who finishes a layer
  // waits until it is begun. False: the step must not go on, and take_failure() tells why, once.
  bool act(NeuronStep step, Size layer, const Selection* selection);
  void begun(Size layer) { begun_[(size_t)layer].store(true, std::memory_order_release); }
  StepFailure take_failure() { return std::exchange(failure_, {}); }

  CacheCounters counters() const { return counters_; }
  void reset_counters() { counters_ = {}; }

 private:
  struct Slot {
    double value = 0;
    int64_t stamp = 0;  // the begin that last wanted it
    int32_t owner = -1, layer = -1;  // -1 while it is empty
  };

  bool held(const Slot& slot) const;
  int32_t free_slot();
  void refill();
  void touch(Slot& slot, Size layer);
  void forget(Size layer);

  FlashReader& reader_;
  uint8_t* arena_;
  Size record_;
  const int64_t *first_, *offsets_;
  int32_t* places_;
  double half_life_;

  std::mutex mutex_;  // of everything below but begun_
  std::vector<Slot> slots_;
  std::vector<int64_t> steps_, serial_, ticket_;  // of a layer
  std::vector<char> open_;
  std::vector<std::atomic<bool>> begun_;
  std::vector<std::pair<double, int32_t>> victims_;  // the next at the back
  std::vector<double> seen_;  // value of a neuron that is not in a slot, when it left
  std::vector<int64_t> from_, lengths_;
  std::vector<uint64_t> to_;
  std::vector<int32_t> entered_;
  size_t filled_ = 0;
  int64_t begins_ = 0, clock_ = 0, epoch_ = 0;
  double use_ = 1;
  CacheCounters counters_;
  StepFailure failure_;
};

struct NeuronArgs {
  NeuronCache* cache;
  NeuronStep step;
  const int64_t* layer;  // read when the step runs; negative: nothing is to be done
  const Selection* selection;
};

// A call in a recorded step, the same for all instruction sets.
void run_neurons(const NeuronArgs& args, Worker& worker);
Scratch scratch_neurons(const NeuronArgs& args);

}  // namespace dejavu
