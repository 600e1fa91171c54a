#include "neuron_cache.h"

#include <algorithm>
#include <cmath>
#include <thread>

namespace dejavu {
namespace {

constexpr size_t kBatchShare = 16;  // a search for victims finds this share of the slots at once
constexpr int64_t kRescale = 512; // half-lives after which values are brought back near 1
constexpr double kPinned = 1e300;

}  // namespace

NeuronCache::NeuronCache(FlashReader& reader, uint8_t* arena, Size slots, Size record, Size layers,
                         const int64_t* first, const int64_t* offsets, int32_t* places,
                         double half_life)
    : reader_(reader), arena_(arena), record_(record), first_(first), offsets_(offsets),
      places_(places), half_life_(half_life), slots_((size_t)slots), steps_((size_t)layers, 0),
      serial_((size_t)layers, 0), ticket_((size_t)layers, 0), open_((size_t)layers, 0),
      begun_((size_t)layers), seen_((size_t)first[layers], 0) {
  for (std::atomic<bool>& begun : begun_) begun = false;
  std::fill(places, places + first[layers], -1);
}

NeuronCache::~NeuronCache() {
  for (const int64_t ticket : ticket_)
    if (ticket) reader_.wait(ticket);
}

bool NeuronCache::held(const Slot& slot) const {
  return slot.layer >= 0 && open_[(size_t)slot.layer] &&
         slot.stamp == serial_[(size_t)slot.layer];
}

// The slots of least value, in order; those in use stay out.
void NeuronCache::refill() {
  victims_.clear();
  for (size_t slot = 0; slot < slots_.size(); ++slot)
    if (!held(slots_[slot])) victims_.emplace_back(slots_[slot].value, (int32_t)slot);
  const size_t count = std::min(victims_.size(), slots_.size() / kBatchShare + 16);
  std::nth_element(victims_.begin(), victims_.begin() + (ptrdiff_t)count, victims_.end());
  victims_.resize(count);
  std::sort(victims_.rbegin(), victims_.rend());
}

int32_t NeuronCache::free_slot() {
  if (filled_ < slots_.size()) return (int32_t)filled_++;
  for (bool again = true;; again = false) {
    while (!victims_.empty()) {
      const auto [value, number] = victims_.back();
      victims_.pop_back();
      // One that was used since the search is not a victim any more.
      const Slot& slot = slots_[(size_t)number];
      if (slot.value == value && !held(slot)) return number;
    }
    if (!again) return -1;
    refill();
  }
}

void NeuronCache::touch(Slot& slot, Size layer) {
  slot.value += use_;
  slot.stamp = serial_[(size_t)layer];
}

bool NeuronCache::begin(Size layer, const Selection* selection) {
  const size_t at = (size_t)layer;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (++steps_[at] > clock_) {
    clock_ = steps_[at];
    if (clock_ - epoch_ > (int64_t)(half_life_ * kRescale)) {
      const double factor = std::exp2(-(double)(clock_ - epoch_) / half_life_);
      for (Slot& slot : slots_)
        if (slot.value < kPinned) slot.value *= factor;
      for (double& value : seen_) value *= factor;
      victims_.clear();
      epoch_ = clock_;
    }
    use_ = std::exp2((double)(clock_ - epoch_) / half_life_);
  }
  serial_[at] = ++begins_;
  open_[at] = true;
  from_.clear();
  to_.clear();
  entered_.clear();
  int32_t* places = places_ + first_[at];
  const Size neurons = first_[at + 1] - first_[at];
  const auto want = [&](Size neuron) {
    ++counters_.wanted;
    const int32_t slot = places[neuron];
    if (slot >= 0) return touch(slots_[(size_t)slot], layer);
    entered_.push_back((int32_t)neuron);
  };
  // First all that is there, so that nothing of it is given up for what is not.
  if (!selection)
    for (Size neuron = 0; neuron < neurons; ++neuron) want(neuron);
  else
    for (Size t = 0; t < selection->tiles(); ++t)
      for (Size k = 0; k < selection->counts[t]; ++k)
        want(selection->indices[t * selection->tile + k]);
  counters_.missed += (int64_t)entered_.size();
  for (size_t i = 0; i < entered_.size(); ++i) {
    const int32_t neuron = entered_[i], number = free_slot();
    if (number < 0) {
      entered_.resize(i);
      forget(layer);
      return false;
    }
    Slot& slot = slots_[(size_t)number];
    if (slot.owner >= 0) {
      places_[slot.owner] = -1;
      seen_[(size_t)slot.owner] = slot.value;
    }
    const int64_t named = first_[at] + neuron;
    slot.owner = (int32_t)named;
    slot.layer = (int32_t)layer;
    slot.value = seen_[(size_t)named];
    touch(slot, layer);
    places[neuron] = number;
    from_.push_back(offsets_[named]);
    to_.push_back((uint64_t)(arena_ + (Size)number * record_));
  }
  lengths_.assign(from_.size(), record_);
  ticket_[at] = from_.empty() ? 0
                              : reader_.submit(from_.data(), lengths_.data(), to_.data(),
                                               from_.size());
  return true;
}

// A begin that did not bring its neurons: none of the layer's is taken for present afterwards.
void NeuronCache::forget(Size layer) {
  const size_t at = (size_t)layer;
  for (Slot& slot : slots_)
    if (slot.layer == layer && slot.owner >= 0) {
      places_[slot.owner] = -1;
      slot = {};
    }
  victims_.clear();
  open_[at] = false;
  ticket_[at] = 0;
}

Outcome NeuronCache::finish(Size layer) {
  int64_t ticket;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ticket = std::exchange(ticket_[(size_t)layer], 0);
  }
  begun_[(size_t)layer] = false;
  if (!ticket) return {};
  const Outcome outcome = reader_.wait(ticket);
  if (outcome.fault != FlashFault::none) {
    const std::lock_guard<std::mutex> lock(mutex_);
    forget(layer);
  }
  return outcome;
}

void NeuronCache::release(Size layer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  open_[(size_t)layer] = false;
}

bool NeuronCache::act(NeuronStep step, Size layer, const Selection* selection) {
  switch (step) {
    case NeuronStep::begin:
      if (begin(layer, selection)) return true;
      failure_.crowded = layer;
      return false;
    case NeuronStep::finish: {
      while (!begun_[(size_t)layer].load(std::memory_order_acquire)) std::this_thread::yield();
      const Outcome outcome = finish(layer);
      if (outcome.fault == FlashFault::none) return true;
      failure_.outcome = outcome;
      return false;
    }
    case NeuronStep::start:
      start();
      return true;
    case NeuronStep::release:
      release(layer);
  }
  return true;
}

void run_neurons(const NeuronArgs& a, Worker& worker) {
  const Size layer = (Size)*a.layer;
  if (layer < 0) return;
  if (a.step == NeuronStep::begin) {
    // The others need not wait while reads are started. One that comes to the finish before that
    // is done sees the fault then.
    worker.once([&] {
      if (!a.cache->act(a.step, layer, a.selection)) worker.fail(Fault::neurons);
      a.cache->begun(layer);
    });
    return;
  }
  if (a.step == NeuronStep::start) return worker.once([&] { a.cache->start(); });
  worker.one(
      [&] {
        if (!a.cache->act(a.step, layer, a.selection)) worker.fail(Fault::neurons);
      },
      [&] { return a.cache->help(); });
}

Scratch scratch_neurons(const NeuronArgs&) { return {}; }

void NeuronCache::pin(const int64_t* neurons, Size count) {
  for (Size i = 0; i < count; ++i) seen_[(size_t)neurons[i]] = kPinned;
}

}  // namespace dejavu
